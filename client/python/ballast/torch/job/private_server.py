"""The state server of several ranks on one host that name no servers. Rank 0 starts it as a process, and ends it once no rank needs it.
Optimizers of the same ranks and directory share it."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ballast import embedded_daemon, place
from ballast.errors import Error, warn
from ballast.torch.ranks import hosts
from ballast.torch.ranks.groups import Exchange, Group, Store, world
from ballast.torch.ranks.together import everyone

_POLL_SECONDS = 0.02


class PrivateServer:
    """One rank's side of it. Rank 0's side ends the server: when every other rank has left it or has ended, when `seconds` have passed
    since rank 0 left, or at once if rank 0 has failed or is interrupted."""

    def __init__(self, address: str, budgets: dict[str, Any], daemon: embedded_daemon.Daemon | None, processes: Sequence[int], group: Group,
                 seconds: float) -> None:
        """daemon: rank 0's. None: another rank. processes: process numbers, in rank order. seconds: step_timeout, which bounds any call
        that another rank is making."""
        self.address = address
        self._budgets, self._daemon, self._processes, self._rank, self._seconds = budgets, daemon, processes, group.rank, seconds
        self._pid = os.getpid()
        self._uses = 0  # by optimizers of this rank
        self._lock = threading.RLock()  # finalizers leave, also amid a call of this thread
        self._store: Store | None = None  # where ranks say that they left, since all of them last took up a use
        self._left, self._hurries, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._is_ending = False
        if daemon is not None:
            self._exit = weakref.finalize(self, self._at_exit)  # keeps this object; sessions' finalizers are newer, and run before
            # Started now: a process that ends starts no threads.
            threading.Thread(target=self._end_when_left, name='private-server', daemon=True).start()

    def differs(self, asked: dict[str, Any]) -> str | None:
        """An argument that asks for another server."""
        return next((key for key, value in asked.items() if value is not None and value != self._budgets[key]), None)

    def refuse(self, key: str, value: Any) -> Error:
        return Error(f"{key}={value!r}: the ranks have a private state server in directory {self._budgets['directory']!r} already, with "
                     f'{key}={self._budgets[key]!r}, and their optimizers share it; leave {key} out here, or close() the optimizers that '
                     'use it first', 'BAD_CONFIG')

    def keep(self) -> bool:
        """Rank 0: returns whether the server will last until use()."""
        with self._lock:
            if self._is_ending:
                return False
            self._uses += 1
            self._left.clear()
            return True

    def let_go(self) -> None:
        """Rank 0: takes back the promise of keep()."""
        self._leave(self._store)

    def use(self, store: Store) -> None:
        """All ranks take up a use. store: where they will say that they left."""
        with self._lock:
            self._uses += self._daemon is None  # rank 0's is keep()'s
            self._store = store
            self._left.clear()

    def leave(self) -> None:
        """An optimizer of this rank no longer needs it. Waits for no rank, so finalizers may call it."""
        if os.getpid() == self._pid:
            self._leave(self._store)

    def _leave(self, store: Store | None) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses > 0:
                return
            if store is not None:
                with suppress(RuntimeError):  # rank 0's process is gone, and the server with it
                    store.set(f'left/{self._rank}', b'')
            self._left.set()

    def wait(self) -> None:
        """Rank 0, after it has left: returns when the server has ended, or if another optimizer uses it. Ctrl-C ends the server, and so
        does a call while an error is handled, because the other ranks cannot go on without this one."""
        if self._daemon is None or os.getpid() != self._pid or not self._left.is_set():
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
        """Rank 0: leaves, and ends the server even if other ranks use it, unless another optimizer of this rank does."""
        self.leave()
        if self._left.is_set():
            self._hurries.set()
        self.wait()

    def _at_exit(self) -> None:
        if getattr(sys, 'last_value', None) is not None:  # an error ends the process
            self._hurries.set()
        if os.getpid() == self._pid:
            self._left.set()
        self.wait()

    def _end_when_left(self) -> None:
        while not self._is_ending:
            self._left.wait()
            self._wait_for_others()
            with self._lock:
                self._is_ending = self._left.is_set()
        if self._daemon is not None:
            self._daemon.stop()
        self._exit.detach()
        self._ended.set()

    def _wait_for_others(self) -> None:
        until = time.monotonic() + self._seconds
        while self._left.is_set() and (there := self._others()):
            if time.monotonic() >= until:
                warn(f'rank {there[0]} has not closed its optimizer within {self._seconds:g} s (step_timeout) after rank 0 has. The '
                     'private server ends now, and later calls of that rank will fail. Close the optimizer on all ranks, or name servers, '
                     'which stay')
                return
            if self._hurries.wait(_POLL_SECONDS):
                return

    def _others(self) -> list[int]:
        """Ranks that may still use the server."""
        if self._hurries.is_set():
            return []
        try:
            return [rank for rank, process in enumerate(self._processes)
                    if rank != self._rank and _lives(process) and (self._store is None or not self._store.has(f'left/{rank}'))]
        except RuntimeError:  # the store is gone, with the launcher say: so are the ranks
            return []


def _lives(process: int) -> bool:
    """The process of this number runs on this host. A zombie does not."""
    try:
        with open(f'/proc/{process}/stat', encoding='utf-8', errors='replace') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(group: Group, exchange: Exchange, places: list[hosts.Place], asked: dict[str, Any], seconds: float) -> PrivateServer:
    """Takes up a use of the server that the group's ranks have in this directory, and starts a server if there is none. COLLECTIVE. asked:
    arguments of an embedded server. places: where the ranks are. seconds: see PrivateServer."""
    names = hosts.hosts(places)
    if len(names) > 1:
        raise Error(f'the ranks are on {len(names)} hosts or containers ({", ".join(names)}), and no state servers are named. Start '
                    "ballastd beside your trainers and name them all: servers='host:port,...' or BALLAST_SERVERS", 'BAD_CONFIG')
    servers, key = world().servers, (tuple(group.numbers), asked['directory'])
    budgets = {**asked, **{key: place.parse_bytes(key, asked[key]) for key in ('dram', 'nvme')}}
    known: PrivateServer | None = servers.get(key)
    server: PrivateServer | None = None
    daemon: embedded_daemon.Daemon | None = None

    def begin() -> str:
        """Rank 0 decides whether there is a server: other ranks may have left one that rank 0 has not ended yet."""
        nonlocal server, daemon
        if group.rank > 0:
            return ''
        if known is not None and known.keep():
            server = known
            if what := server.differs(budgets):
                raise server.refuse(what, asked[what])
            return server.address
        if known is not None:
            known.wait()
        daemon = embedded_daemon.Daemon(**asked)
        return daemon.address

    try:
        _, said = everyone(exchange, begin, str.encode)
        address, store = said[0].decode(), group.store(f"private/{group.count('private')}")
    except BaseException:
        if daemon is not None:
            daemon.stop()
        if server is not None:
            server.let_go()
        raise
    if server is None and known is not None and known.address == address:
        server = known
    if server is None:
        server = PrivateServer(address, budgets, daemon, [each.process for each in places], group, seconds)
        if daemon is not None:
            server.keep()
        if asked['directory'] is not None:
            servers[key] = server
    server.use(store)
    return server
