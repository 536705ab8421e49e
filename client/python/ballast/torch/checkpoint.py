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


def naming(optimizer, job, version, steps):
    """Small and plain, so that torch.load(weights_only=True) takes it. version None: the job was not open."""
    _, index_of = indices(optimizer)
    entry = {'job': torch.tensor(list(job.encode()), dtype=torch.uint8, device='cpu'),
             'steps': torch.tensor(steps, dtype=torch.int64, device='cpu')}
    if version is not None:
        entry['version'] = torch.tensor(version, dtype=torch.int64, device='cpu')
    return {'state': {}, 'param_groups': pack(optimizer, index_of), _KEY: entry}


def unopened(optimizer, job):
    return naming(optimizer, job, None, 0)


def named(state_dict):
    """(job, version or None) of a state_dict that names a job; None of one in torch's format."""
    entry = state_dict.get(_KEY)
    if entry is None:
        return None
    version = entry.get('version')
    return bytes(entry['job'].tolist()).decode(), None if version is None else int(version)


def check_job(named, mine):
    job, version = named
    if version is not None and job != mine:
        raise Error(f"the state_dict is of job '{job}', this optimizer of '{mine}'; give it name='{job}'", 'BAD_SPEC')


def full(optimizer):
    """In torch's format, whole: what torch.optim's optimizer of the same name would give."""
    parameters, index_of = indices(optimizer)
    state = {}
    for i, parameter in enumerate(parameters):
        entry = optimizer.state[parameter]
        if entry and entry['step'] > 0:
            state[i] = entry
            if parameter.dtype != torch.float32:
                # torch's optimizers pass over it; without it a 16-bit parameter would go on from its rounded value.
                entry['master'] = optimizer._read_master(parameter)
    return {'state': state, 'param_groups': pack(optimizer, index_of)}


class Kept:
    """Which versions the servers keep for state_dicts.

    Nobody tells whether a state_dict was ever saved: its process may have died on the way. Only one that a later one followed
    counts as saved, and one that was loaded. So versions go when `count` saved ones newer than they are there, whoever made them;
    if servers run out of room before that, the oldest go first, but none that is known to be saved."""

    def __init__(self, count):
        self._count = count
        self._made = []  # by this process, ascending; all but the last are saved
        self._loaded = None

    def loaded(self, version):
        self._loaded = version

    def keep(self, session):
        """The session's version, from now on."""
        version = session.version
        if self._made and self._made[-1] == version:
            return
        while True:
            try:
                session.pin()
                break
            except Error as error:
                if error.reason != 'BUDGET' or not self._give_up_oldest(session):
                    raise
        self._made.append(version)
        if len(self._made) > self._count:
            self._made = self._made[-self._count - 1:]
            for old in session.pins():
                if old < self._made[0]:
                    session.unpin(old)

    def _give_up_oldest(self, session):
        for old in session.pins():
            if old not in self._made[-self._count:] and old != self._loaded:
                session.unpin(old)
                return True
        return False


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
