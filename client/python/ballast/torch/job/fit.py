"""Which parameters of an optimizer register with its job, and as what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.agreement import roster as rosters
from ballast.torch.agreement.roster import Roster
from ballast.torch.job.naming import Parameters, UnitsBySize, unit_of
from ballast.torch.ranks.groups import Exchange, Group
from ballast.torch.tensors import placement, shared_memory
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.members import STATE_SUFFIX, Fresh, Line, Member, StateMember, check_parameter, frozen_as, member_of
from ballast.torch.tensors.remote import part_of


def new_tensors(parameters: Parameters, group: Group, trained: Collection[str] = (), members: Sequence[Member] = (),
                are_masters: bool = False) -> list[Fresh]:
    """Returns the parameters that are not in the job yet, and have a gradient, want one, live only on the servers, or have a name in
    `trained`. group: the job's ranks. members: those that the job has. are_masters: parameters of this job are their own masters."""
    there = {id(member.parameter): member for member in members}
    names = {member.name for member in members}
    by_size = UnitsBySize()
    found = []
    for g, i, parameter in parameters.placed():
        given = parameters.names.of(parameters.groups[g], i)
        unit = unit_of(given) if given is not None else by_size.next(parameter.numel())
        name = parameters.name_of(g, i, parameter)
        known = there.get(id(parameter))
        if known is not None:
            _check_known(parameters, known, g)
        if known is not None or not (name in trained or _wants_state(parameter)) or parameter.numel() == 0:
            continue  # an empty one has nothing to train, and servers have no empty tensors
        check_parameter(name, parameter, group)
        _check_name(parameters, name, names)
        names.add(name)
        found.append(_fresh(parameters, group, name, unit, g, parameter, trained))
        found[-1].member.is_master = are_masters
        state_group = parameters.state_group(g)
        if state_group is not None and not found[-1].tensor.frozen:
            found.append(_state_of(found[-1], state_group))
    if found or any(member.moved for member in members):
        shared_memory.refuse([*members, *(member for member, _, _ in found)])
    return found


def _check_known(parameters: Parameters, known: Member, g: int) -> None:
    """Refuses what a job cannot change of a parameter that it has. g: its group now."""
    if known.group != g:
        raise Error(f"parameter '{known.name}' has moved from group {known.group} to {g}, but a job keeps each parameter in its "
                    'group; make a new job for other groups', 'BAD_SPEC')
    if not known.is_frozen and known.is_assisted != (parameters.state_group(g) is not None):
        raise Error(f"parameter '{known.name}' is of {'Muon' if known.is_assisted else 'AdamW'} in the job, and its group says use_muon="
                    f'{not known.is_assisted}; that cannot change, so make a new job', 'BAD_SPEC')


def _check_name(parameters: Parameters, name: str, names: Collection[str]) -> None:
    """names: of other parameters."""
    if name in names:
        raise Error(f"two parameters are called '{name}', or one took the place of another after the first step. Give the parameters "
                    'of several models names of their own, and make a new optimizer for new parameters', 'BAD_SPEC')
    if name.endswith(STATE_SUFFIX) and any(parameters.state_group(g) is not None for g in range(len(parameters.groups))):
        raise Error(f"parameter '{name}' has a name that ends as those of Muon's momenta do ({STATE_SUFFIX}); rename it", 'BAD_SPEC')


def _wants_state(parameter: torch.Tensor) -> bool:
    # torch updates what has a gradient, frozen or not.
    return parameter.requires_grad or parameter.grad is not None or part_of(parameter) is not None


def _fresh(parameters: Parameters, group: Group, name: str, unit: str, g: int, parameter: torch.Tensor,
           trained: Collection[str]) -> Fresh:
    shape = list(parameter.shape) or [1]
    tensor = _native.Tensor(name, unit, shape, g)
    tensor.frozen = '' if name in trained else frozen_as(parameter)
    key = placement.key_of(name, parameter, group)
    if key is not None:
        placement.check(name, parameter, key, group.rank)
        tensor.placement = placement.native(key)
        tensor.parts = placement.parts_of(key, tuple(shape))
    part = part_of(parameter)
    where = '' if part is None else f', on the servers alone{part.home.how}'
    where += ', tied' if name in parameters.tied else ''
    where += f', frozen as {tensor.frozen}' if tensor.frozen else ''
    what = f"{DTYPES[parameter.dtype]} {shape} in group {g} and unit '{unit}'{where}"
    line = Line(name, what, tuple(shape), key, True, name in parameters.tied)
    return Fresh(member_of(line, g, parameter, parameters.debug), parameter, tensor)


def _state_of(assisted: Fresh, group: int) -> Fresh:
    """Makes the tensor one whose updates the trainer computes. Returns that of its state."""
    member, parameter, tensor = assisted
    check_matrix(member.name, parameter.shape)
    tensor.assist = 'update'
    member.is_assisted = True
    state = StateMember(member)
    return Fresh(state, state.parameter, state_tensor(tensor, group))


def check_matrix(name: str, shape: Sequence[int]) -> None:
    """Refuses a parameter of Muon that is no matrix."""
    if len(shape) != 2:
        raise Error(f"parameter '{name}' has shape {list(shape)}, but Muon orthogonalises matrices. Give it to AdamW, in "
                    "a param_group with use_muon=False; ballast.torch.muon_groups(model) makes such groups", 'BAD_SPEC')


def state_tensor(tensor: _native.Tensor, group: int) -> _native.Tensor:
    """The state of a tensor whose updates the trainer computes. group: of the job, for such states."""
    # In a unit of its own: a gather of the parameter's unit does not want it.
    state = _native.Tensor(tensor.name + STATE_SUFFIX, tensor.unit + STATE_SUFFIX, tensor.shape, group)
    state.placement, state.parts, state.assist = tensor.placement, tensor.parts, 'state'
    return state


def lines(parameters: Parameters, members: Iterable[Member]) -> list[Line]:
    """Returns what this rank tells of `members`, and the names of its other parameters."""
    mine = [member.line for member in members]
    names = {line.name for line in mine}
    others = [parameters.name_of(g, i, parameter) for g, i, parameter in parameters.placed() if parameter.numel() > 0]
    return mine + [Line(name, '', (), None, False) for name in others if name not in names]


class Fit:
    """The tensors that a session names when it opens its job. At first they are those that want gradients here. If the job turns out to
    have others, follow() adds those, and leaves out those that the job lacks."""

    def __init__(self, parameters: Parameters, group: Group, options: _native.OpenOptions, trained: Iterable[str]) -> None:
        """group: the job's ranks. options: of the session that will be opened. trained: as for new_tensors()."""
        self._parameters, self._group, self._options, self._trained = parameters, group, options, set(trained)
        self._unknown: set[str] = set()
        self._found = new_tensors(parameters, group, self._trained)
        self._roster: Roster | None = None

    @property
    def members(self) -> list[Member]:
        return [member for member, _, _ in self._found if member.name not in self._unknown]

    @property
    def tensors(self) -> list[_native.Tensor]:
        return [tensor for member, _, tensor in self._found if member.name not in self._unknown]

    @property
    def unknown(self) -> list[str]:
        """Sorted names of those that the job lacks. They may register with the next step."""
        return sorted(name for name in self._unknown if not name.endswith(STATE_SUFFIX))

    def agree(self, exchange: Exchange) -> Roster:
        """Brings the ranks' parameters together. COLLECTIVE."""
        self._roster = roster = rosters.gather(exchange, lines(self._parameters, self.members), self._group)
        self._options.placed = roster.places
        return roster

    def follow(self, refused: Error) -> Fit:
        """The job has other tensors (TENSORS_DIFFER). Adds those that the job has and that are frozen here, and leaves out those that the
        job lacks. Raises `refused` if that changes nothing, if no tensor would be left, or if the job lets none register later, see
        late_tensors()."""
        missing, unknown = (set(filter(None, refused.details.get(key, '').split('\0'))) for key in ('missing', 'unknown'))
        missing_here = {name.removesuffix(STATE_SUFFIX) for name in missing} - self._trained
        is_new = missing_here or unknown - self._unknown
        self._trained |= {name.removesuffix(STATE_SUFFIX) for name in missing}
        self._unknown |= unknown
        self._found = new_tensors(self._parameters, self._group, self._trained)
        there = {member.name for member in self.members}
        late = unknown and self._options.durability == 'every-K'
        elsewhere = self._roster is not None and not self._roster.is_alike  # other ranks have parameters of their own
        if not is_new or late or (not elsewhere and (not there or not missing <= there)):
            text = str(refused).removesuffix(f' [{refused.reason}]')
            raise Error(f'{text}. Tensors have the names of parameters, from named_parameters() or attach(model). Were modules renamed, '
                        'wrapped or replaced since the job was made?', refused.reason, refused.code, refused.details) from refused
        return self
