"""What an estimate looks at in a model: its tensors as servers keep them, and the units that shard() gathers."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ballast import _native
from ballast.torch.algorithms import state_group
from ballast.torch.job.fit import check_matrix, state_tensor
from ballast.torch.job.naming import UnitsBySize, positional_name, split_named, unit_of, unwrapped
from ballast.torch.muon import muon_groups
from ballast.torch.ranks.groups import world
from ballast.torch.sharding import blocks
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.members import check_parameter

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class Layer(NamedTuple):
    name: str
    elements: int  # of its own parameters
    is_linear: bool


class Unit(NamedTuple):
    """Parameters that FSDP2 gathers together."""
    name: str  # '': the root, which has what is in no other
    elements: int
    trained: int  # of these
    layers: tuple[Layer, ...]
    is_expert: bool = False  # gathered once its router has chosen it


class Model(NamedTuple):
    """The model that would be trained."""
    name: str
    tensors: list[_native.Tensor]  # of which servers keep something
    parameters: list[torch.Tensor]
    group_count: int
    dtype: str  # of all; else one that holds them all
    units: list[Unit]
    needs_values: bool  # shard() cannot make them one parameter at a time, so each rank has them whole until the job is open

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters if parameter.requires_grad)

    @property
    def width(self) -> int:
        """Bytes of a parameter, and of a gradient."""
        return 4 if self.dtype == 'f32' else 2

    @property
    def server_units(self) -> dict[str, int]:
        """Elements of the units that servers keep, by name."""
        return _sizes(self.tensors)

    @property
    def assisted(self) -> list[int]:
        """Elements of each matrix whose updates the trainer computes, as Muon's."""
        return [math.prod(tensor.shape) for tensor in self.tensors if tensor.assist == 'update']


def _sizes(tensors: Iterable[_native.Tensor]) -> dict[str, int]:
    """Returns elements by unit."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.unit] = sizes.get(tensor.unit, 0) + math.prod(tensor.shape)
    return sizes


def look(params: torch.nn.Module | ParamsT, frozen: str | None, optimizer: str) -> Model:
    """params, frozen, optimizer: as for estimate(). With 'muon', a model's groups are those of muon_groups()."""
    module = params if isinstance(params, torch.nn.Module) else None
    assists = optimizer == 'muon'
    given = params if module is None else muon_groups(module) if assists else list(module.named_parameters())
    groups, names = split_named(given)
    parameters = [parameter for group in groups for parameter in group['params']]
    needs_values = any(not parameter.is_meta for parameter in parameters) or (module is not None and not _resets(module))
    tensors = list(_tensors(groups, names, frozen))
    if assists:
        tensors += _assisted(tensors, groups)
    made = Model('the model' if module is None else type(module).__name__, tensors, parameters, len(groups) * (1 + assists),
                 _dtype(parameters), [], needs_values)
    made.units.extend(_named_units(made) if module is None else _units(module))
    return made


def _dtype(parameters: Sequence[torch.Tensor]) -> str:
    dtypes = {parameter.dtype for parameter in parameters}  # also of frozen ones: they may want gradients later
    return DTYPES[dtypes.pop()] if len(dtypes) == 1 else 'f32'


def _tensors(groups: Sequence[dict[str, Any]], names: Sequence[Sequence[str | None]], frozen: str | None) -> Iterator[_native.Tensor]:
    by_size = UnitsBySize()
    for g, (group, mine) in enumerate(zip(groups, names)):
        for i, (parameter, name) in enumerate(zip(group['params'], mine)):
            unit = unit_of(name) if name is not None else by_size.next(parameter.numel())
            name = name if name is not None else positional_name(g, i, parameter.shape)
            if parameter.dtype not in DTYPES:
                check_parameter(name, parameter, world())  # refuses it; a device does not matter here: 'meta' is as good
            if parameter.requires_grad or frozen is not None:
                yield _tensor(name, unit, parameter, g, frozen)


def _assisted(tensors: Iterable[_native.Tensor], groups: Sequence[dict[str, Any]]) -> list[_native.Tensor]:
    """Marks the tensors whose updates the trainer computes, and returns those of their states."""
    states = []
    for tensor in tensors:
        if groups[tensor.group].get('use_muon', True) and not tensor.frozen:
            check_matrix(tensor.name, tensor.shape)
            tensor.assist = 'update'
            states.append(state_tensor(tensor, state_group(tensor.group, 2 * len(groups))))
    return states


def _tensor(name: str, unit: str, parameter: torch.Tensor, group: int, frozen: str | None) -> _native.Tensor:
    tensor = _native.Tensor(name, unit, list(parameter.shape) or [1], group)
    tensor.frozen = '' if parameter.requires_grad or frozen == 'state' else frozen or ''
    return tensor


def _resets(module: torch.nn.Module) -> bool:
    """All modules can give their own parameters values, as shard() needs for a model from the meta device."""
    return all(hasattr(inner, 'reset_parameters') for inner in module.modules() if inner._parameters)


def _named_units(model: Model) -> list[Unit]:
    """Without modules: by name, as servers have them."""
    sizes = _sizes(tensor for tensor in model.tensors if tensor.assist != 'state')
    return [Unit(name, elements, elements, ()) for name, elements in sizes.items()]


def _units(model: torch.nn.Module) -> list[Unit]:
    """As shard() chooses them: each parameter belongs to the innermost chosen module that has it."""
    names = {module: unwrapped(name) for name, module in model.named_modules()}
    owner: dict[torch.Tensor, str] = dict.fromkeys(model.parameters(), '')
    for module in sorted(blocks.chosen(model), key=lambda module: names[module].count('.')):
        owner.update(dict.fromkeys(module.parameters(), names[module]))
    layers: dict[str, list[Layer]] = {}
    trained: collections.Counter[str] = collections.Counter()
    for parameter, module in _owned(model).items():
        unit = owner[parameter]
        layers.setdefault(unit, []).append(Layer(names[module], parameter.numel(), isinstance(module, torch.nn.Linear)))
        trained[unit] += parameter.numel() * parameter.requires_grad
    experts = {names[expert] for alike in blocks.experts(model) for expert in alike}
    return [Unit(unit, sum(layer.elements for layer in there), trained[unit], tuple(there), unit in experts)
            for unit, there in layers.items()]


def _owned(model: torch.nn.Module) -> dict[torch.Tensor, torch.nn.Module]:
    """Returns the first module that has each parameter."""
    owned: dict[torch.Tensor, torch.nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owned.setdefault(parameter, module)
    return owned
