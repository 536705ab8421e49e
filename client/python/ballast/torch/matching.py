"""Which parameter an entry of a saved state belongs to: the one of its name, where the state has names; else, as in torch.optim, the one
at its place."""

import collections

from ballast.errors import Error, warn
from ballast.torch.naming import unwrapped
from ballast.torch.registration import name_of, placed


def _given(optimizer, g):
    """The names of a group's parameters, or None where one of them has none."""
    group = optimizer.param_groups[g]
    names = [optimizer._names.of(g, i, group) for i in range(len(group['params']))]
    return None if None in names else names


def names(optimizer):
    """By group: names of parameters as torch.optim (>= 2.6) keeps them, None where some have none."""
    return [_given(optimizer, g) for g in range(len(optimizer.param_groups))]


def _saved_names(group):
    """torch.distributed.checkpoint's functions give names for numbers; they go first, since they bring numbers alone into order."""
    found = group['params'] if all(isinstance(each, str) for each in group['params']) else group.get('param_names')
    if found is None or len(found) != len(group['params']) or not all(isinstance(each, str) for each in found):
        return None
    return [unwrapped(name) for name in found]


def matched(optimizer, saved, tells=True):
    """For each group here, the saved one that it takes its options from, whose `params` are keys of the state in the order of this group's
    parameters. `saved`: param_groups of a state. tells: the state has entries, so that a warning is due where they go by place."""
    here = [[name_of(optimizer, g, i, parameter) for i, parameter in enumerate(group['params'])]
            for g, group in enumerate(optimizer.param_groups)]
    there = [_saved_names(group) for group in saved]
    all_there = None if None in there else [name for names_there in there for name in names_there]
    all_here = [name for names_here in here for name in names_here]
    named_here = any(optimizer._names.of(g, i, optimizer.param_groups[g]) is not None for g, i, _ in placed(optimizer))
    if all_there is not None and len(set(all_there)) == len(all_there):
        if set(all_there) == set(all_here):
            _check_count(here, saved)
            return _by_name(here, there, saved)
        if named_here:
            _refuse(all_here, all_there, optimizer.param_groups, saved)
    _check_sizes(optimizer.param_groups, saved)
    if tells and named_here != (all_there is not None) and _has_twins(optimizer):
        which = 'the state has no names of parameters' if named_here else 'this optimizer has no names of parameters'
        warn(f'load_state_dict: {which}, so its entries went to parameters by their places, as in torch.optim, though several have one '
             'shape: their order must be the one of then. Optimizers made from named_parameters() keep names')
    return saved


def _by_name(here, there, saved):
    group_of = {name: k for k, names_there in enumerate(there) for name in names_there}
    empty = collections.deque(k for k, names_there in enumerate(there) if not names_there)
    found = []
    for g, names_here in enumerate(here):
        k = group_of[names_here[0]] if names_here else empty.popleft() if empty else None
        if k is None or set(there[k]) != set(names_here):
            apart = sorted(set(names_here) ^ set(there[k] if k is not None else ()))
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group, or has other "
                             f"parameters: '{apart[0] if apart else ''}' is in another group of the state than of this optimizer (group {g})")
        keys = dict(zip(there[k], saved[k]['params']))
        found.append({**saved[k], 'params': [keys[name] for name in names_here]})
    return found


def _refuse(all_here, all_there, groups, saved):
    missing, more = sorted(set(all_here) - set(all_there)), sorted(set(all_there) - set(all_here))
    said = [f"the state has no parameter '{missing[0]}', which this optimizer has"] if missing else []
    said += [f"the state has a parameter '{more[0]}', which this optimizer has not"] if more else []
    text = ', and '.join(said) + (f' ({len(missing)} and {len(more)} such)' if len(missing) + len(more) > 2 else '')
    if len(all_here) != len(all_there):
        raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group: " + text)
    raise Error(f'{text}; give parameters the names that they had, or delete param_names from the state to load it by place', 'BAD_SPEC')


def _check_count(mine, saved):
    """As torch's, and its words."""
    if len(mine) != len(saved):
        raise ValueError(f'loaded state dict has a different number of parameter groups: {len(saved)}, here {len(mine)}')


def _check_sizes(mine, saved):
    _check_count(mine, saved)
    for i, (a, b) in enumerate(zip(mine, saved)):
        if len(a['params']) != len(b['params']):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's "
                             f'group: group {i} has {len(b["params"])} parameters, here {len(a["params"])}')


def _has_twins(optimizer):
    """Parameters that could be mistaken for each other."""
    shapes = collections.Counter((g, tuple(parameter.shape)) for g, _, parameter in placed(optimizer))
    return max(shapes.values(), default=0) > 1
