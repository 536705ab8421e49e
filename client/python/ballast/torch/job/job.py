"""A job as one rank trains it: from the optimizer that asks for it, through the session with the servers, to its end.

The parts of the package share a Job, and its open side, an OpenJob. The optimizer makes the Job, and lends it the parameter groups.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ballast import _native
from ballast.errors import Error, say, warn
from ballast.torch import arguments
from ballast.torch.algorithms import state_group
from ballast.torch.job import moments, spec
from ballast.torch.job.buffers import Buffers
from ballast.torch.job.connection import Connection
from ballast.torch.job.features import Feature
from ballast.torch.job.fit import Fit
from ballast.torch.job.kept import Kept
from ballast.torch.job.naming import Parameters
from ballast.torch.job.opened import OpenJob
from ballast.torch.job.progress import Progress
from ballast.torch.modes import plainly
from ballast.torch.ranks import groups
from ballast.torch.ranks.together import everyone, together
from ballast.torch.tensors.members import Member, check_frozen, warn_of_others

if TYPE_CHECKING:
    import torch.distributed as dist

    from ballast.torch.algorithms import Algorithm

# A job's parameter groups are counted when it is made, so it is made with room for more: a multiple of so many.
_GROUPS = 16


class Job:
    """One rank's side of a job, open or not. Threads: the training loop's; another thread may call close()."""

    def __init__(self, algorithm: Algorithm, options: _native.OpenOptions, param_groups: Callable[[], list[dict[str, Any]]], *,
                 servers: str | Sequence[str] | None, access: dict[str, Any], budgets: dict[str, Any], durability: str | None,
                 formats: Mapping[str, str], checkpoints: int, tied: Mapping[str, dist.ProcessGroup],
                 group: dist.ProcessGroup | None, host: str | None) -> None:
        """options: the job's, as far as they are known before it opens. param_groups(): returns the optimizer's current ones. access: as
        for Connection. budgets: of an embedded server. durability: None to choose. formats: how servers keep moments and master. tied: by
        name, the group that sums a parameter's gradients. group: the ranks that train the job. None: the default group. host: this rank's
        address, see hosts.check()."""
        self._given_group = group
        self.opened: OpenJob | None = None
        self._origin = f"{'several' if self.group.several else 'one'}/{self.group.count('job')}"
        self.algorithm, self.options, self._formats = algorithm, options, formats
        self.states: str | None = None  # what a state_dict() has: 'named' (a version's name), 'full' (moments), None: see gives_moments
        self.connection = Connection(servers, budgets, access, host, self)
        self.parameters = Parameters(param_groups, _members_of(self), tied)
        self.parameters.state_group = functools.partial(_state_group, algorithm, options, param_groups)
        self.progress = Progress()
        self.kept = Kept(options.job, checkpoints)
        self.extras: dict[torch.Tensor, dict[str, Any]] = {}  # what others keep in optimizer.state[p], in the trainer alone
        self.features: list[Feature] = []
        self.buffers = Buffers()
        self._durability = durability
        self._opening = self._closed = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.parameters.groups

    @property
    def group(self) -> groups.Group:
        """The ranks that train the job. The default group is the one that exists when the job opens."""
        return groups.of(self._given_group) if self.opened is None else self.opened.group

    @property
    def members(self) -> Sequence[Member]:
        """The registered parameters, in the session's order. The list is empty until the job opens."""
        return [] if self.opened is None else self.opened.members

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def lives_apart(self) -> bool:
        """The parameters live only on the servers."""
        return any(feature.lives_apart for feature in self.features)

    @property
    def durability_to_be(self) -> str:
        """The durability that the job will have once it is open."""
        return self._durability or self.connection.default_durability(self.group, self.lives_apart)

    @property
    def gives_moments(self) -> bool:
        """A state_dict() of this job has its moments, and not the name of a version. It must if no version outlives the job."""
        durability = self.durability_to_be if self.opened is None else self.options.durability
        return durability == 'none' or self.states == 'full'

    @property
    def origin(self) -> str:
        """Distinguishes this optimizer's state_dicts from before its job is open from those of other optimizers."""
        return f'{self.group.run()}/{self._origin}'

    @property
    def spec(self) -> _native.Optimizer:
        """The open job's. If it is not open, what the parameters and groups ask for. The server inside this process works on the trainer's
        own memory, and can leave masters there."""
        if self.opened is not None:
            return self.options.optimizer
        shares = not self.lives_apart and self.connection.shares_process(self.group)
        may_lend = shares and self.durability_to_be == 'none' and not self.algorithm.may_assist
        return spec.of(self.algorithm, self._formats, self.parameters, may_lend)

    def check_groups(self, wanted: _native.Optimizer) -> None:
        """Refuses a group that asks for what the job was not made for. wanted: the job's spec."""
        spec.check(self.algorithm, self.param_groups, wanted)

    @property
    def groups_max(self) -> int:
        """How many parameter groups the open job has room for."""
        return self.options.group_count // (1 + self.algorithm.may_assist)

    # --- opening and closing

    def open(self, partly: bool = False, trained: Iterable[str] = (), for_step: bool = False, alone: bool = False) -> OpenJob:
        """Returns the open job, and opens it at the first call. partly: accepts a job whose state is not whole, and does not pull its
        parameters. trained: as for new_tensors(). for_step: the call is a step; any other call takes back gradients that were pushed early.
        alone: one rank may call by itself, and then pulls nothing."""
        self.check_usable()
        self.wait()
        self._check_session()
        alone = alone and self.opened is not None and self.options.world_size > 1
        opened = self.opened or self._start(trained)
        if not partly:
            self.progress.check_whole(self.options.job)
        for feature in self.features:
            feature.opened(opened, for_step)
        if self.options.world_size == 1:
            opened.give_values(opened.session.exchange)
        if not partly and opened.unpulled and not alone:
            opened.pull()
        return opened

    def check_usable(self) -> None:
        self.connection.check_process()
        if self._closed:
            raise Error('the optimizer was closed; make a new one', 'BAD_REQUEST')

    def _check_session(self) -> None:
        """Refuses a session that has ended, and says why it ended and what is left of the job."""
        why, reason = ('', '') if self.opened is None else self.opened.session.ended
        if why:
            left = self.connection.what_is_left(self.options)
            raise Error(f"the session of job '{self.options.job}' has ended after step {self.progress.steps}: {why}. {left}", reason)

    def exchange(self, call: str) -> groups.Within:
        """The exchange of ranks that make this call."""
        self.check_usable()
        if self.opened is not None:
            return self.opened.exchange(call)
        return self.group.exchange(f"{call} of job '{self.options.job}'", self.options.step_timeout)

    def _start(self, trained: Iterable[str]) -> OpenJob:
        if self._opening:
            raise Error(f"job '{self.options.job}' is being opened by a call that this call interrupted, as from a signal handler; call "
                        'again when that call has returned', 'BUSY')
        self._opening = True
        try:
            return self._connect(trained)
        finally:
            self._opening = False

    def _connect(self, trained: Iterable[str]) -> OpenJob:
        group = self.group
        session, fit, roster = self.connection.open(group, self.options, lambda: self._look(group, trained), self._entries,
                                                    apart=self.lives_apart)
        self.opened = opened = OpenJob(session, fit.members, roster, group, options=self.options, parameters=self.parameters,
                                       connection=self.connection, progress=self.progress)
        try:
            self._begin(opened, fit)
        except BaseException:  # the next attempt begins anew
            self.leave()
            raise
        return opened

    def _entries(self) -> list[tuple[str, str]]:
        return [entry for feature in self.features for entry in feature.entries(self.param_groups)]

    def _look(self, group: groups.Group, trained: Iterable[str]) -> Fit:
        """Completes the options, and finds the tensors to open the job with. An error here is an error on all ranks."""
        for feature in self.features:
            feature.opening(self.parameters, group)
        # A job's groups are counted when it is made: with room for more, and as many for the states of those that the trainer assists.
        self.options.group_count = -(-len(self.param_groups) // _GROUPS) * _GROUPS * (1 + self.algorithm.may_assist)
        fit = Fit(self.parameters, group, self.options, trained)
        if not fit.members and not group.several:
            raise Error('no parameter requires a gradient, so there is nothing to optimize', 'BAD_SPEC')
        unknown = self.parameters.tied.keys() - {member.name for member in fit.members}
        if unknown:
            raise Error(f"tied={{'{min(unknown)}': ...}}: this rank trains no parameter of that name", 'BAD_CONFIG')
        self.options.optimizer = self.spec
        self.check_groups(self.options.optimizer)
        self.options.durability = self.durability_to_be
        return fit

    def _begin(self, opened: OpenJob, fit: Fit) -> None:
        self._warn_of_surprises(fit)
        _look_at_members(opened)
        if not opened.lends_masters:
            warn_of_others(opened.members, opened.group)
        opened.take_blob()
        opened.unpulled = opened.session.version >= 0
        if opened.lends_masters and not opened.unpulled:
            self.connection.hold_masters()
        opened.found = opened.session.version if opened.unpulled else None
        exchange, more = opened.exchange('the beginning of a job'), ''
        if opened.found is None:
            self.progress.origin = next(filter(None, (feature.origin for feature in self.features)), 0)
        else:
            more = together(exchange, lambda: ''.join(feature.goes_on(opened) for feature in self.features))
        opened.give_values(exchange)
        if self.options.rank == 0:
            self._say_where_it_is(opened, more)

    def _warn_of_surprises(self, fit: Fit) -> None:
        if self.connection.was_used:
            warn(f"job '{self.options.job}' was open in another optimizer of this process, which can make no more steps from now on. If "
                 'both train, give each a name of its own')
        if fit.unknown:
            warn(f"job '{self.options.job}' has no state of {len(fit.unknown)} parameters, '{fit.unknown[0]}' among them; the next step "
                 'starts their state from zero')

    def _say_where_it_is(self, opened: OpenJob, more: str) -> None:
        if self.options.resume != 'never' or self.options.servers:  # else it can only be new
            after = 'a load that did not end' if self.progress.partly else f'step {self.progress.steps}'
            say(f"job '{self.options.job}' " + (
                'is new' if opened.found is None else f'goes on after {after} (version {opened.found}){more}'))
        if self.progress.steps > 0 and not self.progress.partly:
            self.buffers.warn(self.options.job, self.progress.steps, [member.parameter for member in opened.members])

    def leave(self) -> None:
        """As if the job had not been opened."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.let_go()
        self.progress.forget()
        self.connection.leave()
        for feature in self.features:
            feature.left()

    def close(self) -> None:
        """Ends the session, once the step under way has ended."""
        self._closed = True
        held = []
        try:
            held += [feature.closing() for feature in self.features]
            self.wait()
        finally:
            self.connection.close()  # a thread amid a step finds the session closed
            del held
            for feature in self.features:
                feature.left()
            if self.opened is not None:
                self.opened.let_go()

    def wait(self) -> None:
        """Returns when no step is under way beside the loop. Raises what that step raised."""
        for feature in self.features:
            feature.wait()

    def discard(self, exchange: groups.Exchange) -> None:
        """No step will take the gradients that went before. COLLECTIVE: a rank without such gradients does not see that others drop
        theirs."""
        for feature in self.features:
            feature.discard()
        opened = self.opened or self.open()
        _, attempts = everyone(exchange, lambda: opened.session.attempt, lambda attempt: str(attempt).encode())
        opened.drop_to(max(map(int, attempts)))

    # --- what the servers have of one parameter

    def member_of(self, parameter: torch.Tensor) -> Member | None:
        """Returns None if the parameter is not registered, or the job is not open."""
        return None if self.opened is None else self.opened.member_of(parameter)

    def arrays(self) -> list[dict[str, moments.Array]]:
        """Returns by group, by torch's name, the moments that its parameters have."""
        of_job = self.spec
        return [moments.arrays(self.algorithm, group, of_job) for group in self.param_groups]

    @plainly
    def state_keys(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Returns the keys of one parameter's entry on the servers, in torch.optim's format. (): it has no entry."""
        if self.opened is None and self.options.resume == 'never':
            return ()  # as torch's: the job will be new
        member = self.open(alone=True).member_of(parameter)
        if member is None or member.is_frozen:
            return ()  # it never wanted a gradient
        return moments.keys(parameter, self.arrays()[member.group])

    @plainly
    def read_key(self, parameter: torch.Tensor, key: str, whole: bool = False) -> torch.Tensor:
        """Reads one key of state_keys(). whole: returns a whole tensor even for a DTensor; else this rank reads only its part."""
        session, member = self._registered(parameter)
        start = self.param_groups[member.group].get('initial_accumulator_value', 0)
        return moments.read(session, member, parameter, self.arrays()[member.group], key, start, whole)

    def read_state(self, parameter: torch.Tensor, whole: bool = False) -> dict[str, torch.Tensor]:
        """Reads one parameter's entry from the servers."""
        return {key: self.read_key(parameter, key, whole) for key in self.state_keys(parameter)}

    @plainly
    def read_master(self, parameter: torch.Tensor, whole: bool = True) -> torch.Tensor:
        session, member = self._registered(parameter)
        reads = moments.read_array if whole else moments.read_as_placed
        return reads(session, member, parameter)

    def _registered(self, parameter: torch.Tensor) -> tuple[_native.Session, Member]:
        opened = self.open(alone=True)
        member = opened.member_of(parameter)
        if member is None:
            raise Error(f"this parameter of shape {list(parameter.shape)} is not registered with job '{self.options.job}'; expected one "
                        'that is', 'BAD_REQUEST')
        return opened.session, member


def _state_group(algorithm: Algorithm, options: _native.OpenOptions, param_groups: Callable[[], list[dict[str, Any]]],
                 g: int) -> int | None:
    """Parameters.state_group."""
    return state_group(g, options.group_count) if algorithm.assists(param_groups()[g]) else None


def _look_at_members(opened: OpenJob) -> None:
    """Notes which members are frozen, and which are their own masters. The job keeps what it was made with."""
    for member in opened.members:
        member.is_frozen = opened.session.frozen_as(member.name) != ''
        member.is_master = opened.lends_masters
    check_frozen(opened.members)


def _members_of(job: Job) -> Callable[[], Sequence[Member]]:
    """Returns a function that gives the current members, without keeping the job alive."""
    there = weakref.ref(job)

    def members() -> Sequence[Member]:
        job = there()
        return [] if job is None else job.members
    return members


def made(algorithm: Algorithm, given: Mapping[str, Any], param_groups: Callable[[], list[dict[str, Any]]]) -> Job:
    """Makes a job. Refuses wrong arguments before anything happens. given: of options.complete(). param_groups(): returns the current
    ones."""
    arguments.check(given)
    options = _native.OpenOptions()
    options.job, options.resume, options.pin_interval = given['name'], given['resume'], given['pin_interval']
    options.chunk_elements, options.seed = given['chunk_elements'], given['seed']
    options.replicas, options.failover_after = given['replicas'] or 0, float(given['failover_after'])
    options.step_timeout, options.open_timeout = float(given['step_timeout']), float(given['open_timeout'])

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}
    job = Job(algorithm, options, param_groups, servers=given['servers'], access=some('tls', 'token_file'), durability=given['durability'],
              formats=some('moments', 'master'), budgets=some('dram', 'nvme', 'directory', 'threads'), checkpoints=given['checkpoints'],
              tied=arguments.groups('tied', given['tied']), group=arguments.group('group', given['group']), host=given['host'])
    if given['states'] == 'named' and job.durability_to_be == 'none':
        raise Error("states='named': a state names a version, but no version of a job with durability='none' outlives the job; expected "
                    "'full', None, or durability='step'", 'BAD_CONFIG')
    job.states = given['states']
    job.parameters.debug = arguments.flag('debug', given['debug'], 'BALLAST_DEBUG')
    return job
