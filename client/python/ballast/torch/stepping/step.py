"""One call of step(), from gradients to parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ballast.errors import Error
from ballast.torch.group.agreement import Collected
from ballast.torch.job import progress
from ballast.torch.stepping.host_memory import current_streams, on_streams
from ballast.torch.stepping.members import Memory, local, wrote

if TYPE_CHECKING:
    from ballast.torch.stepping.stepper import Stepper


class Step:
    """Threads: run() may be on any thread. land() and end() are the training loop's, since they touch parameters as autograd sees them."""

    def __init__(self, stepper: Stepper, collected: Collected, changes: set[int], blob: bytes) -> None:
        """changes: members, by index, whose parameters the step may change. Those of others are left alone."""
        self._stepper, self._collected, self._changes, self._blob = stepper, collected, changes, blob
        job = self._job = stepper.job
        self._scale = stepper.scale  # None once the caller has left gradient_scale()
        # The job's are others when another thread closes it, or registers more.
        self._session, self._members = job.session, job.members
        self._before = self._session.version
        early = job.early
        self._memory = Memory(self._members, job.host, collected.gradients, early.there if early is not None else frozenset(),
                              reads=job.lends_masters)
        self._streams = current_streams(local(member.parameter) for member in self._members)
        self._landed: set[int] = set()
        self._report = None
        self._sent = early.take() if early is not None else None

    def run(self, ready: Callable[[Iterable[int]], None] | None = None) -> None:
        """ready(indices): parameters of some members hold the new version, and their gradients are not read any more."""
        collected = self._collected
        try:
            memory = self._memory.wait()
            if ready is None and memory.is_copied:
                ready = self._land_unit
            self._report = self._session.step(
                memory.gradients, memory.parameters, collected.groups, 1.0 if self._scale is None else self._scale, self._stepper.max_norm,
                blob=progress.pack(self._job.progress.steps + 1, self._blob), ready=ready)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The step was not made: no later one takes what was pushed early for it."""
        if self._sent:
            with contextlib.suppress(Error):  # the session is over, and has let go of them
                self._session.drop()

    # While the loop waits in run(): a unit's parameters are on their way to the GPU as the next ones are updated.
    def _land_unit(self, indices: Iterable[int]) -> None:
        with on_streams(self._streams):
            self.land(set(indices))

    def interrupt(self) -> None:
        self._session.interrupt()

    def land(self, indices: set[int]) -> None:
        """Parameters of these members, by index, hold the new version."""
        landed = sorted((indices & self._changes) - self._landed)
        for i in landed:
            self._memory.write_back(i)
        wrote([self._members[i] for i in landed])
        self._landed |= indices

    def end(self) -> None:
        """After run(), whatever it raised."""
        # Also where an error came after it was decided: the job has made that step.
        if self._session.version > self._before:
            self._job.progress.made(self._blob)
            if self._report is None and not self._job.lends_masters:
                self._job.unpulled = True  # parameters may be of either version
            elif self._report is None or not self._report.skipped:
                self.land(set(range(len(self._members))))
        if self._report is not None:
            self._stepper.took(self._report, self._collected.gradients, scaled=self._scale is not None)
