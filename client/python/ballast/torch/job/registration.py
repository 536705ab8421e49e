"""Which parameters of an optimizer register with its job, and as what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.job import edits
from ballast.torch.job.agreement import check_values, together
from ballast.torch.job.naming import UnitsBySize, positional_name, unit_of
from ballast.torch.job.ranks import Exchange
from ballast.torch.sharding.member import member_of
from ballast.torch.sharding.remote import remote_of
from ballast.torch.stepping import shared_memory
from ballast.torch.stepping.members import DTYPES, Member, Memory, check_parameter, give_values, is_sharded

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


def new_tensors(job: Job, trained: Iterable[str] = ()) -> list[Fresh]:
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
        check_parameter(name, parameter)
        if name in names:
            raise Error(f"there are two parameters '{name}', or one took the place of another after the first step; give "
                        'parameters of several models names of their own, and make a new optimizer for new parameters',
                        'BAD_SPEC')
        names.add(name)
        shape = list(parameter.shape) or [1]
        found.append(Fresh(member_of(name, g, parameter, job.debug), parameter, _native.Tensor(name, unit, shape, g)))
    if found or any(member.moved for member in job.members):
        _check_all(job, job.members + [member for member, _, _ in found])
    return found


def _check_all(job: Job, members: list[Member]) -> None:
    """Refuses members that do not go together in one job."""
    shared_memory.refuse(members)
    if job.options.world_size == 1:
        return
    sharded = next((member.name for member in members if is_sharded(member.parameter)), None)
    plain = next((member.name for member in members if not is_sharded(member.parameter)), None)
    if sharded is not None and plain is not None:
        raise Error(f"parameter '{plain}' is a plain tensor and '{sharded}' a DTensor, and a job of several ranks has one kind; expected "
                    'fully_shard over all of the model (it takes a scalar as a tensor of one element), or an optimizer of its own, with a '
                    'name of its own, for the plain ones', 'UNSUPPORTED')


def late_tensors(job: Job, trained: Iterable[str] = ()) -> list[Fresh]:
    """new_tensors() of a job that is open."""
    fresh = new_tensors(job, trained)
    if fresh and job.options.durability == 'every-K':
        raise Error(f"parameter '{fresh[0].member.name}' came after the first step, and a job with durability='every-K' has all of its "
                    'tensors from the start: its kept versions would have no state of it', 'UNSUPPORTED')
    return fresh


def register(job: Job, fresh: list[Fresh], exchange: Exchange) -> None:
    """Adds parameters to a job that is open. COLLECTIVE: all ranks give the same ones."""
    job.give_values(exchange)
    if not fresh:
        return
    check_values(exchange, [member for member, _, _ in fresh])
    edits.commit_written(job, exchange)
    job.members.extend(member for member, _, _ in fresh)
    try:
        job.session.register([tensor for _, _, tensor in fresh])
    finally:  # Ctrl-C may come when the job has them
        del job.members[sum(map(len, job.session.units)):]
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

    @property
    def entries(self) -> list[tuple[str, str]]:
        """The part of it that ranks must have alike, as texts: what, and its value."""
        return [(f"parameter '{tensor.name}'", f'{DTYPES[parameter.dtype]} {tensor.shape} in group {tensor.group} and unit '
                 f"'{tensor.unit}', {'a DTensor' if is_sharded(parameter) else 'a plain tensor'}"
                 f"{'' if remote_of(parameter) is None else ' on the servers alone'}")
                for member, parameter, tensor in self._found if member.name not in self._unknown]

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
        if not is_new or not there or late or not missing <= there:
            text = str(refused).removesuffix(f' [{refused.reason}]')
            raise Error(f'{text}. Tensors are parameters, by their names from named_parameters() or attach(model): were modules renamed, '
                        'wrapped or replaced since the job was made?', refused.reason, refused.code, refused.details) from refused
        return self
