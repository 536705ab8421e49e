"""Which parameter an entry of a saved state belongs to. If both sides have names for its group, it is the parameter of that name.
Otherwise it is the one at its place, as in torch.optim."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NoReturn, Optional

from ballast.errors import Error, warn
from ballast.torch.job.naming import Parameters, unwrapped

Groups = Sequence[dict[str, Any]]
_Names = Sequence[Optional[Sequence[str]]]  # by group; None: its parameters have no names, or not all


def _given(parameters: Parameters) -> list[list[str | None]]:
    """Returns names of parameters by group, with None for a parameter without a name."""
    parameters.names.follow()
    return [[parameters.names.of(group, i) for i in range(len(group['params']))] for group in parameters.groups]


def names(parameters: Parameters) -> list[list[str] | None]:
    """Returns names of parameters by group, as torch.optim (>= 2.6) keeps them. None: some parameter of the group has no name."""
    return [_all_or_none(given) for given in _given(parameters)]


def _all_or_none(names: list[str | None]) -> list[str] | None:
    there = [name for name in names if name is not None]
    return there if len(there) == len(names) else None


def _saved_names(group: dict[str, Any]) -> list[str] | None:
    """Returns names of a saved group. Functions of torch.distributed.checkpoint replace numbers by names; these count first, since those
    functions reorder only the numbers."""
    found = group['params'] if all(isinstance(each, str) for each in group['params']) else group.get('param_names')
    if found is None or len(found) != len(group['params']) or not all(isinstance(each, str) for each in found):
        return None
    return [unwrapped(name) for name in found]


def matched(parameters: Parameters, saved: Groups, tells: bool = True) -> list[dict[str, Any]]:
    """Returns for each group here the saved group that it takes its options from. Its `params` are keys of the state, in the order of this
    group's parameters. saved: param_groups of a state. tells: the state has entries, so warn if they go by place."""
    groups, given, there = parameters.groups, _given(parameters), [_saved_names(group) for group in saved]
    here: _Names = [[parameters.name_of(g, i, parameter) for i, parameter in enumerate(group['params'])] for g, group in enumerate(groups)]
    lacking = 'the state has no names of parameters'
    if len(set(_listed(there))) < len(_listed(there)):
        lacking, there = 'the state has a name of parameters twice, so none,', [None] * len(saved)
    if None in there or set(_listed(there)) != set(_listed(here)):
        if None not in there and all(any(names) for names in given):
            _refuse(_listed(here), _listed(there))
        here = [names if any(named) else None for names, named in zip(here, given)]
    _check_count(groups, saved)
    both, pairs, found = set(_listed(here)) & set(_listed(there)), _pairs(here, there), []
    for g, k in enumerate(pairs):
        mine, its = here[g], there[k]
        if mine is not None and its is not None:
            found.append(_in_order(g, mine, its, saved[k], both))
        else:
            _check_size(g, groups[g], saved[k])
            found.append(saved[k])
    if tells:
        _warn_of_places(groups, here, [there[k] for k in pairs], lacking)
    return found


def _listed(names: _Names) -> list[str]:
    """Returns the names of all groups that have names."""
    return [name for of_group in names if of_group for name in of_group]


def _warn_of_places(groups: Groups, here: _Names, there: _Names, lacking: str) -> None:
    """Warns if entries of a group go by place though one side has names, and parameters could be mistaken for each other. here, there:
    names by group. lacking: why the state has none."""
    by_place: dict[str, list[str]] = {}
    for g, (mine, its) in enumerate(zip(here, there)):
        if (mine is None) != (its is None) and _has_twins(groups[g]):
            by_place.setdefault('this optimizer has no names of parameters' if mine is None else lacking, []).append(str(g))
    for which, numbers in by_place.items():
        warn(f'load_state_dict: {which} in group {", ".join(numbers)}, so its entries went to parameters by their places, as in '
             'torch.optim. Several parameters have one shape, so their order must be the one they had when the state was saved. '
             'Optimizers made from named_parameters() keep names')


def _pairs(here: _Names, there: _Names) -> list[int]:
    """Returns for each group here the number of a saved one: one that has a name of the group, or else the next that no group takes by
    name."""
    group_of = {name: k for k, names in enumerate(there) for name in names or ()}
    found = [next((group_of[name] for name in names or () if name in group_of), None) for names in here]
    rest = (k for k in range(len(there)) if k not in found)
    return [next(rest) if k is None else k for k in found]


def _in_order(g: int, here: Sequence[str], there: Sequence[str], saved: dict[str, Any], both: set[str]) -> dict[str, Any]:
    """Returns the saved group of group `g`, in this group's order. here, there: their names. both: names that both sides have, of all
    groups."""
    apart = sorted(set(here) ^ set(there))
    if both.intersection(apart):
        raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group, or has other "
                         f"parameters: '{min(both.intersection(apart))}' is in another group of the state than of this optimizer "
                         f'(group {g})')
    if apart:
        _refuse(here, there)
    keys = dict(zip(there, saved['params']))
    return {**saved, 'params': [keys[name] for name in here]}


def _refuse(all_here: Sequence[str], all_there: Sequence[str]) -> NoReturn:
    missing, more = sorted(set(all_here) - set(all_there)), sorted(set(all_there) - set(all_here))
    said = [f"the state has no parameter '{missing[0]}', which this optimizer has"] if missing else []
    said += [f"the state has a parameter '{more[0]}', which this optimizer lacks"] if more else []
    text = ', and '.join(said) + (f' ({len(missing)} and {len(more)} such)' if len(missing) + len(more) > 2 else '')
    if len(all_here) != len(all_there):
        raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group: " + text)
    raise Error(f'{text}. Give parameters the names that they had, or delete param_names from those groups of the state that are to go by '
                'place', 'BAD_SPEC')


def _check_count(mine: Groups, saved: Groups) -> None:
    """As torch checks, in its words."""
    if len(mine) != len(saved):
        raise ValueError(f'loaded state dict has a different number of parameter groups: {len(saved)}, here {len(mine)}')


def _check_size(g: int, mine: dict[str, Any], saved: dict[str, Any]) -> None:
    if len(mine['params']) != len(saved['params']):
        raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's "
                         f'group: group {g} has {len(saved["params"])} parameters, here {len(mine["params"])}')


def _has_twins(group: dict[str, Any]) -> bool:
    """The group has parameters that could be mistaken for each other."""
    shapes = collections.Counter(tuple(parameter.shape) for parameter in group['params'])
    return max(shapes.values(), default=0) > 1
