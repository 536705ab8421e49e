"""ZeRO-3 whose parameters live on the state servers, on FSDP2."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.arguments import flag
from ballast.torch.job.naming import unwrapped
from ballast.torch.sharding.remote import Part, Remote, remote_of
from ballast.torch.sharding.sharded import Sharded
from ballast.torch.sharding.unit import Unit

# What FSDPModule is needed for came with this version; earlier ones were not tried.
_TORCH = 2, 9
_PREFETCH_BYTES = 256 << 20


def shard(model: nn.Module, mesh: Any = None, units: Iterable[nn.Module] | None = None, mp_policy: Any = None, *,
          reshard_after_forward: bool | None = None, prefetch_bytes: int = _PREFETCH_BYTES, push_early: bool = True, backwards: int = 1,
          seed: int = 0, offload_policy: None = None) -> nn.Module:
    """Parameters of `model` live on the state servers from now on: FSDP2's gathers pull this rank's rows of a unit just ahead of use, and
    gradients go to the servers in backward. Give an optimizer of ballast.torch model.named_parameters(), all of them, before the first
    forward pass, which opens the job (so do resume() and step()). Returns `model`.

    model: on the meta device (a new job's values come from each module's reset_parameters(), under a seed from the parameter's name and
    `seed`), or with values, which are a new job's and are freed. An existing job's values are its own. Not wrapped, or wrapped by
    fully_shard over all ranks, and then without mesh, units, mp_policy and reshard_after_forward, which are fully_shard's.
    units: modules that are gathered one at a time; None: the members of each ModuleList that is in no other. The rest is one more unit.
    prefetch_bytes: memory of the host for pulls ahead of use, at least one unit's.
    push_early: gradients leave the trainer in backward, so nobody else can read or clip them (the optimizer's max_norm does).
    backwards: how many backward passes with gradient sync make a step.

    Threads: the training loop's. Errors: an Error that names the parameter or the argument. Local: no rank waits for another."""
    _check(model, offload_policy, reshard_after_forward, prefetch_bytes, backwards)
    from torch.distributed.fsdp import FSDPModule
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        given = {'mesh': mesh, 'units': units, 'mp_policy': mp_policy, 'reshard_after_forward': reshard_after_forward}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise Error(f'shard({extra[0]}=): the model is wrapped by fully_shard, which has it already; leave it out', 'BAD_CONFIG')
    else:
        _wrap(model, mesh, units, mp_policy, reshard_after_forward)
    _check_offload(model, FSDPModule)
    sharded = Sharded(prefetch_bytes, backwards, flag('push_early', push_early), seed)
    _replace(model, sharded, FSDPModule, getattr(mp_policy, 'param_dtype', None))
    model.register_forward_pre_hook(_begin, prepend=True)
    return model


def _begin(model: nn.Module, _: Any) -> None:
    """FSDP2 looks over its parameters in the first forward pass, and inference mode has no version counters for that."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            model._get_fsdp_state()._lazy_init()


def _check(model: nn.Module, offload_policy: Any, reshard_after_forward: Any, prefetch_bytes: Any, backwards: Any) -> None:
    version = tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2])
    if version < _TORCH:
        raise Error(f'shard() needs torch {_TORCH[0]}.{_TORCH[1]} or later, and this is {torch.__version__}; optimizers of ballast.torch '
                    'work with fully_shard as it is', 'UNSUPPORTED')
    if offload_policy is not None:
        raise Error(f'shard(offload_policy={type(offload_policy).__name__}): parameters live on the servers, and there is nothing to '
                    'offload; leave it out', 'UNSUPPORTED')
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise Error(f'shard(reshard_after_forward={reshard_after_forward!r}): expected True, False or None: FSDP2 keeps no smaller shards '
                    'of parameters that it does not hold', 'UNSUPPORTED')
    for name, value in (('prefetch_bytes', prefetch_bytes), ('backwards', backwards)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Error(f'shard({name}={value!r}): expected an integer of at least 1', 'BAD_CONFIG')
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise Error('shard() is for ranks of torch.distributed, one or several: call init_process_group() before', 'BAD_REQUEST')
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Error(f"buffer '{name}' is on the meta device, and no server keeps buffers: give it values before shard()", 'BAD_SPEC')
    for name, parameter in model.named_parameters():
        if remote_of(parameter) is not None:
            raise Error(f"parameter '{name}' lives on the servers already: shard() was called before", 'BAD_REQUEST')


def _check_offload(model: nn.Module, fsdp_module: type) -> None:
    """Nothing of FSDP2's public interface tells its offload policy."""
    for name, module in model.named_modules():
        if not isinstance(module, fsdp_module):
            continue
        for group in getattr(module._get_fsdp_state(), '_fsdp_param_groups', ()):
            policy = type(getattr(group, 'offload_policy', None)).__name__
            if policy == 'CPUOffloadPolicy':
                first = next((own for own, _ in module.named_parameters(name)), name)
                raise Error(f"parameter '{first}' is under CPUOffloadPolicy, and with shard() there is nothing to offload: leave the "
                            'policy out of fully_shard', 'UNSUPPORTED')


def _wrap(model: nn.Module, mesh: Any, units: Iterable[nn.Module] | None, mp_policy: Any, reshard_after_forward: bool | None) -> None:
    from torch.distributed.fsdp import fully_shard
    arguments = {'mesh': mesh, 'mp_policy': mp_policy, 'reshard_after_forward': reshard_after_forward}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    units = _blocks(model) if units is None else list(units)
    inside = set(model.modules())
    for unit in units:
        if unit not in inside or unit is model:
            raise Error(f'shard(units=): {type(unit).__name__} is not a module within the model', 'BAD_CONFIG')
    # Inner units first: fully_shard leaves alone what an inner one has.
    depth = {module: name.count('.') for name, module in model.named_modules()}
    for unit in sorted(units, key=lambda unit: -depth[unit]):
        fully_shard(unit, **arguments)
    fully_shard(model, **arguments)


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return [child for child in module if any(True for _ in child.parameters())]
    return [block for child in module.children() for block in _blocks(child)]


def _replace(model: nn.Module, sharded: Sharded, fsdp_module: type, dtype: torch.dtype | None) -> None:
    """Parameters become Remotes. A parameter belongs to the innermost module of fully_shard that holds it. dtype: of gathers, if known."""
    owner: dict[torch.Tensor, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, fsdp_module):
            owner.update((parameter, (name, module)) for parameter in module.parameters())
    places: dict[torch.Tensor, list[tuple[nn.Module, str, str]]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name, leaf))
    by_unit: dict[nn.Module, tuple[str, dict[Part, torch.Tensor]]] = {}
    for parameter, there in places.items():
        module, path, leaf = there[0]
        name = f'{path}.{leaf}' if path else leaf
        if parameter not in owner:
            raise Error(f"parameter '{name}' is in no module that fully_shard has wrapped: wrap the model itself too", 'BAD_SPEC')
        part, made = _remote(unwrapped(name), parameter, dtype)
        sharded.values.place(part, there)
        if not parameter.is_meta:
            rows = parameter.to_local().detach()
            sharded.values.give(part, rows.cpu().clone(memory_format=torch.contiguous_format))
            rows.untyped_storage().resize_(0)  # FSDP2 holds it until its first forward pass, and asks no Remote where it lies then
        for inner, _, own in there:
            setattr(inner, own, made)
        unit, wrapped = owner[parameter]
        by_unit.setdefault(wrapped, (unit, {}))[1][part] = made
    for wrapped, (name, parameters) in by_unit.items():
        unit = sharded.add(name, parameters, next(iter(parameters.values())).device)
        # FSDP2 keeps units gathered after passes without a gradient, whatever becomes of the job meanwhile.
        wrapped.register_forward_pre_hook(functools.partial(_drop_stale, unit), prepend=True)


def _drop_stale(unit: Unit, module: nn.Module, _: Any) -> None:
    if unit.is_stale:
        module.reshard()


def _remote(name: str, parameter: torch.Tensor, dtype: torch.dtype | None) -> tuple[Part, nn.Parameter]:
    from torch.distributed.tensor import DTensor, Shard
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    rows = [i for i, placement in enumerate(placements) if placement == Shard(0)]
    if len(rows) != 1 or not all(placement.is_replicate() for i, placement in enumerate(placements) if i not in rows):
        raise Error(f"parameter '{name}' is placed as {placements or 'a plain tensor'}; expected one Shard(0), and "
                    'Replicate() for the rest, as fully_shard makes it over a mesh of one dimension, or of two (HSDP)', 'UNSUPPORTED')
    mesh = parameter.device_mesh
    part = Part(name, parameter.shape, mesh.size(rows[0]), mesh.get_local_rank(rows[0]), dtype or parameter.dtype)
    shape = parameter.to_local().shape
    if shape.numel() != part.elements:
        raise Error(f"parameter '{name}' has {list(shape)} on this rank; expected {part.rows} rows of {list(parameter.shape)}",
                    'UNSUPPORTED')
    device = torch.device(mesh.device_type) if parameter.is_meta else parameter.device
    if device.type == 'cuda':
        device = torch.device('cuda', torch.cuda.current_device())
    memory = Remote(part, shape, parameter.dtype, device)
    made = DTensor.from_local(memory, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
    return part, nn.Parameter(made, requires_grad=parameter.requires_grad)
