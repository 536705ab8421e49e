"""Makes a job's steps: collects gradients, agrees with the other ranks, takes over edits, and orders each step."""

from __future__ import annotations

import contextlib

from ballast.errors import Error, warn
from ballast.torch.agreement import roster as rosters
from ballast.torch.agreement.agree import Agreed, Collected, agree, check_tied, check_values
from ballast.torch.agreement.gathers import Order
from ballast.torch.algorithms import hypers
from ballast.torch.job import edits, registration, spec
from ballast.torch.job.features import Ready
from ballast.torch.job.fit import lines
from ballast.torch.job.job import Job
from ballast.torch.job.opened import OpenJob
from ballast.torch.modes import plainly
from ballast.torch.ranks.groups import Exchange
from ballast.torch.steps.joins import Joins
from ballast.torch.steps.overlap import Overlap
from ballast.torch.steps.step import Results, Step
from ballast.torch.tensors.kinds import digest_of
from ballast.torch.tensors.members import check_frozen
from ballast.torch.tensors.memory import gradient_of


class Stepper:
    """Steps of a job, one at a time. Threads: the training loop's."""

    def __init__(self, job: Job, max_norm: float, overlap: Overlap | None) -> None:
        """max_norm: of all gradients together; 0 does not clip. overlap: makes steps beside the loop."""
        self.job, self._overlap = job, overlap
        self.results = Results(job.progress, max_norm)
        self._joins = Joins()

    @plainly
    def step(self, blob: bytes) -> None:
        """Makes a step. COLLECTIVE. With overlap the step is still under way when this returns."""
        if self.job.group.several:
            self._joins.check(self.job.parameters.all())
        opened = self.job.opened or self._open()
        self.job.buffers.before_step()
        exchange = self.job.exchange('step()')
        agreed = self._agreed(opened, exchange)
        self._follow(opened, agreed)
        step = self._begin(opened, agreed, exchange, blob)
        if self._overlap is not None:
            self._overlap.start(step)
        else:
            self._make(opened, step)

    def _open(self) -> OpenJob:
        """Opens the job. A job that continues brings its own parameters, though these gradients were made with others."""
        job, before = self.job, {}
        if job.options.resume != 'never':
            before = {parameter: digest_of(parameter) for parameter in job.parameters.all() if parameter.grad is not None}
        opened = job.open(for_step=True)
        if opened.found is not None and any(digest_of(parameter) != digest for parameter, digest in before.items()):
            warn(f"job '{job.options.job}' goes on from step {job.progress.steps} with its own parameters, but the gradients of this step "
                 'were made with other parameters; call optimizer.resume() before the first forward pass')
        return opened

    def _agreed(self, opened: OpenJob, exchange: Exchange) -> Agreed:
        if opened.options.world_size > 1:
            try:
                return agree(exchange, opened.roster, self._collect)
            except Error as error:
                if error.reason == 'RANKS_DIFFER':  # on all ranks
                    for feature in self.job.features:
                        feature.differed()
                raise
        collected = self._collect()
        roster = rosters.gather(exchange, collected.lines(), opened.group) if collected.fresh else opened.roster
        return Agreed(collected, roster, bool(collected.fresh), any(collected.edited), collected.edited, collected.present,
                      collected.attempt, None)

    def _collect(self) -> Collected:
        job = self.job
        orders: dict[tuple[int, ...], Order] = {}
        for feature in job.features:
            feature.before_step(job.parameters)
            orders.update(feature.gathers(job.group))
        opened = job.open(for_step=True)
        self.results.skipped = False
        check_frozen(opened.members)
        fresh = registration.late_tensors(opened)
        members = [*opened.members, *(member for member, _, _ in fresh)]
        there = set(map(id, job.parameters.all()))
        gradients = [gradient_of(member) if id(member.parameter) in there else None for member in members]
        for feature in job.features:
            feature.check(gradients)
            feature.complete(members, gradients)
        edited, wanted = edits.edited(opened, members), job.options.optimizer
        spec.check_dtypes(wanted, members, gradients)
        job.check_groups(wanted)
        groups = hypers(job.algorithm, job.param_groups, wanted, job.options.group_count, job.progress.steps + 1)
        return Collected(fresh, members, gradients, edited, groups, lambda: lines(job.parameters, members), job.progress.steps,
                         job.parameters.debug, orders, opened.session.attempt, any(feature.went for feature in job.features),
                         job.parameters.tied)

    def _follow(self, opened: OpenJob, agreed: Agreed) -> None:
        """Catches up with ranks that pushed gradients and dropped them. A rank that pushed none, such as a frozen stage or an expert
        without tokens, does not see that."""
        opened.drop_to(agreed.attempt + (agreed.torn is not None))
        if agreed.torn is not None:
            for feature in self.job.features:
                feature.failed()
            raise Error(f'gradients of rank {agreed.torn} went to the servers in a pass that other ranks have dropped, so none count now. '
                        'Call zero_grad(), then run forward and backward again, on all ranks', 'RANKS_DIFFER')

    def _begin(self, opened: OpenJob, agreed: Agreed, exchange: Exchange, blob: bytes) -> Step:
        """Prepares the step and makes it."""
        features, attempt = self.job.features, opened.session.attempt
        try:
            self._settle(opened, agreed, exchange)
            return Step(opened, features, self.results, agreed.collected, _changes(opened, agreed), blob)
        except BaseException:
            with contextlib.suppress(Error):  # the session is over
                for feature in features:
                    feature.unprepare()
                if opened.session.attempt != attempt:  # nothing counts that went before
                    for feature in features:
                        feature.failed()
            raise

    def _settle(self, opened: OpenJob, agreed: Agreed, exchange: Exchange) -> None:
        """Prepares the step: moves gradients to where their parameters are, registers new parameters, and takes edits."""
        collected = agreed.collected
        collected.settle()
        if agreed.roster.has_tied:
            check_tied(exchange, agreed.roster, collected)
        for feature in self.job.features:
            feature.settle(collected.gradients, registers=bool(collected.fresh))
        registration.register(opened, collected.fresh, exchange, agreed.roster, agreed.registers)
        if agreed.edits:
            edited = [member for member, is_edited in zip(opened.members, agreed.edited) if is_edited]
            check_values(exchange, opened.roster, opened.members, edited)
            edits.take(opened, edited, exchange)
        scale = 1.0 if self.results.scale is None else self.results.scale
        ready = Ready(agreed.roster, collected.gradients, agreed.present, scale, self.results.max_norm, exchange)
        for feature in self.job.features:
            feature.prepare(opened, ready)

    def _make(self, opened: OpenJob, step: Step) -> None:
        attempt = opened.session.attempt
        try:
            step.run()
        except BaseException:
            for feature in self.job.features:
                feature.failed(attempt)
            raise
        finally:
            step.end()
        for feature in self.job.features:
            feature.stepped()


def _changes(opened: OpenJob, agreed: Agreed) -> set[int]:
    """Returns the members, by index, whose parameters the step may change."""
    written = set(opened.session.written)
    return {i for i, member in enumerate(opened.members) if agreed.present[i] or member.name in written}
