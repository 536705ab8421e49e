"""state_dict() and load_state_dict() of a model that shard() has taken: DTensors whose parts come from the servers and go there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.job import edits
from ballast.torch.modes import plainly
from ballast.torch.sharding.remote import Part, remote_of
from ballast.torch.stepping.members import is_sharded, local

if TYPE_CHECKING:
    from ballast.torch.sharding.sharded import Sharded


class States:
    """Hooks of the model's modules. Threads: the training loop's."""

    def __init__(self, model: nn.Module, sharded: Sharded) -> None:
        """model: with Remotes in the place of its parameters."""
        self._sharded = sharded
        self._given: dict[Part, torch.Tensor] | None = None  # what a load_state_dict() of the model has brought so far; None: there is none
        model.register_load_state_dict_pre_hook(self._begin)
        for module in model.modules():
            if any(remote_of(parameter) is not None for parameter in module._parameters.values()):
                module.register_state_dict_post_hook(functools.partial(self._give))  # torch marks its hooks, and a method cannot be
                module.register_load_state_dict_pre_hook(self._take)
        model.register_load_state_dict_post_hook(self._end)

    @plainly
    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Each parameter at the job's version, in its own dtype: this rank's part, in memory of the host. COLLECTIVE where it opens the
        job."""
        for leaf, parameter in module._parameters.items():
            if remote_of(parameter) is not None and prefix + leaf in state:
                state[prefix + leaf] = self._sharded.open().read_master(parameter, whole=False).to(parameter.dtype)

    def _begin(self, *_: Any) -> None:
        self._given = {}

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Takes the values of this module's parameters out of the state, and leaves the parameters themselves there."""
        for leaf, parameter in module._parameters.items():
            part, value = remote_of(parameter), state.get(prefix + leaf)
            if part is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue  # torch tells what is wrong
            if self._given is None:
                raise Error(f"load_state_dict() of a module below the one that shard() was given, with parameter '{part.name}': load the "
                            'state into that model, with strict=False where it has no more', 'UNSUPPORTED')
            if remote_of(value) is not part:
                self._given[part] = _own(parameter, part, value)
            state[prefix + leaf] = parameter

    @plainly
    def _end(self, model: nn.Module, _: Any) -> None:
        """The values become a new job's, or those of the servers in one transaction. COLLECTIVE where the job is open."""
        given, self._given = self._given or {}, None
        job = self._sharded.opened
        if job is not None:
            edits.give(job, {id(self._sharded.parameters[part]): value for part, value in given.items()})
            return
        for part, value in given.items():
            self._sharded.values.give(part, value)


def _own(parameter: torch.Tensor, part: Part, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of `value`, in memory of its own on the host, in the parameter's dtype."""
    if not is_sharded(value):
        mine = part.of(value)
    elif value.device_mesh == parameter.device_mesh and value.placements == parameter.placements:
        mine = local(value)
    else:
        raise Error(f"the state's '{part.name}' is a DTensor placed as {value.placements} over {value.device_mesh}; expected the "
                    f"parameter's own, {parameter.placements} over {parameter.device_mesh}, or a whole tensor", 'UNSUPPORTED')
    return mine.detach().to(device='cpu', dtype=parameter.dtype, copy=True).contiguous()
