"""Makes a job's steps: collects gradients, agrees with the other ranks, takes over edits, and orders the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ballast.errors import Error, warn
from ballast.torch.group import roster as rosters
from ballast.torch.group.agreement import Agreed, Collected, agree, check_tied, check_values
from ballast.torch.job import edits, registration, spec
from ballast.torch.modes import plainly
from ballast.torch.sharding.collectives import take_gathers
from ballast.torch.sharding.remote import remote_of
from ballast.torch.stepping.members import digest_of, gradient_of
from ballast.torch.stepping.step import Step

if TYPE_CHECKING:
    from ballast import _native
    from ballast.torch.group.ranks import Exchange
    from ballast.torch.job.job import Job

# Steps in a row that may be skipped for an Inf or NaN before step() raises.
_SKIPS_MAX = 50


class Stepper:
    """Steps of a job, one at a time, and the results of the last one. Threads: the training loop's."""

    def __init__(self, job: Job, max_norm: float) -> None:
        """max_norm: of all gradients together; 0 does not clip."""
        self.job, self.max_norm = job, max_norm
        self.scale: float | None = None  # gradients are multiplied by it; the caller knows of overflows then
        self.grad_norm: float | None = None
        self.skipped = False
        self.seconds = {'push': 0.0, 'seal': 0.0, 'pull': 0.0}

    @plainly
    def step(self, blob: bytes) -> None:
        """COLLECTIVE. With overlap the step goes on when this returns."""
        job = self.job
        if job.session is None:
            self._open()
        exchange = job.exchange('step()')
        agreed = self._agreed(exchange)
        self._follow(agreed)
        collected = agreed.collected
        collected.settle()
        if agreed.roster.has_tied:
            check_tied(exchange, agreed.roster, collected)
        if job.sharded is not None:
            job.sharded.settle(collected.gradients)
        if job.early is not None and (collected.fresh or not job.early.stands(collected.gradients)):
            job.early.withdraw()
        registration.register(job, collected.fresh, exchange, agreed.roster, agreed.registers)
        if agreed.edits:
            edited = [member for member, is_edited in zip(job.members, agreed.edited) if is_edited]
            check_values(exchange, job.roster, job.members, edited)
            edits.take(job, edited, exchange)
        written = set(job.session.written)
        changes = {i for i, member in enumerate(job.members) if agreed.present[i] or member.name in written}
        step = Step(self, collected, changes, blob)
        if job.overlap is not None:
            job.overlap.start(step, job.members, collected.gradients)
            return
        attempt = job.session.attempt
        try:
            step.run()
        except BaseException:
            if job.sharded is not None:
                job.sharded.failed(attempt)
            raise
        finally:
            step.end()
        if job.sharded is not None:
            job.sharded.stepped()

    def _open(self) -> None:
        """A job that goes on brings its own parameters, when these gradients have been made."""
        job, before = self.job, {}
        if job.options.resume != 'never':
            before = {parameter: digest_of(parameter) for _, _, parameter in registration.placed(job) if parameter.grad is not None}
        job.open(for_step=True)
        if job.found is not None and any(digest_of(parameter) != digest for parameter, digest in before.items()):
            warn(f"job '{job.options.job}' goes on from step {job.progress.steps} with its own parameters, and the gradients of this step "
                 'were made with other parameters: call optimizer.resume() before the first forward pass')

    def _follow(self, agreed: Agreed) -> None:
        """A rank whose gradients have not gone does not see that others let theirs go: a frozen stage, an expert without tokens."""
        job = self.job
        job.drop_to(agreed.attempt + (agreed.torn is not None))
        if agreed.torn is not None:
            if job.sharded is not None:
                job.sharded.failed()
            raise Error(f'gradients of rank {agreed.torn} went to the servers in a pass that other ranks have let go; none count now: '
                        'call zero_grad(), and run forward and backward again, on all ranks', 'RANKS_DIFFER')

    def _agreed(self, exchange: Exchange) -> Agreed:
        job = self.job
        if job.options.world_size > 1:
            try:
                return agree(exchange, job.roster, self._collect)
            except Error as error:
                if job.sharded is not None and error.reason == 'RANKS_DIFFER':  # on all ranks
                    job.sharded.distrust()
                raise
        collected = self._collect()
        roster = rosters.gather(exchange, collected.lines(), job.group) if collected.fresh else job.roster
        return Agreed(collected, roster, bool(collected.fresh), any(collected.edited), collected.edited, collected.present,
                      collected.attempt, None)

    def _collect(self) -> Collected:
        job = self.job
        if job.sharded is not None:
            job.sharded.passes.check()
        orders = {} if job.sharded is None else take_gathers(job.group)
        job.open(for_step=True)
        self.skipped = False
        registration.check_frozen(job.members)
        if job.overlap is not None:
            job.overlap.check(job)
        fresh = registration.late_tensors(job)
        members = job.members + [member for member, _, _ in fresh]
        there = {id(parameter) for _, _, parameter in registration.placed(job)}
        gradients = [gradient_of(member) if id(member.parameter) in there else None for member in members]
        if job.sharded is not None:
            job.sharded.check(gradients)
        edited = edits.edited(job, members)
        spec.check_dtypes(job.options.optimizer, members, gradients)
        spec.check(job, job.options.optimizer)
        groups = [job.algorithm.hyper(group, job.options.optimizer) for group in job.param_groups]
        groups += groups[:1] * (job.options.group_count - len(groups))
        return Collected(fresh, members, gradients, edited, groups, lambda: registration.lines(job, members), job.progress.steps, job.debug,
                         orders, job.session.attempt, job.sharded is not None and job.sharded.went, job.tied)

    def took(self, report: _native.Report, gradients: Sequence[torch.Tensor | None], scaled: bool) -> None:
        """A step has ended. gradients: by member. scaled: the caller looks for overflows."""
        for key in self.seconds:
            self.seconds[key] += getattr(report, f'{key}_seconds')
        self.grad_norm = report.norm
        self.skipped = report.skipped
        if not report.skipped:
            self.job.progress.skips = 0
        elif not scaled:
            self._warn_skipped(gradients)

    def _warn_skipped(self, gradients: Sequence[torch.Tensor | None]) -> None:
        progress = self.job.progress
        names = [member.name for member, gradient in zip(self.job.members, gradients)
                 if gradient is not None and remote_of(gradient) is None and not bool(torch.isfinite(gradient).all())]
        progress.skips += 1
        what = f"the gradient of '{names[0]}'" if names else 'a gradient'
        text = f'{what} is not finite: the step was skipped, nothing was updated (step {progress.steps}, {progress.skips} in a row)'
        if progress.skips >= _SKIPS_MAX:
            raise Error(f'{text}; lower the learning rate or look at the data', 'BAD_REQUEST')
        warn(text)
