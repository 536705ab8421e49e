"""One call of step(), from gradients to parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch.agreement.agree import Collected
from ballast.torch.job.features import Feature
from ballast.torch.job.opened import OpenJob
from ballast.torch.job.progress import Progress
from ballast.torch.tensors.host_memory import current_streams, on_streams
from ballast.torch.tensors.kinds import local
from ballast.torch.tensors.members import Member, wrote
from ballast.torch.tensors.memory import Memory
from ballast.torch.tensors.remote import gone_of

# How many steps in a row may be skipped for an Inf or NaN before step() raises.
_SKIPS_MAX = 50


class Results:
    """How steps are made, and the results of the last one."""

    def __init__(self, progress: Progress, max_norm: float) -> None:
        """progress: the job's. max_norm: of all gradients together; 0 does not clip."""
        self._progress, self.max_norm = progress, max_norm
        self.scale: float | None = None  # gradients are multiplied by it; the caller knows of overflows then
        self.grad_norm: float | None = None
        self.skipped = False
        self.seconds = {'push': 0.0, 'seal': 0.0, 'pull': 0.0}

    def took(self, report: _native.Report, members: Sequence[Member], gradients: Sequence[torch.Tensor | None], scaled: bool) -> None:
        """Takes the report of a step that has ended. gradients: by member. scaled: the caller looks for overflows."""
        for key in self.seconds:
            self.seconds[key] += getattr(report, f'{key}_seconds')
        self.grad_norm = report.norm
        self.skipped = report.skipped
        if not report.skipped:
            self._progress.skips = 0
        elif not scaled:
            self._warn_skipped(members, gradients)

    def _warn_skipped(self, members: Sequence[Member], gradients: Sequence[torch.Tensor | None]) -> None:
        progress = self._progress
        names = [member.name for member, gradient in zip(members, gradients) if gradient is not None and _is_infinite(member, gradient)]
        progress.skips += 1
        what = f"the gradient of '{names[0]}'" if names else 'a gradient'
        text = f'{what} is not finite: the step was skipped, nothing was updated (step {progress.steps}, {progress.skips} in a row)'
        if progress.skips >= _SKIPS_MAX:
            raise Error(f'{text}; lower the learning rate or look at the data', 'BAD_REQUEST')
        warn(text)


def _is_infinite(member: Member, gradient: torch.Tensor) -> bool:
    """Says whether a gradient that is here has an Inf or a NaN. Of what went before the step, the parameter may still have it."""
    here = gradient if gone_of(gradient) is None else member.parameter.grad
    return here is not None and gone_of(here) is None and not bool(torch.isfinite(local(here)).all())


class Step:
    """One step. Threads: run() may be on any thread. land() and end() are for the training loop, since they change parameters as autograd
    sees them."""

    def __init__(self, job: OpenJob, features: Sequence[Feature], results: Results, collected: Collected, changes: set[int],
                 blob: bytes) -> None:
        """changes: members, by index, whose parameters the step may change. It leaves all others alone."""
        self._job, self._results, self._collected, self._changes, self._blob = job, results, collected, changes, blob
        self._scale = results.scale  # None once the caller has left gradient_scale()
        # The job's are others when another thread closes it, or registers more.
        self._session, self.members = job.session, job.members
        self._before = self._session.version
        self._gone = [gone for gone in (feature.take() for feature in features) if gone is not None]
        there = frozenset(i for gone in self._gone for i in gone.members)
        try:
            self._memory = Memory(self.members, job.host, collected.gradients, there, reads=job.lends_masters)
        except BaseException:
            self.give_up()
            raise
        self._streams = current_streams(local(member.parameter) for member in self.members)
        self._landed: set[int] = set()
        self._report: _native.Report | None = None

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """By member."""
        return self._collected.gradients

    def run(self, ready: Callable[[Iterable[int]], None] | None = None) -> None:
        """Makes the step. It calls ready(indices) when these members' parameters hold the new version, and nothing reads their gradients
        any more."""
        collected = self._collected
        try:
            memory = self._memory.wait()
            if ready is None and memory.is_copied:
                ready = self._land_unit
            self._report = self._session.step(
                memory.gradients, memory.parameters, collected.groups, 1.0 if self._scale is None else self._scale, self._results.max_norm,
                blob=self._job.progress.pack(self._job.progress.steps + 1, self._blob), ready=ready)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The step was not made. Makes sure that no later step takes what was pushed early for it."""
        if any(gone.members for gone in self._gone):
            with contextlib.suppress(Error):  # the session is over, and has let go of them
                self._session.drop()

    # While the loop waits in run(), a unit's parameters go to the GPU as servers update the next ones.
    def _land_unit(self, indices: Iterable[int]) -> None:
        with on_streams(self._streams):
            self.land(set(indices))

    def interrupt(self) -> None:
        self._session.interrupt()

    def land(self, indices: set[int]) -> None:
        """Brings the new version to the parameters of these members, by index."""
        landed = sorted((indices & self._changes) - self._landed)
        for i in landed:
            self._memory.write_back(i)
        wrote([self.members[i] for i in landed])
        self._landed |= indices

    def end(self) -> None:
        """Ends the step, after run() has returned or raised."""
        # If an error came after the decision, the job has made the step all the same.
        if self._session.version > self._before:
            self._job.progress.made(self._blob)
            if self._report is None and not self._job.lends_masters:
                self._job.unpulled = True  # parameters may be of either version
            elif self._report is None or not self._report.skipped:
                self.land(set(range(len(self.members))))
        if self._report is not None:
            self._results.took(self._report, self.members, self._collected.gradients, scaled=self._scale is not None)
