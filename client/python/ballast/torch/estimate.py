"""Estimates the memory and time that a job would need, before there is a job."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from ballast import _native, place
from ballast.errors import Error
from ballast.torch.job.naming import UnitsBySize, positional_name, split_named, unit_of
from ballast.torch.job.spec import own_masters
from ballast.torch.ranks.groups import world
from ballast.torch.sharding.shard import _PREFETCH_BYTES
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.members import check_parameter

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_PROFILE = 'ballast-profile.yaml'
_IN_FLIGHT = 64 << 20  # bytes of pushes, and of pulls: client/session_types.h, inflight_bytes_max
# How many units of gathered parameters and of gradients FSDP2 has at one time in backward.
_UNITS_IN_USE = 4


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a job would need. Sizes are bytes."""
    fits: bool
    text: str  # for people
    step_seconds: float  # 0: not known, without a machine profile
    tiers: list[tuple[str, int]]  # name and bytes, of the fullest server; empty if it does not fit
    rank_bytes: int  # a trainer's parameters and gradients, whole
    rank_bytes_sharded: int  # and divided among the ranks
    # The memory of each kind of process, beside what Python, torch and activations take: 'trainer', and 'server' if that is a process of
    # its own. Empty if it does not fit.
    processes: list[tuple[str, int]]


class _Model(NamedTuple):
    """The model that would be trained."""
    tensors: list[_native.Tensor]  # of which servers keep something
    parameters: list[torch.Tensor]
    group_count: int
    dtype: str  # of all; else one that holds them all


def _processes(told: _native.EstimateReport, tensors: list[_native.Tensor], element_bytes: int, ranks: int, is_inside: bool,
               is_sharded: bool, prefetch_bytes: int) -> list[tuple[str, int]]:
    """Returns the memory of each process. is_inside: the server is in the trainer's process. is_sharded: by shard()."""
    if not told.fits:
        return []
    units: dict[str, int] = {}
    for tensor in tensors:
        units[tensor.unit] = units.get(tensor.unit, 0) + math.prod(tensor.shape) * element_bytes
    largest, whole, server = max(units.values()), sum(units.values()), dict(told.tiers)['dram']
    if is_sharded:  # pulls ahead of use, at most: a step gathers each unit twice
        ahead = min(max(prefetch_bytes, largest // ranks), 2 * whole // ranks)
        answers = 0 if is_inside else min(_IN_FLIGHT, ahead)  # else they are copied straight to their places
        trainer = min(_IN_FLIGHT, whole // ranks) + answers + ahead + _UNITS_IN_USE * largest
    elif is_inside:  # updates read gradients and write parameters where they are
        trainer = told.rank_bytes
    else:  # units that come, and slices in memory that the server shares
        trainer = told.rank_bytes + min(max(_IN_FLIGHT, largest), whole) + min(_IN_FLIGHT, told.rank_bytes // ranks)
    return [('trainer', trainer + server)] if is_inside else [('trainer', trainer), ('server', server)]


def _model(params: torch.nn.Module | ParamsT, frozen: str | None) -> _Model:
    """Looks at the parameters. params, frozen: as for estimate()."""
    if isinstance(params, torch.nn.Module):
        params = list(params.named_parameters())
    groups, names = split_named(params)
    by_size, tensors, parameters = UnitsBySize(), [], []
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group['params']):
            name = names[g][i]
            unit = unit_of(name) if name is not None else by_size.next(parameter.numel())
            name = name if name is not None else positional_name(g, i, parameter.shape)
            if parameter.dtype not in DTYPES:
                check_parameter(name, parameter, world())  # refuses it; a device does not matter here: 'meta' is as good
            parameters.append(parameter)
            if not parameter.requires_grad and frozen is None:
                continue
            tensor = _native.Tensor(name, unit, list(parameter.shape) or [1], g)
            tensor.frozen = '' if parameter.requires_grad or frozen == 'state' else frozen or ''
            tensors.append(tensor)
    dtypes = {parameter.dtype for parameter in parameters}  # also of frozen ones: they may want gradients later
    return _Model(tensors, parameters, len(groups), DTYPES[dtypes.pop()] if len(dtypes) == 1 else 'f32')


def estimate(params: torch.nn.Module | ParamsT, *, optimizer: Literal['adamw', 'adam', 'sgd', 'adagrad', 'lion'] = 'adamw',
             moments: Literal['f32', 'bf16', 'i8', 'f8'] = 'f32', master: Literal['f32', 'remainder'] = 'f32', ranks: int = 1,
             servers: int = 0, dram: int | str | None = None, nvme: int | str | None = None,
             directory: str | os.PathLike[str] | None = None, threads: int | None = None,
             durability: Literal['step', 'every-K', 'none'] | None = None, pin_interval: int = 0,
             chunk_elements: int = 1 << 20, profile: str | None = None, amsgrad: bool = False, momentum: bool = False,
             frozen: Literal['working', 'q8', 'state'] | None = None, prefetch_bytes: int = _PREFETCH_BYTES) -> Estimate:
    """Estimates what a model's job would need: the bytes of each tier and rank, what limits it, and the time of a step. A server without
    jobs computes it in a temporary directory, and reserves nothing.

    params: a model, which may be on the device 'meta', or what an optimizer takes.
    servers: how many state servers there are, all alike. 0: the server inside the trainer, or the one that several ranks share.
    momentum: SGD keeps a buffer.
    frozen: as in shard(), for parameters that want no gradient. Give it for any model of shard(), since servers then keep its parameters.
        None: the optimizer without shard(), whose servers keep nothing of them.
    prefetch_bytes: as in shard().
    dram, nvme, threads: of each server, as the arguments of an optimizer.
    profile: a file of `ballastctl iotune`. None: ballast-profile.yaml in the directory, if it is there. Without a profile the estimate has
        no time.
    """
    if servers > 0 and dram is None:
        raise Error(f"servers={servers}: expected the budgets of these servers, such as dram='64GiB'", 'BAD_CONFIG')
    if frozen not in (None, 'working', 'q8', 'state'):
        raise Error(f"frozen={frozen!r}: expected None, or shard()'s 'working', 'q8' or 'state'", 'BAD_CONFIG')
    model = _model(params, frozen)
    options, spec = _native.OpenOptions(), _native.Optimizer()
    spec.kind, spec.moments, spec.master, spec.gradient, spec.working = optimizer, moments, master, model.dtype, model.dtype
    spec.amsgrad, spec.momentum = amsgrad, momentum
    options.group_count, options.world_size = model.group_count, ranks
    options.chunk_elements, options.pin_interval = chunk_elements, pin_interval
    options.durability = durability or ('step' if directory is not None or servers > 0 else 'none')
    keeps = servers > 0 or ranks > 1 or frozen is not None  # a server keeps parameters, but for the one inside a trainer that has them
    if not keeps and options.durability == 'none' and own_masters(spec, model.parameters):
        spec.master = 'lent'
    options.optimizer = spec
    dram, nvme = place.budgets(directory, dram, nvme)
    told = _native.estimate(model.tensors, options, dram, nvme, threads or place.processors(), servers,
                            _profile_in(directory) if profile is None else profile, keeps)
    processes = _processes(told, model.tensors, 4 if model.dtype == 'f32' else 2, ranks, servers == 0 and ranks == 1, frozen is not None,
                           prefetch_bytes)
    return Estimate(told.fits, told.text + _rows(processes), told.step_seconds, told.tiers, told.rank_bytes, told.rank_bytes_sharded,
                    processes)


def _profile_in(directory: str | os.PathLike[str] | None) -> str:
    """Returns the path of a profile in the directory. '': there is none."""
    path = '' if directory is None else os.path.join(directory, _PROFILE)
    return path if os.path.exists(path) else ''


def _rows(processes: list[tuple[str, int]]) -> str:
    rows = ''.join(f'  {name:<42} {size / 2**30:.2f} GiB\n' for name, size in processes)
    return f'\n  Memory of each process, beside what Python, torch and activations take:\n{rows}' if rows else ''
