"""to(), cuda(), float() and the like of a model of shard(). What changes nothing of a parameter passes, since trainers call to(device) on
every model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ballast.torch.tensors.remote import part_of

_PROBE = 64  # elements, whose values memory that is not initialised does not have


def watch(model: nn.Module) -> None:
    """model: it has Remotes instead of parameters."""
    for module in model.modules():
        vars(module)['_apply'] = functools.partial(_apply, module)


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], Any], recurse: bool = True) -> nn.Module:
    """Takes the place of nn.Module._apply(), which would swap a parameter even for itself, and of FSDP2's, which would take what it finds
    for its own parameters."""
    for parameter in module._parameters.values():
        part = part_of(parameter)
        if part is None or parameter is None:
            continue
        # Of the same kind: a parameter itself has no memory that a conversion could read.
        probe = torch.arange(_PROBE, dtype=parameter.dtype, device=parameter.device)
        made = fn(probe)
        if made.dtype != probe.dtype or made.device.type != probe.device.type or (probe.is_cuda and made.device != probe.device):
            raise part.refuse(f'a change to {made.dtype} on {made.device}')
        if made is not probe and not torch.equal(made, probe):
            raise part.refuse('a change of values, as by to_empty(),')
    with _without_remotes(module):
        nn.Module._apply(module, fn, recurse)
    return module


@contextmanager
def _without_remotes(module: nn.Module) -> Iterator[None]:
    kept = dict(module._parameters)
    module._parameters.update({leaf: None for leaf, parameter in kept.items() if part_of(parameter) is not None})
    try:
        yield
    finally:
        module._parameters.update({leaf: parameter for leaf, parameter in kept.items() if part_of(parameter) is not None})
