"""The ranks that train jobs together: a process group of torch.distributed, or this process alone."""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime
import functools
import itertools
import os
import secrets
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch.distributed as dist

from ballast.errors import Error

# All ranks' bytes, in rank order, for this rank's.
Exchange = Callable[[bytes], list[bytes]]

# In front of a message. Those of a session begin otherwise.
_OURS = b'>'
# How often rank 0 looks for ranks that begin late.
_POLL_SECONDS = 0.005
# How long the store may take to return a value that is there.
_STORE_SECONDS = 30.0


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except dist.DistNetworkError as error:
        raise Error("torch.distributed's store does not answer. The process of the first rank keeps it: did that rank end? Start all "
                    f'ranks again ({str(error).splitlines()[0]})', 'RANK_MISSING') from error


class Store:
    """torch.distributed's store as the native module wants it, under keys of its own."""

    def __init__(self, store: Any, place: str) -> None:
        self._store = dist.distributed_c10d.PrefixStore(f'ballast/{place}', store)

    def set(self, key: str, value: bytes) -> None:
        with _reached():
            self._store.set(key, base64.b64encode(value).decode())

    def get(self, key: str, seconds: float) -> bytes:
        """RuntimeError (dist.DistStoreError) where it is not there in time."""
        with _reached():
            self._store.wait([key], datetime.timedelta(seconds=seconds))
            return base64.b64decode(self._store.get(key))

    def has(self, key: str) -> bool:
        with _reached():
            return bool(self._store.check([key]))

    def decide(self, proposed: str) -> str:
        """Returns what the first rank proposed; '' asks."""
        with _reached():
            decided: bytes = self._store.compare_set('decided', '', proposed)
            return decided.decode()


class Within:
    """An exchange between ranks that make the same call. Each message names its call. If ranks make different calls, all get an error that
    names two of them."""

    def __init__(self, call: str, exchange: Exchange, rank: int = 0) -> None:
        """rank: this one. If `exchange` is a Within, its rank counts."""
        self._call: str = f'{exchange._call}, {call}' if isinstance(exchange, Within) else call
        self._exchange: Exchange = exchange._exchange if isinstance(exchange, Within) else exchange
        self.rank: int = exchange.rank if isinstance(exchange, Within) else rank

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


class Group:
    """The ranks of one process group, as one of them sees it. Numbers of ranks are the group's own. Counters and keys belong to the group.
    Ranks that make a new group, in the same processes or in others, start them from the beginning together. Threads: one at a time."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """None: this process alone."""
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.rank, self.world_size = 0, 1
        members = [0]
        if process_group is not None:
            self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
            members = dist.get_process_group_ranks(process_group)
        self.numbers = {member: rank for rank, member in enumerate(members)}  # by number in the default group, in rank order
        self.servers: dict[Hashable, Any] = {}  # see job.private_server.start()
        self.gathers: dict[tuple[int, ...], Any] = {}  # of the last units, see agreement.gathers
        self._counts: collections.defaultdict[Hashable, Iterator[int]] = collections.defaultdict(itertools.count)
        self._me = secrets.token_hex(8)
        self._start: str | None = None  # the name that this start of the group has in the store
        self._late = set(range(1, self.world_size))  # ranks that rank 0 has not seen yet
        self._answered: dict[int, bytes] = {}

    @property
    def several(self) -> bool:
        return self.world_size > 1

    def count(self, what: Hashable) -> int:
        """Returns how many there were before. All ranks get the same number, since they count in one order."""
        return next(self._counts[what])

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._there()[0]

    @property
    def torchs_store(self) -> Any:
        """The process group's own."""
        return self._there()[1]

    def _there(self) -> tuple[dist.ProcessGroup, Any]:
        there = None if self._process_group is None else self._process_group()
        store = None if there is None else dist.distributed_c10d._world.pg_map.get(there, (None, None))[1]
        if there is None or store is None:
            raise Error("the optimizer's process group was destroyed (destroy_process_group); close() the optimizer and make another in a "
                        'new group', 'RANK_MISSING')
        return there, store

    def store(self, place: str) -> Store:
        """Returns a store of this start of the group. All ranks must have exchanged something before."""
        if self._start is None:
            raise Error('the ranks of this process group have exchanged nothing yet; call resume() on all of them first', 'BAD_REQUEST')
        return Store(self.torchs_store, f'{self._start}/{place}')

    def run(self) -> str:
        """Returns a name of this run of the trainers, which is the same on all ranks. One rank may ask. The store may have served an
        earlier run; torchrun's restart count tells runs apart."""
        mine = f'{self._me}-{os.getpid()}'  # a fork is another run
        if not self.several:
            return mine
        return Store(self.torchs_store, f"run/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}").decide(mine)

    def exchange(self, what: str, timeout: float, option: str = 'step_timeout') -> Within:
        """Returns an exchange that needs no session. Either all ranks get their bytes, or all that come get an error, however late they
        come. option: the argument that set `timeout` (seconds)."""
        return Within(what, functools.partial(self._exchange, what, timeout, option), self.rank)

    def _exchange(self, what: str, timeout: float, option: str, mine: bytes) -> list[bytes]:
        if not self.several:
            return [mine]
        until, place = time.monotonic() + timeout, f"exchange/{self.count('exchange')}"

        def missing_text(rank: int) -> str:
            return (f'{what}: rank {self.rank} waited {timeout:g} s ({option}) for rank {rank}; expected all ranks to make this call, the '
                    'same number of times')
        self._begin(place, until, lambda: missing_text(0))
        store = self.store(place)
        store.set(f'said/{self.rank}', mine)
        said, missing = [], None
        for r in range(self.world_size):
            try:
                said.append(store.get(f'said/{r}', max(_POLL_SECONDS, until - time.monotonic())))
            except RuntimeError:  # dist.DistStoreError
                missing = r
                break
        # Some ranks may have found all messages while others gave up. The first rank decides for all.
        decided = store.decide('all' if missing is None else missing_text(missing))
        if decided != 'all':
            raise Error(decided, 'RANK_MISSING')
        return said if missing is None else [store.get(f'said/{r}', timeout) for r in range(self.world_size)]

    # --- the beginning of a group

    def _begin(self, place: str, until: float, text: Callable[[], str]) -> None:
        """Names this start of the group. The store may outlive its ranks, as torchrun's does, and may have keys of earlier starts. So each
        rank asks rank 0 under a fresh name of its own, and an answer under that name belongs to this start. place: of the exchange that
        the ranks come to. text(): says that rank 0 did not come."""
        if self.rank == 0:
            self._start = self._me
            self._answer(until)
        elif self._start is None:
            store = Store(self.torchs_store, 'start')
            store.set(f'asks/{self.rank}', self._me.encode())
            try:
                start = store.get(f'answer/{self._me}', max(_POLL_SECONDS, until - time.monotonic())).decode()
            except RuntimeError:  # dist.DistStoreError
                raise Error(self._given_up(store, place) or text(), 'RANK_MISSING') from None
            Store(self.torchs_store, f'{start}/came').set(str(self.rank), b'')
            self._start = start

    def _answer(self, until: float) -> None:
        """Rank 0: answers the ranks that ask, until all have come or time is over. A question may be left from an earlier start; nobody
        reads its answer."""
        store = Store(self.torchs_store, 'start')
        if self._late:
            store.set('last', self._me.encode())
        came = self.store('came')
        while self._late:
            for rank in [rank for rank in sorted(self._late) if store.has(f'asks/{rank}')]:
                asks = store.get(f'asks/{rank}', _STORE_SECONDS)
                if self._answered.get(rank) != asks:
                    store.set(f'answer/{asks.decode()}', self._me.encode())
                    self._answered[rank] = asks
            self._late -= {rank for rank in self._late if came.has(str(rank))}
            if not self._late or time.monotonic() > until:
                return
            time.sleep(_POLL_SECONDS)

    def _given_up(self, store: Store, place: str) -> str:
        """Returns what the ranks of the newest start decided about this exchange without this rank. '': nothing is known."""
        if not store.has('last'):
            return ''
        start = store.get('last', _STORE_SECONDS).decode()
        decided = Store(self.torchs_store, f'{start}/{place}').decide('')
        return '' if decided == 'all' else decided


_alone = Group(None)
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()


def of(process_group: dist.ProcessGroup | None = None) -> Group:
    """Returns the Group of a process group. None: the current default group of torch.distributed, or this process alone."""
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return _alone
        process_group = dist.distributed_c10d._get_default_group()
    if process_group not in _groups:
        _groups[process_group] = Group(process_group)
    return _groups[process_group]


def world() -> Group:
    """The group of all ranks, whose numbers meshes have."""
    return of()
