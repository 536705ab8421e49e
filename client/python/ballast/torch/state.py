"""optimizer.state: moments and step counts, read from the servers when they are asked for."""

from collections.abc import Mapping, MutableMapping

from ballast.errors import Error
from ballast.torch import checkpoint, loading
from ballast.torch.read_only import Entry


class State(MutableMapping):
    """By parameter, those that had no step yet included. The values are copies; what is assigned to parameters, or taken away, is so on
    the servers when the assignment returns. All ranks assign the same.

    Never empty, also before the job is open: torch's checkpointing makes a step of its own where it finds no state."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def _parameters(self):
        return [parameter for group in self._optimizer.param_groups for parameter in group['params']]

    def __len__(self):
        return len(self._parameters())

    def __bool__(self):
        checkpoint.before_torchs(self._optimizer)
        return True

    def __iter__(self):
        return iter(self._parameters())

    def __contains__(self, parameter):
        return any(parameter is each for each in self._parameters())

    def _check(self, parameter):
        if parameter not in self:
            raise KeyError('this parameter is in none of the param_groups')

    def __getitem__(self, parameter):
        entry = self._optimizer._read_state(parameter)
        if not entry:
            self._check(parameter)  # a look through all, so it comes last
        return Entry(entry)

    def get(self, parameter, default=None):
        return self[parameter] if parameter in self else default

    def __setitem__(self, parameter, entry):
        self._check(parameter)
        loading.put(self._optimizer, {id(parameter): entry})

    def __delitem__(self, parameter):
        self[parameter] = {}

    def clear(self):
        replace(self._optimizer, {})


def replace(optimizer, states):
    """As assigning `states` to torch's optimizer.state: parameters that are not in it begin anew."""
    if isinstance(states, State) and states._optimizer is optimizer:
        return
    if not isinstance(states, Mapping):
        raise Error(f'optimizer.state = {type(states).__name__}: expected a dict of dicts by parameter', 'BAD_CONFIG')
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    for other in states:
        if not any(other is parameter for parameter in parameters):
            raise KeyError('optimizer.state: a parameter is in none of the param_groups')
    loading.put(optimizer, {id(parameter): states.get(parameter) or {} for parameter in parameters})
