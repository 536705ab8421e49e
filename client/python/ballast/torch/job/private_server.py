"""The state server of ranks of one host that name none. Of several, rank 0 starts a process, and ends it once no rank needs it; the only
rank has it within its own process."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from ballast import _native, embedded, embedded_daemon, place, temporary
from ballast.errors import Error, warn
from ballast.torch.group import ranks
from ballast.torch.group.together import everyone

_POLL_SECONDS = 0.02

_servers = itertools.count()  # the same on all ranks, which start theirs in one order


class ServerOfOne:
    """The only rank's server, in its process: parameters and gradients go by copies within its memory. It keeps parameters, unlike that
    of embedded.server(), and nobody shares it. Ends with the session."""

    address = None

    def __init__(self, directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None,
                 threads: int | None) -> None:
        self._pid = os.getpid()
        embedded.give_way(directory)
        self._place = place.make(directory, dram, nvme)
        try:
            self.server = _native.Server(self._place.directory, self._place.dram, self._place.nvme, threads or place.processors(),
                                         working_copies=True)
        except BaseException:
            self._remove()
            raise
        self._exit = weakref.finalize(self, self.leave)  # keeps this object; the session's finalizer is newer, and runs before

    def leave(self) -> None:
        """The session is over, or was never opened."""
        if os.getpid() == self._pid and self._exit.detach() is not None:
            self.server.stop()
            self._remove()

    end = leave

    def wait(self) -> None:
        """Nobody else has it."""

    def _remove(self) -> None:
        if self._place.is_temporary:
            temporary.remove(self._place.directory)


class PrivateServer:
    """One rank's hold of the server. Rank 0's ends the server: when every other rank has left it or its process is gone, when `seconds`
    have passed since rank 0 left, or at once where rank 0 has failed or is interrupted."""

    server = None  # in another process

    def __init__(self, address: str, daemon: embedded_daemon.Daemon | None, processes: list[int], store: ranks.Store,
                 seconds: float) -> None:
        """daemon: rank 0's; None on other ranks. processes: process numbers, in rank order. seconds: step_timeout, which bounds any call
        that another rank is amid."""
        self.address = address
        self._daemon, self._processes, self._store, self._seconds = daemon, processes, store, seconds
        self._rank, self._pid = ranks.rank(), os.getpid()
        self._left, self._hurries, self._ended = threading.Event(), threading.Event(), threading.Event()
        if daemon is not None:
            self._exit = weakref.finalize(self, self._at_exit)  # keeps this object; the session's finalizer is newer, and runs before
            # Started now: a process that ends starts no threads.
            threading.Thread(target=self._end_when_left, name='private-server', daemon=True).start()

    def leave(self) -> None:
        """This rank needs the server no more. Waits for no rank, so finalizers may call it."""
        if os.getpid() != self._pid:
            return
        with suppress(RuntimeError):  # rank 0's process is gone, and the server with it
            self._store.set(f'left/{self._rank}', b'')
        self._left.set()

    def wait(self) -> None:
        """Rank 0, which has left: returns when the server has ended. Ctrl-C ends it, and so does a call while an error is handled: the
        other ranks cannot go on without this one."""
        if self._daemon is None or os.getpid() != self._pid:
            return
        if sys.exc_info()[0] is not None:
            self._hurries.set()
        try:
            self._ended.wait()
        except BaseException:
            self._hurries.set()
            self._ended.wait()
            raise

    def end(self) -> None:
        """Rank 0: ends the server, whoever uses it."""
        self._hurries.set()
        self.leave()
        self.wait()

    def _at_exit(self) -> None:
        if getattr(sys, 'last_value', None) is not None:  # an error ends the process
            self._hurries.set()
        self.leave()
        self.wait()

    def _end_when_left(self) -> None:
        self._left.wait()
        until = time.monotonic() + self._seconds
        while there := self._others():
            if time.monotonic() >= until:
                warn(f'rank {there[0]} has not closed its optimizer within {self._seconds:g} s (step_timeout) after rank 0 has: the '
                     'private server ends, and calls of that rank will fail; close it on all ranks, or name servers, which stay')
                break
            if self._hurries.wait(_POLL_SECONDS):
                break
        self._daemon.stop()
        self._exit.detach()
        self._ended.set()

    def _others(self) -> list[int]:
        """Ranks that may still use the server."""
        if self._hurries.is_set():
            return []
        try:
            return [rank for rank, process in enumerate(self._processes)
                    if rank != self._rank and _lives(process) and not self._store.has(f'left/{rank}')]
        except RuntimeError:  # the store is gone, with the launcher say: so are the ranks
            return []


def _lives(process: int) -> bool:
    """Of this host. A zombie does not."""
    try:
        with open(f'/proc/{process}/stat', encoding='utf-8', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(exchange: ranks.Exchange, budgets: dict[str, Any], seconds: float) -> PrivateServer | ServerOfOne:
    """COLLECTIVE. seconds: see PrivateServer."""
    if not ranks.active():
        return ServerOfOne(**budgets)
    said = [each.decode().rpartition(' ') for each in exchange(f'{socket.gethostname()} {os.getpid()}'.encode())]
    hosts = sorted({host for host, _, _ in said})
    if len(hosts) > 1:
        raise Error(f'ranks on {len(hosts)} hosts ({", ".join(hosts)}) and no state servers: start ballastd beside '
                    "your trainers and name them all: servers='host:port,...' or BALLAST_SERVERS", 'BAD_CONFIG')
    daemon = None

    def begin():
        nonlocal daemon
        if ranks.rank() == 0:
            daemon = embedded_daemon.Daemon(**budgets)

    try:
        _, addresses = everyone(exchange, begin, lambda _: b'' if daemon is None else daemon.address.encode())
        store = ranks.Store(f'private/{next(_servers)}')
    except BaseException:
        if daemon is not None:
            daemon.stop()
        raise
    return PrivateServer(addresses[0].decode(), daemon, [int(process) for _, _, process in said], store, seconds)
