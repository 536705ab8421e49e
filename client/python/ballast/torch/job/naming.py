"""The parameters of an optimizer, their names, and the units that they are kept in."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ballast.torch.tensors.members import Member
from ballast.torch.tensors.remote import part_of

if TYPE_CHECKING:
    import torch.distributed as dist

# Without names: units of about so many elements, in the order of the groups.
_UNIT_ELEMENTS = 1 << 24


def unwrapped(name: str) -> str:
    """Removes what DistributedDataParallel, torch.compile and checkpoint_wrapper put into names. A job is the same with and without them.

    >>> unwrapped('module._orig_mod.layers.0._checkpoint_wrapped_module.weight')
    'layers.0.weight'
    """
    parts = [part for part in name.split('.') if part not in ('_orig_mod', '_checkpoint_wrapped_module')]
    while len(parts) > 1 and parts[0] == 'module':
        parts.pop(0)
    return '.'.join(parts)


class _Mark:
    """An attribute of a named parameter. It ends when the parameter ends. Names keep a weak reference to the mark, not to the parameter:
    torch refuses to swap a tensor that has weak references, and a parameter that a framework replaced must not stay in memory."""
    attribute = '_ballast_mark'

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ()  # a saved parameter needs no ballast to be loaded


class Names:
    """Names of a job's parameters. A name follows its parameter when a group's list is filtered or reordered, and when
    torch.utils.swap_tensors gives the parameter what another held. If a parameter takes the place of one that has left all groups, as
    Accelerate does under FSDP2, it takes that one's name."""

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], registered: Callable[[], Sequence[Member]]) -> None:
        """groups(): returns the optimizer's current param_groups. registered(): returns the job's members."""
        self._groups, self._registered = groups, registered
        # By id of the group: the group, and names as it was added; None: no name.
        self._places: dict[int, tuple[dict[str, Any], list[str | None]]] = {}
        # By id of the parameter, while it lives: its mark's weak reference, and its name.
        self._names: dict[int, tuple[weakref.ref[_Mark], str]] = {}
        self._owners: dict[str, int] = {}  # by name: id of the parameter
        # What _find() goes by: id and length of each list, and _places() of them.
        self._index: tuple[list[tuple[int, int]], dict[int, tuple[int, int]]] | None = None

    def add(self, group: dict[str, Any], names: Sequence[str | None]) -> None:
        """names: of the group's parameters, in their order. None: the parameter keeps its name, if it has one."""
        self._places[id(group)] = group, [self.of(group, i) if name is None else self._own(group['params'][i], name)
                                          for i, name in enumerate(names)]
        if len(self._places) > len(self._groups()):
            self.follow()

    def follow(self) -> None:
        """Takes up the current groups. Keeps neither a group that is gone nor its parameters."""
        self._index = None
        there = {id(group) for group in self._groups()}
        self._places = {key: place for key, place in self._places.items() if key in there}

    def of(self, group: dict[str, Any], i: int) -> str | None:
        """Returns the name of the i-th parameter that `group` has now. None: it has no name. One that lives on the servers has at least the
        name that shard() saw."""
        name, part = self._given(group, i), part_of(group['params'][i])
        return part.name if name is None and part is not None else name

    def _given(self, group: dict[str, Any], i: int) -> str | None:
        parameter = group['params'][i]
        named = self._names.get(id(parameter))
        if named is not None and named[0]() is parameter.__dict__.get(_Mark.attribute):
            return named[1]
        known, names = self._places.get(id(group), (None, []))
        name = names[i] if known is group and len(names) == len(group['params']) else None
        if name is None:
            return None
        owner = self._owners.get(name)
        if owner is not None and owner != id(parameter) and self._find(owner, registered=False) is not None:
            return None
        return self._own(parameter, name)

    def _own(self, parameter: torch.Tensor, name: str) -> str:
        mark = parameter.__dict__.get(_Mark.attribute)
        if not isinstance(mark, _Mark):
            mark = parameter.__dict__[_Mark.attribute] = _Mark()
        weak, key = weakref.ref(self), id(parameter)

        def ended(_: weakref.ref[_Mark]) -> None:
            mine = weak()
            if mine is not None:
                mine._ended(key)
        self._forget(key)
        self._names[key] = weakref.ref(mark, ended), name
        if self._index is not None and key not in self._index[1]:
            self._index = None
        self._owners[name] = key
        return name

    def _forget(self, key: int) -> str | None:
        named = self._names.pop(key, None)
        if named is None:
            return None
        if self._owners.get(named[1]) == key:
            del self._owners[named[1]]
        return named[1]

    def _ended(self, key: int) -> None:
        """A mark has ended. Either its parameter has ended too, or a swap took the mark out of a parameter that is still there."""
        name = self._forget(key)
        parameter = self._find(key)
        if parameter is not None and name is not None:
            self._own(parameter, name)

    def _find(self, key: int, registered: bool = True) -> torch.Tensor | None:
        """Returns the parameter of this id that is in a group, or registered. None: there is none. A conversion of a model asks for all
        parameters, one after another, so an index tells where each is while the lists stay the same. The index keeps no parameter alive."""
        groups: list[list[torch.Tensor]] = [group['params'] for group in self._groups()]
        members = self._registered() or ()  # one object wherever there are none
        known = [(id(each), len(each)) for each in (*groups, members)]
        index = self._index  # another thread that lets a parameter go may take the shared one away
        if index is None or index[0] != known:
            index = self._index = known, _places(groups, members)
        place = index[1].get(key)
        if place is not None and id(_at(place, groups, members)) != key:  # a list has others in their stead
            index = self._index = known, _places(groups, members)
            place = index[1].get(key)
        if place is None or (place[0] < 0 and not registered):
            return None
        return _at(place, groups, members)


def _places(groups: Sequence[Sequence[torch.Tensor]], members: Sequence[Member]) -> dict[int, tuple[int, int]]:
    """By id of the parameter: the group that it is in, -1 for the members, and its place there."""
    found = {id(member.parameter): (-1, i) for i, member in enumerate(members)}
    found.update((id(parameter), (g, i)) for g, parameters in enumerate(groups) for i, parameter in enumerate(parameters))
    return found


def _at(place: tuple[int, int], groups: Sequence[Sequence[torch.Tensor]], members: Sequence[Member]) -> torch.Tensor:
    """place: one of _places()."""
    g, i = place
    return groups[g][i] if g >= 0 else members[i].parameter


def _in_order(params: Iterable[Any]) -> list[Any]:
    if isinstance(params, (set, frozenset)):
        raise TypeError('optimizer parameters came as a set, whose order changes between runs, so state would go to the wrong parameters; '
                        'expected a list, or model.named_parameters()')
    return list(params)


class Group(dict[str, Any]):
    """One of an optimizer's param_groups. group['param_names'] gives the current names of its parameters, as in torch.optim, but is not
    one of its keys: torch.distributed.checkpoint takes a state apart by the keys of a group, and must not look for names. A pickle or copy
    of it is an OrderedDict."""

    def __init__(self, values: Mapping[str, Any], names: Names) -> None:
        super().__init__(values)
        self._names = weakref.ref(names)

    def __missing__(self, key: str) -> list[str]:
        names = self._names() if key == 'param_names' else None
        found = [] if names is None else [names.of(self, i) for i in range(len(self['params']))]
        named = [name for name in found if name is not None]
        if names is None or len(named) < len(found):
            raise KeyError(key)
        return named

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())


def split_named(params: Any) -> tuple[list[dict[str, Any]], list[list[str | None]]]:
    """Returns `params` as torch.optim takes them, without names; and the names by group and position (None: no name)."""
    groups: list[dict[str, Any]] = []
    names: list[list[str | None]] = []
    for group in _listed_groups(params):
        members, mine = _split_group(group)
        groups.append({**{key: value for key, value in group.items() if key != 'param_names'}, 'params': members})
        names.append([name if name is None else unwrapped(name) for name in mine])
    return groups, names


def _listed_groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, torch.Tensor):
        raise TypeError('params argument given to the optimizer should be an iterable of Tensors or dicts, but got a Tensor: expected '
                        'model.named_parameters(), or a list')
    if isinstance(params, dict) and 'params' not in params:
        raise TypeError("params argument given to the optimizer is a dict without 'params': expected model.named_parameters(), or for "
                        "groups [{'params': ...}, ...]")
    params = [params] if isinstance(params, dict) else _in_order(params)
    return params if not params or isinstance(params[0], dict) else [{'params': params}]


def _split_group(group: dict[str, Any]) -> tuple[list[torch.Tensor], list[str | None]]:
    """The group's parameters, and their names."""
    members = group['params']
    members = [members] if isinstance(members, torch.Tensor) else _in_order(members)
    named = [isinstance(each, tuple) for each in members]
    if any(named) and not all(named):
        raise ValueError('all optimizer params should be with/without names. Some param names are missing')
    if any(named):
        return [parameter for _, parameter in members], [name for name, _ in members]
    names = list(group.get('param_names') or [None] * len(members))
    if len(names) != len(members):
        raise ValueError(f'{len(names)} param_names for {len(members)} parameters')
    return members, names


def positional_name(group: int, index: int, shape: Sequence[int]) -> str:
    """Names a parameter that has no name. It must come at the same place with the same shape in every run."""
    return f'group{group}.{index}[{"x".join(str(n) for n in shape)}]'


def unit_of(name: str) -> str:
    """The unit of a job that a parameter is in: its block, or its expert, since a step may leave experts out.

    >>> unit_of('layers.3.mlp.experts.17.up.weight')
    'layers.3.mlp.experts.17'
    >>> unit_of('layers.3.mlp.shared_experts.0.up.weight')
    'layers.3'
    """
    return _expert_of(name) or block_of(name)


def is_expert(name: str) -> bool:
    """Tells whether the parameter is in a unit of its expert.

    >>> is_expert('experts.17.up.weight'), is_expert('layers.3.mlp.router.weight')
    (True, False)
    """
    return _expert_of(name) is not None


def _expert_of(name: str) -> str | None:
    parts = name.split('.')
    for i, part in enumerate(parts[1:-1], 1):
        if 'expert' in parts[i - 1] and 'shared' not in parts[i - 1] and part.removeprefix('expert_').isdigit():
            return '.'.join(parts[: i + 1])
    return None


def block_of(name: str) -> str:
    """The block that a parameter belongs to: its name up to the first number, else its first component.

    >>> block_of('transformer.h.3.attn.weight')
    'transformer.h.3'
    >>> block_of('lm_head.weight')
    'lm_head'
    """
    parts = name.split('.')
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return '.'.join(parts[: i + 1])
    return parts[0]


class UnitsBySize:
    """Units of parameters without names: runs of neighbours."""

    def __init__(self) -> None:
        self._unit = 0
        self._elements = 0

    def next(self, elements: int) -> str:
        if self._elements and self._elements + elements > _UNIT_ELEMENTS:
            self._unit += 1
            self._elements = 0
        self._elements += elements
        return f'unit{self._unit}'


class Parameters:
    """The parameters that an optimizer was given, whether its job is open or not."""

    def __init__(self, groups: Callable[[], list[dict[str, Any]]], registered: Callable[[], Sequence[Member]],
                 tied: Mapping[str, dist.ProcessGroup]) -> None:
        """groups(): param_groups as they are now. registered(): the job's members. tied: by name, the group that a parameter's gradients
        are summed over."""
        self._groups, self.tied = groups, tied
        self.names = Names(groups, registered)
        self.state_group: Callable[[int], int | None] = lambda g: None  # of the states of a param_group that the trainer assists
        self.debug = False  # digests tell of writes that marks do not show

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self._groups()

    def placed(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Each parameter with its group's number and its place in the group."""
        self.names.follow()
        for g, group in enumerate(self.groups):
            for i, parameter in enumerate(group['params']):
                yield g, i, parameter

    def all(self) -> Iterator[torch.Tensor]:
        return (parameter for _, _, parameter in self.placed())

    def name_of(self, g: int, i: int, parameter: torch.Tensor) -> str:
        name = self.names.of(self.groups[g], i)
        return positional_name(g, i, parameter.shape) if name is None else name
