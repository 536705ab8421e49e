"""What an optimizer's state_dict is: the job's name and a version that its servers keep, or torch's own format."""

import copy

import torch

from ballast.errors import Error
from ballast.torch import marker, matching

# Keys of a group that are not options of it.
_NOT_OPTIONS = ('params', 'param_names', marker.KEY)


def options(group):
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _packed(optimizer, said=None):
    """torch's param_groups: numbers in the parameters' stead, and names where all of a group have one."""
    packed, count = [], 0
    for group, names in zip(optimizer.param_groups, matching.names(optimizer)):
        packed.append({**options(group), 'params': list(range(count, count + len(group['params'])))})
        count += len(group['params'])
        if names:
            packed[-1]['param_names'] = names
        if said is not None:
            packed[-1][marker.KEY] = said.tensor()
    return packed


def named(optimizer, version):
    """Of a job that keeps `version`."""
    said = marker.Marker(optimizer._options.job, version, optimizer._steps)
    return {'state': {}, 'param_groups': _packed(optimizer, said)}


def unopened(optimizer):
    said = marker.Marker(optimizer._options.job, origin=optimizer._origin(), begins=optimizer._options.resume == 'never')
    return {'state': {}, 'param_groups': _packed(optimizer, said)}


def full(optimizer):
    """In torch's format, whole: what torch.optim's optimizer of the same name would give. Of a job that has made no steps its moments
    nevertheless, since Distributed Checkpoint reads only what the state_dict that it is given has."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    entries = {i: optimizer._read_state(parameter) for i, parameter in enumerate(parameters)}
    entries = {i: entry for i, entry in entries.items() if entry}
    state = {i: entry for i, entry in entries.items() if entry['step'] > 0} or entries
    if state is entries and any(group.get('dampening') for group in optimizer.param_groups):
        # torch's SGD tells its first step, which dampens nothing, by a momentum that is not there.
        state = {i: {'step': entry['step']} for i, entry in entries.items()}
    return {'state': state, 'param_groups': _packed(optimizer)}


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


def load_groups(optimizer, groups):
    """groups: of matching.matched()."""
    for group, saved in zip(optimizer.param_groups, groups):
        group.update(copy.deepcopy(options(saved)))  # the loop may change its own in place, a learning rate in a tensor say


def check_job(said, mine):
    if said.job != mine:
        raise Error(f"the state_dict is of job '{said.job}' at version {said.version}, this optimizer of '{mine}'; give it "
                    f"name='{said.job}'", 'BAD_SPEC')


def before_torchs(optimizer):
    """torch.distributed.checkpoint's functions look whether there is state before they take a state_dict or load one. When they load
    flattened ones, they read the keys that the optimizer's param_groups have, and no others; and moments only where there are some."""
    durability = optimizer._options.durability if optimizer._session is not None else optimizer._durability_to_be()
    if durability == 'none':
        optimizer._open()
    else:
        for group in optimizer.param_groups:
            group.setdefault(marker.KEY, '')
