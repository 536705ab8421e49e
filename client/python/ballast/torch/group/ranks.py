"""The ranks that train one job: torch.distributed's default group, if there is one."""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import itertools
import os
import socket
from collections.abc import Callable, Iterator

import torch.distributed as dist

from ballast.errors import Error

# All ranks' bytes, in rank order, for this rank's.
Exchange = Callable[[bytes], list[bytes]]

_opens = itertools.count()  # the same on all ranks, which open their jobs in one order
_exchanges = itertools.count()  # the same on all ranks, which come to each
# In front of a message. Those of a session begin otherwise.
_OURS = b'>'


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        raise Error("torch.distributed's store, which the first rank's process keeps, does not answer: did that rank end? Start all ranks "
                    f'again ({str(error).splitlines()[0]})', 'RANK_MISSING') from error


class Store:
    """torch.distributed's store as the native module wants it, under keys of its own."""

    def __init__(self, place: str | None = None) -> None:
        place = f'open/{next(_opens)}' if place is None else place
        self._store = dist.PrefixStore(f'ballast/{place}', dist.distributed_c10d._get_default_store())

    def set(self, key: str, value: bytes) -> None:
        with _reached():
            self._store.set(key, base64.b64encode(value).decode())

    def get(self, key: str, seconds: float) -> bytes:
        with _reached():
            self._store.wait([key], datetime.timedelta(seconds=seconds))
            return base64.b64decode(self._store.get(key))

    def has(self, key: str) -> bool:
        with _reached():
            return self._store.check([key])

    def decide(self, proposed: str) -> str:
        """Returns what the first rank proposed; '' asks."""
        with _reached():
            return self._store.compare_set('decided', '', proposed).decode()


def active() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Within:
    """An exchange of ranks that are in one call: messages say which, and where ranks are in different ones, all get an error that names
    two of them."""

    def __init__(self, call: str, exchange: Exchange) -> None:
        if isinstance(exchange, Within):
            call, exchange = f'{exchange._call}, {call}', exchange._exchange
        self._call, self._exchange = call, exchange

    def __call__(self, mine: bytes) -> list[bytes]:
        said = [_parted(each) for each in self._exchange(_OURS + self._call.encode() + b'\0' + mine)]
        calls = [call for call, _ in said]
        other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
        if other is not None:
            raise Error(f'rank 0 is in {calls[0]} and rank {other} in {calls[other]}; expected the same calls on all ranks, in one order',
                        'RANKS_DIFFER')
        return [rest for _, rest in said]


def _parted(message: bytes) -> tuple[str, bytes]:
    call, end, rest = message[1:].partition(b'\0')
    return (call.decode(), rest) if end and message.startswith(_OURS) else ('the middle of a call', message)


def exchange(what: str, mine: bytes, timeout: float, option: str = 'step_timeout') -> list[bytes]:
    """All ranks' bytes, in rank order: where no session is open yet. Either all ranks get them, or those that come get an error, however
    late they are. option: the argument that `timeout` (seconds) came from."""
    if not active():
        return [mine]
    return Within(what, functools.partial(_exchange, what, timeout, option))(mine)


def _exchange(what: str, timeout: float, option: str, mine: bytes) -> list[bytes]:
    store = Store(f'exchange/{next(_exchanges)}')
    store.set(f'said/{rank()}', mine)
    said, missing = [], None
    for r in range(world_size()):
        try:
            said.append(store.get(f'said/{r}', timeout))
        except RuntimeError:  # dist.DistStoreError
            missing = r
            break
    # Some ranks may have found all, and others given up: the first of them decides for all.
    decided = store.decide('all' if missing is None else f'{what}: rank {rank()} waited {timeout:g} s ({option}) for rank {missing}; '
                           'expected all ranks to come to it, the same number of times')
    if decided != 'all':
        raise Error(decided, 'RANK_MISSING')
    return said if missing is None else [store.get(f'said/{r}', timeout) for r in range(world_size())]


def rank() -> int:
    return dist.get_rank() if active() else 0


def world_size() -> int:
    return dist.get_world_size() if active() else 1


def own_address() -> str:
    """The address where other ranks reach this one: the one that it has towards the master."""
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))
            return probe.getsockname()[0]
        except OSError:
            return '127.0.0.1'
