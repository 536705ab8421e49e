"""What an optimizer's state_dict is: the job's name and a version that its servers keep, or torch's own format."""

import torch

from ballast.errors import Error

_KEY = 'ballast'


def pack(optimizer, index_of):
    """torch's param_groups: numbers in the parameters' stead."""
    return [{**{key: value for key, value in group.items() if key != 'params'},
             'params': [index_of[id(parameter)] for parameter in group['params']]} for group in optimizer.param_groups]


def indices(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    return parameters, {id(parameter): i for i, parameter in enumerate(parameters)}


def naming(job, version, steps):
    """Small and plain, so that torch.load(weights_only=True) takes it."""
    return {'job': torch.tensor(list(job.encode()), dtype=torch.uint8), 'version': torch.tensor(version),
            'steps': torch.tensor(steps)}


def named(state_dict):
    """(job, version) of a state_dict that names a version; None of one in torch's format."""
    entry = state_dict.get(_KEY)
    if entry is None:
        return None
    return bytes(entry['job'].tolist()).decode(), int(entry['version'])


def full(optimizer):
    """In torch's format, whole: what torch.optim's optimizer of the same name would give."""
    parameters, index_of = indices(optimizer)
    state = {}
    for i, parameter in enumerate(parameters):
        entry = optimizer.state[parameter]
        if entry and entry['step'] > 0:
            state[i] = entry
    return {'state': state, 'param_groups': pack(optimizer, index_of)}


def pinned(optimizer, session, job, steps, keep):
    """Names the session's version, which stays until `keep` later ones are named."""
    version = session.version
    session.pin()
    for old in session.pins()[:-keep]:
        session.unpin(old)
    _, index_of = indices(optimizer)
    return {'state': {}, 'param_groups': pack(optimizer, index_of), _KEY: naming(job, version, steps)}


def check_groups(optimizer, state_dict):
    """As torch's, and its words."""
    mine, saved = optimizer.param_groups, state_dict['param_groups']
    if len(mine) != len(saved):
        raise ValueError(f'loaded state dict has a different number of parameter groups: {len(saved)}, here {len(mine)}')
    for i, (a, b) in enumerate(zip(mine, saved)):
        if len(a['params']) != len(b['params']):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's "
                             f'group: group {i} has {len(b["params"])} parameters, here {len(a["params"])}')


def load_groups(optimizer, state_dict):
    for group, saved in zip(optimizer.param_groups, state_dict['param_groups']):
        group.update({key: value for key, value in saved.items() if key not in ('params', 'param_names')})


def refuse_foreign(state_dict):
    if state_dict.get('state'):
        raise Error('this state_dict is in torch.optim\'s format, and loading moments is not supported yet; expected one that '
                    'ballast.torch made of a durable job (directory=... or servers)', 'UNSUPPORTED')
