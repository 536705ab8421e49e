"""Names of parameters and the units that they are kept in."""

import weakref

import torch

# Without names: units of about so many elements, in the order of the groups.
_UNIT_ELEMENTS = 1 << 24


def unwrapped(name):
    """Without what DistributedDataParallel, torch.compile and checkpoint_wrapper put into names: a job is the same with and without.

    >>> unwrapped('module._orig_mod.layers.0._checkpoint_wrapped_module.weight')
    'layers.0.weight'
    """
    parts = [part for part in name.split('.') if part not in ('_orig_mod', '_checkpoint_wrapped_module')]
    while len(parts) > 1 and parts[0] == 'module':
        parts.pop(0)
    return '.'.join(parts)


class Names:
    """Names of an optimizer's parameters. A name follows its parameter when the list of a group is filtered or reordered; a parameter that
    took another's place, as Accelerate's under FSDP2, has the name of the place."""

    def __init__(self):
        self._by_place = []  # by group; None: no name
        self._by_parameter = {}  # id -> (weak reference, name)

    def add(self, group, names):
        """Of the next group."""
        self._by_place.append(list(names))
        for parameter, name in zip(group['params'], names):
            self._by_parameter[id(parameter)] = weakref.ref(parameter), name

    def __len__(self):
        return len(self._by_place)

    def of(self, g, i, group):
        """Of the i-th parameter that group `g` has now; None: it has no name."""
        known, name = self._by_parameter.get(id(group['params'][i]), (None, None))
        if known is not None and known() is group['params'][i]:
            return name
        places = self._by_place[g] if g < len(self._by_place) else []
        return places[i] if len(places) == len(group['params']) else None

    def rename(self, groups, known):
        """known: names by parameter."""
        for group, places in zip(groups, self._by_place):
            for i, parameter in enumerate(group['params']):
                if parameter in known:
                    self._by_parameter[id(parameter)] = weakref.ref(parameter), known[parameter]
                    if len(places) == len(group['params']):
                        places[i] = known[parameter]


def _in_order(params):
    if isinstance(params, (set, frozenset)):
        raise TypeError('optimizer parameters came as a set, whose order changes between runs: state would go to other parameters; '
                        'expected a list, or model.named_parameters()')
    return list(params)


def split_named(params):
    """`params` as torch.optim takes them, without names; and the names by group and position (None: no name)."""
    groups, names = [], []
    params = [params] if isinstance(params, dict) else _in_order(params)
    if params and not isinstance(params[0], dict):
        params = [{'params': params}]
    for group in params:
        members = group['params']
        members = [members] if isinstance(members, torch.Tensor) else _in_order(members)
        mine = list(group.get('param_names') or [])
        if members and isinstance(members[0], tuple):
            mine = [name for name, _ in members]
            members = [parameter for _, parameter in members]
        if not mine:
            mine = [None] * len(members)
        if len(mine) != len(members):
            raise ValueError(f'{len(mine)} param_names for {len(members)} parameters')
        mine = [name if name is None else unwrapped(name) for name in mine]
        groups.append({**{k: v for k, v in group.items() if k != 'param_names'}, 'params': members})
        names.append(mine)
    return groups, names


def positional_name(group, index, shape):
    """The key of a parameter without a name: it must come at the same place with the same shape on every run."""
    return f'group{group}.{index}[{"x".join(str(n) for n in shape)}]'


def unit_of(name):
    """The block that a parameter belongs to: its name up to the first number, else its first component.

    >>> unit_of('transformer.h.3.attn.weight')
    'transformer.h.3'
    >>> unit_of('lm_head.weight')
    'lm_head'
    """
    parts = name.split('.')
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return '.'.join(parts[: i + 1])
    return parts[0]


class UnitsBySize:
    """Units of parameters without names: runs of neighbours."""

    def __init__(self):
        self._unit = 0
        self._elements = 0

    def next(self, elements):
        if self._elements and self._elements + elements > _UNIT_ELEMENTS:
            self._unit += 1
            self._elements = 0
        self._elements += elements
        return f'unit{self._unit}'
