"""optimizer.state: moments and step counts, read from the servers when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from ballast.errors import Error
from ballast.torch.job import checkpoint, loading
from ballast.torch.state_dict.read_only import Entry

if TYPE_CHECKING:
    from ballast.torch.optimizer import Optimizer


class State(MutableMapping):
    """Entries by parameter, those that had no step yet included. The values are copies; what is assigned to parameters, or taken away, is
    so on the servers when the assignment returns. All ranks assign the same.

    Never empty, also before the job is open: torch's checkpointing makes a step of its own where it finds no state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # which lives while its state is used

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group['params']]

    def __len__(self) -> int:
        return len(self._parameters())

    def __bool__(self) -> bool:
        checkpoint.before_torchs(self._optimizer.job)
        return True

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters())

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is each for each in self._parameters())

    def _check(self, parameter: object) -> None:
        if parameter not in self:
            raise KeyError('this parameter is in none of the param_groups')

    def __getitem__(self, parameter: torch.Tensor) -> Entry:
        entry = self._optimizer.job.read_state(parameter)
        if not entry:
            self._check(parameter)  # a look through all, so it comes last
        return Entry(entry)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def __setitem__(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        self._check(parameter)
        loading.put(self._optimizer.job, {id(parameter): entry})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def clear(self) -> None:
        self.replace({})

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """As assigning `states` to torch's optimizer.state: parameters that are not in it begin anew."""
        if isinstance(states, State) and states._optimizer is self._optimizer:
            return
        if not isinstance(states, Mapping):
            raise Error(f'optimizer.state = {type(states).__name__}: expected a dict of dicts by parameter', 'BAD_CONFIG')
        parameters = self._parameters()
        there = {id(parameter) for parameter in parameters}
        for other in states:
            if id(other) not in there:
                raise KeyError('optimizer.state: a parameter is in none of the param_groups')
        loading.put(self._optimizer.job, {id(parameter): states.get(parameter) or {} for parameter in parameters})
