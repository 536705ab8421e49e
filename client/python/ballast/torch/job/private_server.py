"""The state server of several ranks of one host that name none: rank 0 starts it, and ends it."""

from __future__ import annotations

import socket
from typing import Any

from ballast import embedded_daemon
from ballast.errors import Error
from ballast.torch.group import ranks
from ballast.torch.group.together import everyone


def start(exchange: ranks.Exchange, budgets: dict[str, Any]) -> tuple[str, embedded_daemon.Daemon | None]:
    """Its address, and rank 0's handle. COLLECTIVE."""
    hosts = sorted({each.decode() for each in exchange(socket.gethostname().encode())})
    if len(hosts) > 1:
        raise Error(f'ranks on {len(hosts)} hosts ({", ".join(hosts)}) and no state servers: start ballastd beside '
                    "your trainers and name them all: servers='host:port,...' or BALLAST_SERVERS", 'BAD_CONFIG')
    daemon = None

    def begin():
        nonlocal daemon
        if ranks.rank() == 0:
            daemon = embedded_daemon.Daemon(**budgets)

    try:
        _, said = everyone(exchange, begin, lambda _: b'' if daemon is None else daemon.address.encode())
    except BaseException:
        if daemon is not None:
            daemon.stop()
        raise
    return said[0].decode(), daemon
