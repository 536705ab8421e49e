"""state_dict() and load_state_dict() of a model of shard(): DTensors whose parts come from the servers and go there."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.modes import plainly
from ballast.torch.sharding.sharded import Sharded
from ballast.torch.states import values
from ballast.torch.tensors.kinds import is_sharded, local
from ballast.torch.tensors.remote import Part, part_of

if TYPE_CHECKING:
    from types import FrameType


class States:
    """Hooks of the model's modules. Threads: the training loop's."""

    def __init__(self, model: nn.Module, sharded: Sharded) -> None:
        """model: it has Remotes instead of parameters."""
        self._sharded = sharded
        self._load: _Load | None = None  # the one that is under way
        model.register_state_dict_pre_hook(self._settle)
        model.register_load_state_dict_pre_hook(self._begin)
        for module in model.modules():
            if any(part_of(parameter) is not None for parameter in module._parameters.values()):
                module.register_state_dict_post_hook(functools.partial(self._give))  # torch marks its hooks, and a method cannot be
                module.register_load_state_dict_pre_hook(self._take)
        model.register_load_state_dict_post_hook(self._end)

    @plainly
    def _give(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Gives the state this rank's part of each parameter at the job's version, in its own dtype, in memory of the host. COLLECTIVE if
        it opens the job."""
        for leaf, parameter in module._parameters.items():
            if parameter is not None and part_of(parameter) is not None and prefix + leaf in state:
                state[prefix + leaf] = self._sharded.open().read_master(parameter, whole=False).to(parameter.dtype)

    def _settle(self, *_: Any) -> None:
        if not self._sharded.copies:
            self._sharded.passes.settle()

    @plainly
    def _begin(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any,
               errors: list[str]) -> None:
        if self._sharded.copies:
            raise Error(f"load_state_dict() within gathered(), of a model with parameter '{next(iter(self._sharded.copies)).name}'; load "
                        'it outside, where the servers take the values', 'UNSUPPORTED')
        self._give_up()
        self._settle()
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._load = _Load(_call(), {}, errors, [], buffers)

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Takes the values of this module's parameters out of the state, and leaves the parameters themselves there."""
        if self._load is None or self._load.call is not _call():
            self._give_up()
            self._settle()
        for leaf, parameter in module._parameters.items():
            part, value = part_of(parameter), state.get(prefix + leaf)
            if part is None or parameter is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                continue  # torch tells what is wrong
            if self._load is None:
                raise Error(f"load_state_dict() of a module below the one that shard() was given, with parameter '{part.name}'; load the "
                            'state into the model that shard() was given, with strict=False if it has no more than this module',
                            'UNSUPPORTED')
            try:
                if part_of(value) is not part:
                    self._load.given[part] = _own(parameter, part, value)
            except Error as error:
                self._load.refused.append(error)
            state[prefix + leaf] = parameter

    @plainly
    def _give_up(self) -> None:
        """Gives up a load that somebody else's exception ended, without a hook that tells."""
        if self._load is not None:
            self._load.restore()
            self._load = None

    @plainly
    def _end(self, model: nn.Module, keys: Any) -> None:
        """Ends a load. The values become those of a new job, or go to the servers in one transaction. If one is refused, on any rank, the
        model stays as it was. COLLECTIVE if the job is open."""
        load, self._load = self._load, None
        if load is None:
            return
        job = self._sharded.job
        try:
            if job is not None:
                values.give(job, {id(self._sharded.parameters[part]): value for part, value in load.given.items()},
                           lambda: load.check(keys))
                return
            load.check(keys)
        except BaseException:
            load.restore()
            raise
        for part, value in load.given.items():
            self._sharded.values.give(part, value)


class _Load(NamedTuple):
    """A load_state_dict() of the model, while it is under way."""
    call: FrameType | None  # of torch's method
    given: dict[Part, torch.Tensor]  # values so far: this rank's
    errors: list[str]  # torch's, which it raises at the end
    refused: list[Error]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]  # of the model, with their values before

    def restore(self) -> None:
        """Restores the buffers."""
        for buffer, before in self.buffers:
            buffer.copy_(before)

    def check(self, keys: Any) -> None:
        """Raises what torch will raise once all hooks have run. keys: missing and unexpected ones."""
        if self.refused:
            raise self.refused[0]
        wrong = list(self.errors)
        if _is_strict():
            wrong += [f'{what} {names}' for what, names in (('missing keys', keys.missing_keys), ('unexpected keys', keys.unexpected_keys))
                      if names]
        if wrong:
            raise Error(f'load_state_dict() of a model of shard(): {"; ".join(wrong)}. Nothing was loaded', 'BAD_SPEC')


def _call() -> FrameType | None:
    """Returns the frame of the load_state_dict() that is under way. torch does not tell hooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back
    return frame


def _is_strict() -> bool:
    """The load_state_dict() under way wants all keys."""
    call = _call()
    return call is not None and bool(call.f_locals.get('strict'))


def _own(parameter: torch.Tensor, part: Part, value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of `value`, in memory of its own on the host, in the parameter's dtype."""
    if not is_sharded(value) or not is_sharded(parameter):
        mine = part.of(value)
    elif value.device_mesh == parameter.device_mesh and value.placements == parameter.placements:
        mine = local(value)
    else:
        raise Error(f"the state's '{part.name}' is a DTensor placed as {value.placements} over {value.device_mesh}; expected the "
                    f"parameter's own, {parameter.placements} over {parameter.device_mesh}, or a whole tensor", 'UNSUPPORTED')
    return mine.detach().to(device='cpu', dtype=parameter.dtype, copy=True).contiguous()
