"""optimizer.state: moments and step counts, read from the servers when they are asked for."""

from collections.abc import Mapping

import torch

# torch's names of an optimizer's moments, in the order of the servers' arrays.
MOMENTS = {
    'adamw': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'adam': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'sgd': ('momentum_buffer',),
    'adagrad': ('sum',),
    'lion': ('exp_avg',),
}


def moment_names(kind, spec):
    """`spec`: the _native.Optimizer of the job."""
    names = MOMENTS[kind]
    if kind in ('adam', 'adamw') and not spec.amsgrad:
        names = names[:2]
    if kind == 'sgd' and not spec.momentum:
        names = ()
    return names


class State(Mapping):
    """By parameter, those that had no step yet included; the values are copies, and writing to them changes nothing.

    Never empty, also before the job is open: torch's checkpointing makes a step of its own where it finds no state."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def _parameters(self):
        return [parameter for group in self._optimizer.param_groups for parameter in group['params']]

    def __len__(self):
        return len(self._parameters())

    def __iter__(self):
        return iter(self._parameters())

    def __contains__(self, parameter):
        return any(parameter is each for each in self._parameters())

    def __getitem__(self, parameter):
        entry = self._optimizer._read_state(parameter)
        if not entry and parameter not in self:  # a look through all, so it comes last
            raise KeyError('this parameter is in none of the param_groups')
        return entry

    def get(self, parameter, default=None):
        return self[parameter] if parameter in self else default


def read(session, member, parameter, names):
    """One parameter's entry, in the shape and with the names of torch.optim."""
    entry = {'step': torch.tensor(float(session.tensor_steps(member.name)), dtype=torch.float32, device='cpu')}
    for i, name in enumerate(names):
        moment = torch.empty(parameter.numel(), dtype=torch.float32, device='cpu')
        session.read(member.name, f'moment{i + 1}', moment)
        entry[name] = moment.reshape(parameter.shape)
    return entry
