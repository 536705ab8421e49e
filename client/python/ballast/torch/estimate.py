"""The memory and time that a job would take of machines, before there is one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ballast import _native, place
from ballast.errors import Error
from ballast.torch.group import ranks
from ballast.torch.job.naming import UnitsBySize, positional_name, split_named, unit_of
from ballast.torch.stepping.members import DTYPES, check_parameter

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_PROFILE = 'ballast-profile.yaml'


def _tensors(params: torch.nn.Module | ParamsT, frozen: str | None) -> tuple[list[_native.Tensor], int, str]:
    """Tensors of a model or of what an optimizer takes, the number of groups, and the job's dtype."""
    if isinstance(params, torch.nn.Module):
        params = list(params.named_parameters())
    groups, names = split_named(params)
    by_size, tensors, dtypes = UnitsBySize(), [], set()
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group['params']):
            name = names[g][i]
            unit = unit_of(name) if name is not None else by_size.next(parameter.numel())
            name = name if name is not None else positional_name(g, i, parameter.shape)
            if parameter.dtype not in DTYPES:
                check_parameter(name, parameter, ranks.world())  # refuses it; a device does not matter here: 'meta' is as good
            dtypes.add(parameter.dtype)  # also of frozen ones: they may want gradients later
            if not parameter.requires_grad and frozen is None:
                continue
            tensor = _native.Tensor(name, unit, list(parameter.shape) or [1], g)
            tensor.frozen = '' if parameter.requires_grad or frozen == 'state' else frozen
            tensors.append(tensor)
    return tensors, len(groups), DTYPES[dtypes.pop()] if len(dtypes) == 1 else 'f32'


def estimate(params: torch.nn.Module | ParamsT, *, optimizer: str = 'adamw', moments: str = 'f32', master: str = 'f32', ranks: int = 1,
             servers: int = 0, dram: int | str | None = None, nvme: int | str | None = None,
             directory: str | os.PathLike[str] | None = None, threads: int | None = None, durability: str | None = None,
             pin_interval: int = 0, chunk_elements: int = 1 << 20, profile: str | None = None, amsgrad: bool = False,
             momentum: bool = False, frozen: str | None = None) -> _native.EstimateReport:
    """A model's job: bytes per tier and rank, what binds, and the time of a step. A server that has no job is asked, in a
    temporary directory; nothing is taken.

    params: a model, also on the device 'meta', or what an optimizer takes. servers: how many state servers, alike; 0 for the one
    inside the trainer, or of several ranks beside them. momentum: SGD keeps a buffer.
    frozen: as shard()'s, of parameters that want no gradient (give one for any model of shard()'s, whose servers keep its parameters);
    None: the optimizer without shard(), whose servers have none of these.
    dram, nvme, threads: each server's, as an optimizer's arguments. profile: what `ballastctl iotune` wrote; else
    ballast-profile.yaml in the directory, if it is there: without one no time is told.
    Returns an object with fits, text (for people), step_seconds (0: not known), tiers [(name, bytes of the fullest
    server)], rank_bytes and rank_bytes_sharded (a trainer's parameters and gradients, whole or sharded).
    """
    if servers > 0 and dram is None:
        raise Error("servers=...: expected their budgets, such as dram='64GiB'", 'BAD_CONFIG')
    options = _native.OpenOptions()
    if frozen not in (None, 'working', 'q8', 'state'):
        raise Error(f"frozen={frozen!r}: expected None, or shard()'s 'working', 'q8' or 'state'", 'BAD_CONFIG')
    tensors, options.group_count, dtype = _tensors(params, frozen)
    options.world_size, options.chunk_elements, options.pin_interval = ranks, chunk_elements, pin_interval
    spec = _native.Optimizer()
    spec.kind, spec.moments, spec.master, spec.gradient, spec.working = optimizer, moments, master, dtype, dtype
    spec.amsgrad, spec.momentum = amsgrad, momentum
    options.optimizer = spec
    options.durability = durability or ('step' if directory is not None or servers > 0 else 'none')
    dram, nvme = place.budgets(directory, dram, nvme)
    if profile is None and directory is not None and os.path.exists(os.path.join(directory, _PROFILE)):
        profile = os.path.join(directory, _PROFILE)
    # A server keeps parameters, but for the one inside a trainer that has them.
    keeps = servers > 0 or ranks > 1 or frozen is not None
    return _native.estimate(tensors, options, dram, nvme, threads or place.processors(), servers, profile or '', keeps)
