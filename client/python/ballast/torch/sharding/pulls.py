"""Pulls of units ahead of use, in the order of the step before."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.job.opened import OpenJob
from ballast.torch.sharding.expected import Expected
from ballast.torch.sharding.memory import Memory, held
from ballast.torch.sharding.unit import Unit
from ballast.torch.tensors.remote import Part

# How many pulls of whole parameters are under way together.
_BATCHES = 4
_DTYPES = {'f32': torch.float32, 'bf16': torch.bfloat16, 'f16': torch.float16, 'f8': torch.uint8}  # f8: blocks with scales


class _Pull(NamedTuple):
    """One unit on its way."""
    session: _native.Session
    version: int
    number: int
    # By part of the unit, or the bytes of all parts if they come in blocks. The session keeps their memory until the pull was awaited.
    pieces: list[torch.Tensor]
    size: int  # bytes that it holds

    def end(self) -> None:
        self.session.await_pull(self.number)

    def drop(self) -> None:
        """Waits for a pull that nobody reads: its version is out of date, or the session is over."""
        try:
            self.end()
        except Error:
            pass


class Pulls:
    """Begins pulls of the gathers that are expected next. A gather that was not expected waits for its pull. Threads: one at a time."""

    def __init__(self, job: Callable[[], OpenJob], bytes_max: int, memory: Memory) -> None:
        """job(): returns the open job. bytes_max: bounds the memory of pulls ahead of use, but one unit is always pulled ahead. memory: for
        pulls."""
        self._job, self._bytes_max = job, bytes_max
        self._memory, self.whole_memory = memory, Memory(seldom=True)
        self._indices: dict[Unit, list[int]] = {}  # of the session's tensors
        self._under_way: dict[Unit, list[_Pull]] = {}  # oldest first: a unit may be gathered again soon, as forward's last one is
        self._expected = Expected()
        self.count = 0
        self.bytes = 0
        self.waits = 0  # gathers whose pull was not under way before
        self.wait_seconds = 0.0

    def place(self, indices: dict[Unit, list[int]]) -> None:
        """Begins a session. indices: of the units' parts among the session's tensors."""
        self.forget()
        self._indices = indices

    def take(self, unit: Unit) -> list[torch.Tensor]:
        """Returns the unit's pieces at the job's version: by part, or the bytes of all parts if they come in blocks."""
        job = self._job()
        self._drop_stale(job)
        there = self._under_way.get(unit)
        if there:
            pull = there.pop(0)
        else:
            pull = self._begin(unit, job)
            self.waits += 1
        self._expected.took(unit)
        self._go_ahead(job)
        before = time.perf_counter()
        pull.end()
        self.wait_seconds += time.perf_counter() - before
        return pull.pieces

    def whole(self, parts: Sequence[Part]) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yields whole parameters at the job's version, in the job's working dtype, as they come, even if other ranks have parts of them.
        Several are under way at a time."""
        job = self._job()
        session, dtype = job.session, _DTYPES[job.options.optimizer.working]
        index = {part: i for unit, indices in self._indices.items() for part, i in zip(unit.parts, indices)}
        waiting = collections.deque(parts)
        under_way: collections.deque[tuple[int, list[tuple[Part, torch.Tensor]]]] = collections.deque()
        used = 0
        while waiting or under_way:
            while waiting and (not under_way or used < self._bytes_max):
                batch: list[tuple[Part, torch.Tensor]] = []
                size = 0
                while waiting and (not batch or size < self._bytes_max // _BATCHES):
                    part = waiting.popleft()
                    batch.append((part, self.whole_memory.take(part.shape.numel(), dtype).view(part.shape or (1,))))
                    size += batch[-1][1].nbytes
                indices = [index[part] for part, _ in batch]
                under_way.append((session.start_pull(indices, [values for _, values in batch], whole=True), batch))
                used += size
            number, batch = under_way.popleft()
            session.await_pull(number)
            used -= sum(values.nbytes for _, values in batch)
            for part, values in batch:
                yield part, values.view(part.shape)

    def stepped(self) -> None:
        """The job has a new version. Pulls its first units while the servers make it."""
        self._expected.stepped()
        job = self._job()
        self._drop_stale(job)
        self._go_ahead(job)

    def forget(self) -> None:
        """The session is over, or another begins."""
        for pulls in self._under_way.values():
            for pull in pulls:
                pull.drop()
        self._under_way = {}
        self._expected.forget()

    def route(self, experts: Sequence[Unit]) -> None:
        """A router has told which experts are gathered next."""
        job = self._job()
        self._drop_stale(job)
        self._expected.route(experts)
        self._go_ahead(job)

    def _drop_stale(self, job: OpenJob) -> None:
        """Drops pulls of other versions, which a step or a rollback leaves behind."""
        version = job.session.version
        there, self._under_way = self._under_way, {}
        for unit, pulls in there.items():
            for pull in pulls:
                if pull.version != version:
                    pull.drop()
                else:
                    self._under_way.setdefault(unit, []).append(pull)

    def _begin(self, unit: Unit, job: OpenJob) -> _Pull:
        indices, dtype = self._indices[unit], _DTYPES[job.options.optimizer.working]
        size = unit.bytes(dtype.itemsize)
        memory = self._memory.take(size // dtype.itemsize, dtype, unit.is_pinned)
        if unit.coded is None:
            pieces = unit.pieces(memory)
            places = [piece[:part.elements] for part, piece in zip(unit.parts, pieces)]
        else:
            pieces = [memory]
            places = unit.coded.places(memory, [job.session.pull_bytes(index) for index in indices])
        self.count += 1
        self.bytes += size
        version = job.session.version
        return _Pull(job.session, version, job.session.start_pull(indices, places), pieces, held(size, unit.is_pinned))

    def _go_ahead(self, job: OpenJob) -> None:
        used = sum(pull.size for pulls in self._under_way.values() for pull in pulls)
        width = _DTYPES[job.options.optimizer.working].itemsize
        ahead: collections.Counter[Unit] = collections.Counter()
        for unit in self._expected:
            ahead[unit] += 1
            there = self._under_way.setdefault(unit, [])
            if ahead[unit] <= len(there):
                continue
            if used and used + held(unit.bytes(width), unit.is_pinned) > self._bytes_max:
                break
            there.append(self._begin(unit, job))
            used += there[-1].size
