"""Which parameters of an optimizer register with its job, and as what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.group import placement
from ballast.torch.group import roster as rosters
from ballast.torch.group.agreement import check_values
from ballast.torch.group.ranks import Exchange
from ballast.torch.group.roster import Line, Roster
from ballast.torch.group.together import together
from ballast.torch.job import edits
from ballast.torch.job.naming import UnitsBySize, positional_name, unit_of
from ballast.torch.sharding.member import member_of
from ballast.torch.sharding.remote import remote_of
from ballast.torch.stepping import shared_memory
from ballast.torch.stepping.members import DTYPES, Member, Memory, check_parameter, give_values

if TYPE_CHECKING:
    from ballast.torch.job.job import Job


class Fresh(NamedTuple):
    """A parameter that is about to register."""
    member: Member
    parameter: torch.Tensor
    tensor: _native.Tensor


def placed(job: Job) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Each parameter with its group's number and its place in the group."""
    job.names.follow()
    for g, group in enumerate(job.param_groups):
        for i, parameter in enumerate(group['params']):
            yield g, i, parameter


def name_of(job: Job, g: int, i: int, parameter: torch.Tensor) -> str:
    name = job.names.of(job.param_groups[g], i)
    return positional_name(g, i, parameter.shape) if name is None else name


def new_tensors(job: Job, trained: Collection[str] = ()) -> list[Fresh]:
    """Parameters that have a gradient or want one, live on the servers alone, or have a name of `trained`, and are not in the job yet."""
    there = {id(member.parameter): member for member in job.members}
    names = {member.name for member in job.members}
    by_size = UnitsBySize()
    found = []
    for g, i, parameter in placed(job):
        name = job.names.of(job.param_groups[g], i)
        unit = unit_of(name) if name is not None else by_size.next(parameter.numel())
        name = name_of(job, g, i, parameter)
        known = there.get(id(parameter))
        if known is not None and known.group != g:
            raise Error(f"parameter '{known.name}' has moved from group {known.group} to {g}: a job's tensors stay in "
                        'their groups', 'BAD_SPEC')
        # torch updates what has a gradient, frozen or not.
        wanted = parameter.requires_grad or parameter.grad is not None or remote_of(parameter) is not None or name in trained
        if known is not None or not wanted:
            continue
        if parameter.numel() == 0:
            continue  # nothing to train; servers have no empty tensors
        check_parameter(name, parameter, job.group)
        if name in names:
            raise Error(f"there are two parameters '{name}', or one took the place of another after the first step; give "
                        'parameters of several models names of their own, and make a new optimizer for new parameters',
                        'BAD_SPEC')
        names.add(name)
        found.append(_fresh(job, name, unit, g, parameter, trained))
    if found or any(member.moved for member in job.members):
        shared_memory.refuse(job.members + [member for member, _, _ in found])
    return found


def frozen_as(parameter: torch.Tensor) -> str:
    """What the servers of a new job keep of a parameter: '' for its state, else _native.Tensor.frozen."""
    part = remote_of(parameter)
    return '' if part is None or parameter.requires_grad else part.unit.model.frozen


def check_frozen(members: Iterable[Member]) -> None:
    """Refuses to train what the servers have no state of."""
    for member in members:
        if member.is_frozen and member.parameter.requires_grad:
            raise Error(f"parameter '{member.name}' wants a gradient, and was frozen when the job was made: the servers have its value "
                        'alone, and nothing to train it with. Leave it frozen, or make a new job in which it is not, or of '
                        "shard(frozen='state')", 'UNSUPPORTED')


def _fresh(job: Job, name: str, unit: str, group: int, parameter: torch.Tensor, trained: Collection[str]) -> Fresh:
    shape = list(parameter.shape) or [1]
    tensor = _native.Tensor(name, unit, shape, group)
    tensor.frozen = '' if name in trained else frozen_as(parameter)
    key = placement.key_of(name, parameter, job.group)
    if key is not None:
        placement.check(name, parameter, key, job.group.rank)
        tensor.placement = placement.native(key)
        tensor.parts = placement.parts_of(key, tuple(shape))
    part = remote_of(parameter)
    where = '' if part is None else f', on the servers alone{part.unit.model.how}'
    where += ', tied' if name in job.tied else ''
    where += f', frozen as {tensor.frozen}' if tensor.frozen else ''
    what = f"{DTYPES[parameter.dtype]} {shape} in group {group} and unit '{unit}'{where}"
    line = Line(name, what, tuple(shape), key, True, name in job.tied)
    member = member_of(line, group, parameter, job.debug)
    member.is_master = job.lends_masters
    return Fresh(member, parameter, tensor)


def lines(job: Job, members: Iterable[Member]) -> list[Line]:
    """What this rank says of its parameters: of `members`, and which others it has."""
    mine = [member.line for member in members]
    names = {line.name for line in mine}
    others = [name_of(job, g, i, parameter) for g, i, parameter in placed(job) if parameter.numel() > 0]
    return mine + [Line(name, '', (), None, False) for name in others if name not in names]


def late_tensors(job: Job, trained: Collection[str] = ()) -> list[Fresh]:
    """new_tensors() of a job that is open."""
    fresh = new_tensors(job, trained)
    if fresh and job.options.durability == 'every-K':
        raise Error(f"parameter '{fresh[0].member.name}' came after the first step, and a job with durability='every-K' has all of its "
                    'tensors from the start: its kept versions would have no state of it', 'UNSUPPORTED')
    return fresh


def register(job: Job, fresh: list[Fresh], exchange: Exchange, roster: Roster, registers: bool) -> None:
    """Adds parameters to a job that is open. COLLECTIVE. roster: of agree(), with them. registers: some rank has new ones."""
    job.give_values(exchange)
    if not registers:
        return
    if roster.places and not job.options.placed:
        late = fresh[0].member.name if fresh else 'of another rank'
        raise Error(f"parameter '{late}' came after the first step, and not whole on all ranks as those before; give all parameters to the "
                    'optimizer before the first step', 'UNSUPPORTED')
    new = [member for member, _, _ in fresh]
    check_values(exchange, roster, job.members + new, new)
    edits.commit_written(job, exchange)
    job.members.extend(new)
    registered = len(job.members)
    try:
        job.session.register([tensor for _, _, tensor in fresh])
    finally:  # Ctrl-C may come when the job has them
        del job.members[sum(map(len, job.session.units)):]
        if len(job.members) == registered:
            job.roster = roster
    give_values(job.session, job.members, together(exchange, lambda: Memory(job.members, job.host).wait()))


class Fit:
    """Which tensors a session names when it opens its job: those that want gradients here, and as the job turns out to have others,
    those, and without those that it has not got."""

    def __init__(self, job: Job, trained: Iterable[str]) -> None:
        self._job, self._trained = job, set(trained)
        self._unknown: set[str] = set()
        self._found = new_tensors(job, self._trained)

    @property
    def members(self) -> list[Member]:
        return [member for member, _, _ in self._found if member.name not in self._unknown]

    @property
    def tensors(self) -> list[_native.Tensor]:
        return [tensor for member, _, tensor in self._found if member.name not in self._unknown]

    @property
    def unknown(self) -> list[str]:
        """Names, sorted: they may register with the next step."""
        return sorted(self._unknown)

    def agree(self, exchange: Exchange) -> Roster:
        """Brings the ranks' parameters together. COLLECTIVE."""
        job = self._job
        job.roster = rosters.gather(exchange, lines(job, self.members), job.group)
        job.options.placed = job.roster.places
        return job.roster

    def follow(self, refused: Error) -> Fit:
        """The job has other tensors (TENSORS_DIFFER): takes up those that it has and that are frozen here, and leaves those out that it
        has not got. Raises `refused` where there are none of the one, or where no others would be left or they could not register
        later, see late_tensors()."""
        missing, unknown = (set(filter(None, refused.details.get(key, '').split('\0'))) for key in ('missing', 'unknown'))
        is_new = missing - self._trained or unknown - self._unknown
        self._trained |= missing
        self._unknown |= unknown
        self._found = new_tensors(self._job, self._trained)
        there = {member.name for member in self.members}
        late = unknown and self._job.options.durability == 'every-K'
        elsewhere = self._job.roster is not None and not self._job.roster.is_alike  # other ranks have parameters of their own
        if not is_new or late or (not elsewhere and (not there or not missing <= there)):
            text = str(refused).removesuffix(f' [{refused.reason}]')
            raise Error(f'{text}. Tensors are parameters, by their names from named_parameters() or attach(model): were modules renamed, '
                        'wrapped or replaced since the job was made?', refused.reason, refused.code, refused.details) from refused
        return self
