"""A job as one rank trains it: the session with the servers, the registered parameters, and how far the training loop has come.

The parts of the package share a Job. The optimizer is its face: it makes the Job, and lends it the parameter groups.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ballast import _native
from ballast.errors import Error, say, warn
from ballast.torch.group import ranks
from ballast.torch.group.agreement import check_values
from ballast.torch.group.roster import Roster
from ballast.torch.group.together import everyone, together
from ballast.torch.job import spec
from ballast.torch.job.buffers import Buffers
from ballast.torch.job.connection import Connection
from ballast.torch.job.kept import Kept
from ballast.torch.job.naming import Names
from ballast.torch.job.progress import Progress
from ballast.torch.job.registration import Fit, check_frozen, placed
from ballast.torch.modes import plainly
from ballast.torch.state_dict import moments
from ballast.torch.stepping.host_memory import HostMemory
from ballast.torch.stepping.members import Member, Memory, give_values, warn_of_others, wrote

if TYPE_CHECKING:
    import torch.distributed as dist

    from ballast.torch.algorithms import Algorithm
    from ballast.torch.job.state import Entry
    from ballast.torch.sharding.sharded import Sharded
    from ballast.torch.stepping.early import Early
    from ballast.torch.stepping.overlap import Overlap

# A job's parameter groups are counted when it is made, so it is made with room for more: a multiple of so many.
_GROUPS = 16


class Job:
    """One rank's side of a job. Threads: the training loop's; another thread may call close()."""

    def __init__(self, algorithm: Algorithm, options: _native.OpenOptions, groups: Callable[[], list[dict[str, Any]]], *,
                 servers: str | Sequence[str] | None, access: dict[str, Any], budgets: dict[str, Any], durability: str | None,
                 formats: Mapping[str, str], checkpoints: int, tied: Mapping[str, dist.ProcessGroup],
                 group: dist.ProcessGroup | None, host: str | None) -> None:
        """options: the job's, as far as they are known before it is opened. groups(): the optimizer's param_groups as they are now.
        access: as of Connection. budgets: of an embedded server. durability: None to choose. formats: how servers keep moments and
        master. tied: by name, the group that a parameter's gradients are summed over. group: of the ranks that train the job; None: the
        default group. host: this rank's address, see hosts.check()."""
        self._given_group = group
        self._opened_group: ranks.Group | None = None  # None: the job is not open
        self._origin = f"{'several' if self.group.several else 'one'}/{self.group.count('job')}"
        self.algorithm, self.options, self.formats = algorithm, options, formats
        self.tied = tied
        self.debug = False  # digests tell of writes that marks do not show
        self.states: str | None = None  # what a state_dict() has: 'named' (a version's name), 'full' (moments), None: see gives_moments
        self.connection = Connection(servers, budgets, access, host)
        self.session: _native.Session | None = None  # None: the job is not open
        self.names = Names(self)
        self.members: list[Member] = []  # the registered parameters, in the session's order
        self.roster: Roster | None = None  # what all ranks have; None: the job was not open yet
        self.host = HostMemory()
        self.progress = Progress()
        self.kept = Kept(options.job, checkpoints)
        self.unpulled = False  # parameters may not hold the job's version yet
        self.found: int | None = None  # the version that the job was found at; None: the job was new
        self.extras: dict[torch.Tensor, dict[str, Any]] = {}  # what others keep in optimizer.state[p], in the trainer alone
        self.entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()  # by id, those of optimizer.state in use
        self.state_lives = 0  # how often another optimizer.state took the place of what was there
        self.overlap: Overlap | None = None
        self.early: Early | None = None
        self.buffers = Buffers()
        self.sharded: Sharded | None = None  # the model whose parameters live on the servers alone
        self._groups = groups
        self._durability = durability
        self._opening = self._closed = False
        self._by_parameter: dict[int, Member] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups()

    @property
    def group(self) -> ranks.Group:
        """The ranks that train the job: the default group is the one that is there when the job opens."""
        return self._opened_group or ranks.of(self._given_group)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def durability_to_be(self) -> str:
        """The durability that the job will have once it is open."""
        return self._durability or self.connection.default_durability(self.group, self.sharded is not None)

    @property
    def shares_process(self) -> bool:
        """The job is, or will be, on the server inside this process, which works on the trainer's own memory."""
        return self.sharded is None and self.connection.shares_process(self.group)

    @property
    def lends_masters(self) -> bool:
        """Parameters are their own masters: the server has their moments alone, and whatever is written to a parameter counts."""
        return self.session is not None and self.options.optimizer.master == 'lent'

    @property
    def gives_moments(self) -> bool:
        """A state_dict() of this job has its moments, and not the name of a version: always where no version outlives the job."""
        durability = self.durability_to_be if self.session is None else self.options.durability
        return durability == 'none' or self.states == 'full'

    @property
    def origin(self) -> str:
        """Tells this optimizer's state_dicts, from before its job is open, from those of others."""
        return f'{self.group.run()}/{self._origin}'

    # --- opening and closing

    def open(self, partly: bool = False, trained: Iterable[str] = (), for_step: bool = False, alone: bool = False) -> _native.Session:
        """The session; opens the job at the first call. partly: also a job whose state is not whole, and without its parameters.
        trained: as new_tensors'. Gradients that were pushed early go back, but for_step. alone: the call may be of one rank, which pulls
        nothing by itself."""
        self.check_usable()
        self.wait()
        self._check_session()
        alone = alone and self.session is not None and self.options.world_size > 1
        if self.session is None:
            self._start(trained)
        if not partly:
            self.progress.check_whole(self.options.job)
        if self.early is not None:
            if not for_step:
                self.early.withdraw()
            self.early.follow(self.session, self.members, self.host)
        if self.sharded is not None:
            self.sharded.follow(self)
        if self.options.world_size == 1:
            self.give_values(self.session.exchange)
        if not partly and self.unpulled and not alone:
            self.pull()
        return self.session

    def check_usable(self) -> None:
        self.connection.check_process()
        if self._closed:
            raise Error('the optimizer was closed; make a new one', 'BAD_REQUEST')

    def _check_session(self) -> None:
        """Refuses a session that has ended, with why it did and what is left of the job."""
        why, reason = ('', '') if self.session is None else self.session.ended
        if why:
            left = self.connection.what_is_left(self.options)
            raise Error(f"the session of job '{self.options.job}' has ended after step {self.progress.steps}: {why}. {left}", reason)

    def exchange(self, call: str) -> ranks.Exchange:
        """The exchange of ranks that make this call."""
        self.check_usable()
        if self.session is not None:
            return ranks.Within(call, self.session.exchange, self.options.rank)
        return self.group.exchange(f"{call} of job '{self.options.job}'", self.options.step_timeout)

    def _start(self, trained: Iterable[str]) -> None:
        if self._opening:
            raise Error(f"job '{self.options.job}' is being opened by a call that this one came amid, from a signal's handler say: ask "
                        'again when that call has returned', 'BUSY')
        self._opening = True
        try:
            self._connect(trained)
        finally:
            self._opening = False

    def _connect(self, trained: Iterable[str]) -> None:
        group = self.group
        self.session, fit = self.connection.open(group, self.options, lambda: self._look(trained), apart=self.sharded is not None)
        self._opened_group = group
        try:
            self._begin(fit)
        except BaseException:  # the next attempt begins anew
            self.leave()
            raise

    def _look(self, trained: Iterable[str]) -> Fit:
        """Completes the options, and finds what the job is opened with. An error here is an error on all ranks."""
        if self.sharded is not None:
            self.sharded.check_given(parameter for _, _, parameter in placed(self))
        fit = Fit(self, trained)
        if not fit.members and not self.group.several:
            raise Error('no parameter requires a gradient: there is nothing to optimize', 'BAD_SPEC')
        unknown = self.tied.keys() - {member.name for member in fit.members}
        if unknown:
            raise Error(f"tied={{'{min(unknown)}': ...}}: this rank trains no parameter of that name", 'BAD_CONFIG')
        self.options.optimizer = spec.of(self)
        spec.check(self, self.options.optimizer)
        self.options.group_count = -(-len(self.param_groups) // _GROUPS) * _GROUPS
        self.options.durability = self.durability_to_be
        if self.early is not None and self.group.several:
            raise Error('push_early is for one rank: DistributedDataParallel reduces gradients after backward has made them, and what '
                        'clip_grad_norm_ does to the DTensors of fully_shard moves no version counter; leave push_early out',
                        'UNSUPPORTED')
        return fit

    def _begin(self, fit: Fit) -> None:
        self.members = fit.members
        if self.connection.was_used:
            warn(f"job '{self.options.job}' was open in another optimizer of this process, which can make no more steps from now on; where "
                 'both train, give each a name of its own')
        if fit.unknown:
            warn(f"job '{self.options.job}' has no state of {len(fit.unknown)} parameters, '{fit.unknown[0]}' among them: they begin anew "
                 'with the next step')
        self._look_at_members()
        if not self.lends_masters:
            warn_of_others(self.members, self.group)
        self.take_blob()
        self.unpulled = self.session.version >= 0
        if self.lends_masters and not self.unpulled:
            self.connection.hold_masters(self)
        self.give_values(ranks.Within('the beginning of a job', self.session.exchange, self.options.rank))
        self.found = self.session.version if self.unpulled else None
        if self.options.rank == 0 and (self.options.resume != 'never' or self.options.servers):  # else it can only be new
            after = 'a load that did not end' if self.progress.partly else f'step {self.progress.steps}'
            say(f"job '{self.options.job}' " + (
                'is new' if self.found is None else f'goes on after {after} (version {self.found})'))
        if self.progress.steps > 0 and not self.progress.partly and self.options.rank == 0:
            self.buffers.warn(self.options.job, self.progress.steps)
        if self.sharded is not None:
            self.sharded.values.forget()

    def _look_at_members(self) -> None:
        """What is frozen, and whose master is where: as the job has them, which keeps what it was made with."""
        for member in self.members:
            member.is_frozen = self.session.frozen_as(member.name) != ''
            member.is_master = self.lends_masters
        check_frozen(self.members)

    def leave(self) -> None:
        """As if the job had not been opened."""
        self.session, self.members, self._by_parameter, self.host = None, [], {}, HostMemory()
        self._opened_group = None
        self.unpulled, self.found = False, None
        self.progress.forget()
        if self.early is not None:
            self.early.leave()
        self.connection.leave()
        if self.sharded is not None:
            self.sharded.leave()

    def close(self) -> None:
        """Ends the session, once the step under way has ended."""
        self._closed = True
        sent = None if self.early is None else self.early.sent
        try:
            if self.early is not None:
                self.early.close()
            self.wait()
        finally:
            self.connection.close()  # a thread amid a step finds the session closed
            del sent
            if self.sharded is not None:
                self.sharded.leave()
            self.members, self._by_parameter, self.host = [], {}, HostMemory()

    def drop_to(self, attempt: int) -> None:
        """Takes back what went to the session before a step, until this rank is at this attempt of it. COLLECTIVE without a message."""
        while self.session.attempt < attempt:
            self.session.drop()

    def discard(self, exchange: ranks.Exchange) -> None:
        """No step will take gradients that went before. COLLECTIVE: a rank of which none went does not see that others drop theirs."""
        if self.sharded is not None:
            self.sharded.discard()
        _, attempts = everyone(exchange, lambda: self.session.attempt, lambda attempt: str(attempt).encode())
        self.drop_to(max(map(int, attempts)))

    def wait(self) -> None:
        """Returns when no step is under way beside the loop. Raises what that step raised."""
        if self.overlap is not None:
            self.overlap.wait()

    # --- what the servers have

    def take_blob(self) -> None:
        """Takes the loop's position from the version that was found or restored."""
        self.progress.take(self.session.blobs, self.options.rank)

    def give_values(self, exchange: ranks.Exchange) -> None:
        """Tensors that have no values on the servers yet get those of their parameters: all of a new job, and those of a registration that
        was cut off, as the process ended say. What the others have stays. COLLECTIVE."""
        if not self.session.needs_values:
            return
        check_values(exchange, self.roster, self.members, together(exchange, self._without_values))
        give_values(self.session, self.members, together(exchange, lambda: Memory(self.members, self.host).wait()))

    def _without_values(self) -> list[Member]:
        """Members that may have no values on the servers: none that is left out has none."""
        if self.session.version < 0 or self.options.world_size == 1:
            return self.members
        return [member for member in self.members if self.session.tensor_steps(member.name) == 0
                and not bool(moments.read_part(self.session, member, 'master').any())]

    def pull(self) -> None:
        """Brings the job's version to all parameters."""
        memory = Memory(self.members, self.host).wait()
        self.session.pull(memory.parameters)
        if self.lends_masters:
            self._take_masters()
        else:
            for i in range(len(self.members)):
                memory.write_back(i)
        wrote(self.members)
        self.unpulled = False

    @torch.no_grad()
    def _take_masters(self) -> None:
        """From the optimizer of this process that had the job before: the server has moments alone."""
        holder = self.connection.masters_holder
        if holder is not None:
            with contextlib.suppress(Error):  # it is the holder's to tell; a step under way brings its values to the parameters
                holder.wait()
        held = {member.name: member.parameter for member in ([] if holder is None else holder.members)}
        gone = [member.name for member in self.members if member.name not in held]
        if gone:
            raise Error(f"job '{self.options.job}' has no values of parameter '{gone[0]}': with durability='none' they were in the "
                        'optimizer that made the job, which is gone. Load a state, or make a job of another name', 'STATE_LOST')
        for member in self.members:
            if held[member.name] is not member.parameter:
                member.parameter.copy_(held[member.name])
        self.connection.hold_masters(self)

    def member_of(self, parameter: torch.Tensor) -> Member | None:
        """None where the parameter is not registered."""
        if len(self._by_parameter) < len(self.members):
            self._by_parameter = {id(member.parameter): member for member in self.members}
        return self._by_parameter.get(id(parameter))

    @plainly
    def state_keys(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Those of one parameter's entry on the servers, in torch.optim's format; (): it has none."""
        if self.session is None and self.options.resume == 'never':
            return ()  # as torch's: the job will be new
        self.open(alone=True)
        member = self.member_of(parameter)
        if member is None or member.is_frozen:
            return ()  # it never wanted a gradient
        return moments.keys(parameter, moments.moment_names(self.algorithm.kind, self.options.optimizer))

    @plainly
    def read_key(self, parameter: torch.Tensor, key: str, whole: bool = False) -> torch.Tensor:
        """key: of state_keys(). whole: a whole tensor also of a DTensor, of which this rank reads its part otherwise."""
        session, member = self.open(alone=True), self.member_of(parameter)
        start = self.param_groups[member.group].get('initial_accumulator_value', 0)
        names = moments.moment_names(self.algorithm.kind, self.options.optimizer)
        return moments.read(session, member, parameter, names, key, start, whole)

    def read_state(self, parameter: torch.Tensor, whole: bool = False) -> dict[str, torch.Tensor]:
        """One parameter's entry as the servers have it."""
        return {key: self.read_key(parameter, key, whole) for key in self.state_keys(parameter)}

    @plainly
    def read_master(self, parameter: torch.Tensor, whole: bool = True) -> torch.Tensor:
        reads = moments.read_array if whole else moments.read_as_placed
        return reads(self.open(alone=True), self.member_of(parameter), parameter, 'master')
