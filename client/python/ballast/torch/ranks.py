"""The ranks that train one job: torch.distributed's default group, if there is one."""

import base64
import datetime
import itertools
import os
import socket

import torch.distributed as dist

from ballast import embedded_daemon
from ballast.errors import Error

_opens = itertools.count()  # the same on all ranks, which open their jobs in one order


class Store:
    """torch.distributed's store as the native module wants it, under keys of its own."""

    def __init__(self):
        self._store = dist.PrefixStore(f'ballast/{next(_opens)}', dist.distributed_c10d._get_default_store())

    def set(self, key, value):
        self._store.set(key, base64.b64encode(value).decode())

    def get(self, key, seconds):
        self._store.wait([key], datetime.timedelta(seconds=seconds))
        return base64.b64decode(self._store.get(key))


def active():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def exchange(mine, timeout):
    """All ranks' bytes, in rank order: where no session is open yet."""
    store = Store()
    store.set(f'said/{rank()}', mine)
    return [store.get(f'said/{r}', timeout) for r in range(world_size())]


def rank():
    return dist.get_rank() if active() else 0


def world_size():
    return dist.get_world_size() if active() else 1


def own_address():
    """Where the other ranks reach this one: the address that it has towards the master."""
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))
            return probe.getsockname()[0]
        except OSError:
            return '127.0.0.1'


def start_private_server(store, local, timeout):
    """The address of a ballastd that rank 0 starts, and rank 0's handle of it. All ranks must be on one host."""
    host = socket.gethostname()
    store.set(f'host/{rank()}', host.encode())
    hosts = {store.get(f'host/{r}', timeout).decode() for r in range(world_size())}
    if len(hosts) > 1:
        raise Error(f'ranks on {len(hosts)} hosts ({", ".join(sorted(hosts))}) and no state servers: start ballastd beside '
                    "your trainers and name them all: servers='host:port,...' or BALLAST_SERVERS", 'BAD_CONFIG')
    if rank() != 0:
        answer = store.get('server', timeout).decode()
        if answer.startswith('!'):
            raise Error(f'rank 0 could not start a state server: {answer[1:]}', 'SERVER_DOWN')
        return answer, None
    try:
        daemon = embedded_daemon.Daemon(**local)
    except BaseException as error:
        store.set('server', f'!{error}'.encode())
        raise
    store.set('server', daemon.address.encode())
    return daemon.address, daemon
