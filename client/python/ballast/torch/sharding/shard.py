"""ZeRO-3 whose parameters live on the state servers, on FSDP2."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.arguments import flag
from ballast.torch.job.naming import unwrapped
from ballast.torch.ranks import groups
from ballast.torch.sharding import blocks, coded, conversions
from ballast.torch.sharding.coded import Coded
from ballast.torch.sharding.collectives import Gather, QuantizedReduce, Reduce
from ballast.torch.sharding.sharded import Sharded, note
from ballast.torch.sharding.states import States
from ballast.torch.sharding.streamed import Streamed
from ballast.torch.sharding.unit import Unit
from ballast.torch.sharding.wrapped import fsdp_groups, is_wrapped
from ballast.torch.tensors import placement
from ballast.torch.tensors.kinds import is_sharded
from ballast.torch.tensors.remote import Part, Remote, named, part_of
from ballast.torch.weights import buffers
from ballast.torch.weights.checkpoint import Weights

if TYPE_CHECKING:
    # Which torch has since 2.9, so that ours are no subclasses.
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    from ballast.torch.sharding.wrapped import Wrapped

# FSDP2 of 2.6 does not run on CPUs, so it was never tested. Before 2.9 FSDP2's collectives cannot be replaced.
_TORCH = 2, 7
_PREFETCH_BYTES = 256 << 20


def shard(model: nn.Module, mesh: Any = None, units: Iterable[nn.Module] | None = None, mp_policy: Any = None, *,
          reshard_after_forward: bool | None = None, prefetch_bytes: int = _PREFETCH_BYTES, push_early: bool = True, backwards: int = 1,
          seed: int = 0, weights: str | os.PathLike[str] | Weights | None = None, gather: str | None = None, reduce: str | None = None,
          second: Any = None, frozen: str = 'working', working: str | None = None, offload_policy: None = None) -> nn.Module:
    """Moves the parameters of `model` to the state servers. FSDP2's gathers pull this rank's parts of a unit just before it is used, and
    backward sends gradients to the servers. Returns `model`.

    Give all of model.named_parameters() to an optimizer of ballast.torch before the first forward pass, which opens the job (so do resume()
    and step()). A model in which nothing wants a gradient needs no optimizer: it has a job of its own, in memory, while it lives.

    model: on the meta device, or with values. On the meta device a new job takes its values from each module's reset_parameters(), under a
        seed from the parameter's name and `seed`. Values that the model has become those of a new job, and their memory is freed. An
        existing job keeps its own values. The model may be wrapped by fully_shard already; then leave out mesh, units, mp_policy and
        reshard_after_forward, which fully_shard has. Parameters may already be DTensors of parallelize_module or of experts. A stage of a
        pipeline is a model: give it reshard_after_forward=False, give the schedule scale_grads=False (the loss divides), and call resume()
        on all ranks before the first pass, since the passes of stages do not begin together.
    mesh: the mesh of data parallelism. None: a mesh of all ranks.
    units: the modules that are gathered one at a time. None: the members of each ModuleList that is in no other; the members of a
        Sequential or ModuleDict that are alike and have modules of their own; the classes of transformers' _no_split_modules; the tiles
        of each TiledLinear; and experts, which are the alike members of a ModuleList or ModuleDict within a block whose name has 'expert'.
        The rest is one more unit. A warning names a unit that has more than half of the model and 64 MiB.
    prefetch_bytes: memory of the host for pulls ahead of use. There is always room for one unit.
    push_early: backward takes gradients out of the trainer, so nobody else can read or clip them. max_norm of the optimizer clips them.
    backwards: how many backward passes with gradient sync make a step.
    weights: a checkpoint of safetensors for a new job: a folder, an index, one file, or a ballast.torch.Weights where names need help. All
        headers are checked here. Values go to the servers one tensor after another when the job opens, and each rank reads its own parts.
        Names are the model's, or such that transformers renames to them. Persistent buffers come from it, too, at each start. A
        job that is there keeps its own values, says that it did not read these, and refuses another checkpoint than it began with. Buffers
        that are on the meta device and not in it are made again as their module makes them.
    gather, reduce: 'q8' moves parameters (ZeRO++'s qwZ) or gradients (qgZ) between ranks as 8-bit integers, with a scale for each 64 of
        them: 1/3.8 of the bytes of float32. A parameter that a pass computes with is off by at most 1/254 of the largest magnitude among
        its 64, plus the rounding to the dtype of gathers. A gradient is off by the mean of that over ranks. Masters on the servers stay
        exact.
    frozen: what servers keep of a parameter that wants no gradient when a new job opens. 'working': only its value in the dtype of gathers
        (2 bytes in 16 bits), to which it is rounded for good. 'q8': 8-bit integers and a scale for each 256 (1.016 bytes); an element is
        off by at most 1/254 of the largest magnitude among its 256, plus the rounding to the dtype of gathers. Neither can be trained in
        that job. 'state': its master and moments, as for a trained parameter, so that you can unfreeze it later. Servers refuse a value
        that is infinite in the dtype of gathers, as they refuse Inf and NaN.
    working: 'f8' has servers keep and send parameters in 8 bits (e4m3, with a scale for each 256: 0.51 of bf16's bytes), which go between
        ranks as they are. Each rank's device decodes them, into the dtype of gathers. A parameter that a pass computes with is off by at
        most 1/16 of itself, or by 1/458752 of the largest magnitude among its 256 where that is more, plus the rounding to the dtype of
        gathers. Steps, state_dict() and gathered() have the exact masters. Parameters that want no gradient need frozen='state'. Not
        beside gather='q8', tensor or expert parallelism. It is fixed when a job is made.
    second: a mesh of the ranks of this rank's node, or of another part of the ranks that gather together. Each unit is pulled once for each
        version. Its later gathers, as in backward, stay within the node, with the same bits (hpZ). Each of the N ranks needs memory for 1/N
        of all units.

    Threads: the training loop's. No rank waits for another. Errors: an Error names the parameter or the argument, and the model is as
    before, except that fully_shard may have wrapped it. In passes on CPUs: RANK_MISSING if ranks do not come to a gather within the
    optimizer's step_timeout."""
    _check(model, offload_policy, reshard_after_forward, prefetch_bytes, backwards)
    streamed = None if weights is None else Streamed(model, weights)
    _check_collectives(gather, reduce, second)
    if frozen not in ('working', 'q8', 'state'):
        raise Error(f"shard(frozen={frozen!r}): expected 'working', 'q8' or 'state'", 'BAD_CONFIG')
    _check_working(model, working, gather, frozen)
    _give_buffers(model, [] if streamed is None else streamed.buffers)
    if any(is_wrapped(module) for module in model.modules()):
        given = {'mesh': mesh, 'units': units, 'mp_policy': mp_policy, 'reshard_after_forward': reshard_after_forward}
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise Error(f'shard({extra[0]}=): fully_shard has already wrapped the model with one; leave it out', 'BAD_CONFIG')
        is_chosen = False
    else:
        is_chosen = units is None
        _wrap(model, mesh, units, mp_policy, reshard_after_forward)
    _check_wrapped(model, gather, reduce, second, working)
    how = {'gather': gather, 'reduce': reduce, 'working': working, 'second': second and f'{len(second.mesh)} ranks',
           'weights': None if streamed is None else f'{streamed.origin:08x}'}
    sharded = Sharded(prefetch_bytes, backwards, flag('push_early', push_early), seed, '' if frozen == 'state' else frozen, working or '',
                      ''.join(f', {name}={value}' for name, value in how.items() if value is not None))
    sharded.values.streamed = streamed
    units_of = _replace(model, sharded, getattr(mp_policy, 'param_dtype', None))
    _set_collectives(units_of, gather, reduce, second)
    blocks.mark_experts(model, sharded.units)
    if is_chosen:
        blocks.warn_of_large(sharded.units)
    States(model, sharded)
    conversions.watch(model)
    sharded.watch(model)
    sharded.number = groups.world().count(('model', *sorted(sharded.holders)))
    note(model, sharded)
    return model


def _check(model: nn.Module, offload_policy: Any, reshard_after_forward: Any, prefetch_bytes: Any, backwards: Any) -> None:
    version = tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2])
    if version < _TORCH:
        raise Error(f'shard() needs torch {_TORCH[0]}.{_TORCH[1]} or later, and this is {torch.__version__}; without shard(), optimizers '
                    'of ballast.torch work with fully_shard', 'UNSUPPORTED')
    if offload_policy is not None:
        raise Error(f'shard(offload_policy={type(offload_policy).__name__}): parameters live on the servers, so there is nothing to '
                    'offload; leave it out', 'UNSUPPORTED')
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise Error(f'shard(reshard_after_forward={reshard_after_forward!r}): expected True, False or None, since FSDP2 holds no '
                    'parameters that it could keep in smaller shards', 'UNSUPPORTED')
    for name, value in (('prefetch_bytes', prefetch_bytes), ('backwards', backwards)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Error(f'shard({name}={value!r}): expected an integer of at least 1', 'BAD_CONFIG')
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise Error('shard() needs torch.distributed, for a single rank too; call init_process_group() before it', 'BAD_REQUEST')
    for name, parameter in model.named_parameters():
        if part_of(parameter) is not None:
            raise Error(f"parameter '{name}' already lives on the servers, since shard() was called before; call it once", 'BAD_REQUEST')


def _give_buffers(model: nn.Module, read: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> None:
    """Gives buffers values that were read, and makes those again that are still on the meta device. An error changes none."""
    names = {module: path for path, module in model.named_modules()}
    given = {f'{names[module]}.{leaf}' if names[module] else leaf: values for module, leaf, values in read}
    made = buffers.made_again(model, given)
    first = next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)
    device = torch.device('cpu' if first is None else first.device_mesh.device_type)  # fully_shard, if still to come, moves buffers itself
    for module, leaf, values in (*read, *((module, leaf, values) for (module, leaf), values in made.items())):
        buffer = module._buffers[leaf]
        if buffer is None or buffer.is_meta:
            module._buffers[leaf] = values.to(device)
        else:
            buffer.copy_(values)


def _check_collectives(gather: Any, reduce: Any, second: Any) -> None:
    from torch.distributed.fsdp import FSDPModule
    if not hasattr(FSDPModule, 'set_custom_all_gather') and (gather, reduce, second) != (None, None, None):
        raise Error('shard(gather=, reduce=, second=) replaces collectives of FSDP2, which needs torch 2.9 or later, and this is '
                    f'{torch.__version__}; leave them out', 'UNSUPPORTED')
    for name, value in (('gather', gather), ('reduce', reduce)):
        if value not in (None, 'q8'):
            raise Error(f"shard({name}={value!r}): expected None or 'q8'; dtypes of gathers and reductions are mp_policy's", 'BAD_CONFIG')
    if second is not None and (getattr(second, 'ndim', None) != 1 or groups.world().rank not in second.mesh.tolist()):
        raise Error(f'shard(second={second!r}): expected a DeviceMesh of one dimension that has this rank: the ranks of one node, as '
                    "init_device_mesh(device, (nodes, ranks_per_node), mesh_dim_names=('node', 'local'))['local']", 'BAD_CONFIG')


def _check_working(model: nn.Module, working: Any, gather: Any, frozen: str) -> None:
    from torch.distributed.fsdp import FSDPModule
    if working is None:
        return
    if working != 'f8':
        raise Error(f"shard(working={working!r}): expected None or 'f8'; the dtype of gathers is mp_policy's", 'BAD_CONFIG')
    if not hasattr(FSDPModule, 'set_custom_all_gather'):
        raise Error("shard(working='f8') replaces gathers of FSDP2, which needs torch 2.9 or later, and this is "
                    f'{torch.__version__}; leave it out', 'UNSUPPORTED')
    if gather is not None:
        raise Error(f"shard(working='f8', gather={gather!r}): gathers have 8 bits already; leave out gather", 'BAD_CONFIG')
    still = next((name for name, parameter in model.named_parameters() if not parameter.requires_grad), None)
    if still is not None and frozen != 'state':
        raise Error(f"shard(working='f8', frozen={frozen!r}): parameter '{still}' wants no gradient, and servers keep no frozen values in "
                    "f8; expected frozen='state', or leave out working", 'UNSUPPORTED')


def _check_wrapped(model: nn.Module, gather: Any, reduce: Any, second: Any, working: Any) -> None:
    """Refuses a model, before anything changes, if fully_shard or the caller has set it up in a way that shard() cannot use."""
    compresses = gather is not None or reduce is not None
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if not is_wrapped(module):
            continue
        first = next((own for own, _ in module.named_parameters(name)), name)
        sizes: dict[torch.device, dict[str, int]] = {}
        for parameter, known in _fsdp_params(module):
            _check_known(first, parameter, known, compresses, second)
            if working is not None and is_sharded(parameter):
                key = cast('placement.Key', placement.key_of(names[parameter], parameter))
                coded.check(names[parameter], parameter.shape, placement.box(key, tuple(parameter.shape), groups.world().rank),
                            known.padded_sharded_param_size.numel(), known.mesh_info.shard_mesh_rank)
            width = (known.mp_policy.param_dtype or parameter.dtype).itemsize
            sizes.setdefault(_device_of(parameter), {})[names[parameter]] = parameter.numel() * width
        for device, those in sizes.items():
            blocks.check_fit(name or '(root)', those, device)
        if (compresses or second is not None or working is not None) and _has_own_meshes(module):
            raise Error(f"shard(gather=, reduce=, second=, working=): parameters gathered with '{first}' are over several meshes; expected "
                        'one mesh', 'UNSUPPORTED')
        for group in fsdp_groups(module):
            _check_collectives_of(first, group)


def _check_known(first: str, parameter: torch.Tensor, known: Any, compresses: bool, second: Any) -> None:
    """first: the name of the first parameter that is gathered with this one. known: what FSDP2 knows of this one."""
    if known.offload_to_cpu:
        raise Error(f"parameter '{first}' is under CPUOffloadPolicy, but with shard() there is nothing to offload; leave the policy out "
                    'of fully_shard', 'UNSUPPORTED')
    if not hasattr(known.mesh_info, 'shard_process_group'):
        raise Error(f"parameter '{first}' is replicated and not sharded; wrap it with fully_shard", 'UNSUPPORTED')
    together = set(torch.distributed.get_process_group_ranks(known.mesh_info.shard_process_group))
    if second is not None and not together.issuperset(second.mesh.tolist()):
        raise Error(f'shard(second=): expected ranks that gather together, but ranks {second.mesh.tolist()} are not all among ranks '
                    f"{sorted(together)}, which gather parameter '{first}'", 'BAD_CONFIG')
    if compresses and is_sharded(parameter) and parameter.device_mesh.mesh.numel() > known.mesh_info.mesh.mesh.numel():
        raise Error(f"shard(gather=, reduce=): parameter '{first}' is spread over {parameter.device_mesh}, of which fully_shard covers "
                    'only a part. Beside tensor or expert parallelism, 8 bits would round replicas differently; leave them out',
                    'UNSUPPORTED')


def _check_collectives_of(first: str, group: Any) -> None:
    for kind in ('_all_gather_comm', '_reduce_scatter_comm'):
        comm = getattr(group, kind, None)
        if comm is not None and not type(comm).__name__.startswith('Default'):
            raise Error(f"the module of parameter '{first}' has its own {type(comm).__name__}, and shard() sets one; leave out "
                        'set_custom_all_gather, set_custom_reduce_scatter and set_allocate_memory_from_process_group_for_comm',
                        'UNSUPPORTED')


def _has_own_meshes(wrapped: Wrapped) -> bool:
    """shard_placement_fn has given parameters of the unit meshes of their own. Gathers over several meshes cannot be replaced."""
    return len({known.mesh_info.shard_process_group for _, known in _fsdp_params(wrapped)}) > 1


def _wrap(model: nn.Module, mesh: Any, units: Iterable[nn.Module] | None, mp_policy: Any, reshard_after_forward: bool | None) -> None:
    from torch.distributed.fsdp import fully_shard
    arguments = {'mesh': mesh, 'mp_policy': mp_policy, 'reshard_after_forward': reshard_after_forward}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    units = blocks.chosen(model) if units is None else list(units)
    inside = set(model.modules())
    for unit in units:
        if unit not in inside or unit is model:
            raise Error(f'shard(units=): {type(unit).__name__} is not a module within the model', 'BAD_CONFIG')
    # Inner units first: fully_shard leaves alone what an inner one has.
    depth = {module: name.count('.') for name, module in model.named_modules()}
    for unit in sorted(units, key=lambda unit: -depth[unit]):
        fully_shard(unit, **arguments)
    fully_shard(model, **arguments)


def _set_collectives(units: dict[Wrapped, Unit], gather: str | None, reduce: str | None, second: Any) -> None:
    """Replaces FSDP2's collectives, where torch and the unit's meshes allow that."""
    for wrapped, unit in units.items():
        if hasattr(wrapped, 'set_custom_all_gather') and not _has_own_meshes(wrapped):
            if unit.working:
                unit.coded = Coded(unit.parts, fsdp_groups(wrapped)[0].mesh_info.shard_mesh_size)
            unit.gather = Gather(unit, gather == 'q8', None if second is None else second.get_group())
            wrapped.set_custom_all_gather(cast('AllGather', unit.gather))
            wrapped.set_custom_reduce_scatter(cast('ReduceScatter', Reduce(unit) if reduce is None else QuantizedReduce(unit)))


def _replace(model: nn.Module, sharded: Sharded, dtype: torch.dtype | None) -> dict[Wrapped, Unit]:
    """Replaces parameters by Remotes. Makes a unit of the parameters of each module of fully_shard, and returns units by module. A
    parameter belongs to the innermost such module that holds it. dtype: of gathers, if known."""
    owner: dict[torch.Tensor, tuple[str, Wrapped]] = {}
    wrapped_by: dict[Any, tuple[str, list[Wrapped]]] = {}  # by FSDP2's state: several modules may be gathered as one
    known: dict[torch.Tensor, Any] = {}
    for name, module in model.named_modules():
        if is_wrapped(module):
            name, together = wrapped_by.setdefault(module._get_fsdp_state(), (name, []))
            together.append(module)
            owner.update((parameter, (name, together[0])) for parameter in module.parameters())
            known.update(_fsdp_params(module))
    places: dict[torch.Tensor, list[tuple[nn.Module, str, str]]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name, leaf))
    by_unit: dict[Wrapped, tuple[str, dict[Part, nn.Parameter]]] = {}
    known_of: dict[Part, Any] = {}
    for parameter, there in places.items():
        module, path, leaf = there[0]
        name = f'{path}.{leaf}' if path else leaf
        if parameter not in owner:
            raise Error(f"parameter '{name}' is in no module that fully_shard has wrapped; wrap the model itself too", 'BAD_SPEC')
        its = known.get(parameter)
        part, made = _remote(unwrapped(name), parameter, None if its is None else its.padded_sharded_param_size, dtype)
        sharded.places[part], known_of[part] = there, its
        if not parameter.is_meta and is_sharded(parameter):
            local = parameter.to_local().detach()
            if sharded.values.streamed is None or not sharded.values.streamed.has(part):
                sharded.values.give(part, local.cpu().clone(memory_format=torch.contiguous_format))
            local.untyped_storage().resize_(0)  # FSDP2 holds it until its first forward pass, and asks no Remote where it lies then
        for inner, _, own in there:
            setattr(inner, own, made)
        unit, wrapped = owner[parameter]
        by_unit.setdefault(wrapped, (unit, {}))[1][part] = made
    units = {}
    for wrapped, (name, parameters) in by_unit.items():
        units[wrapped] = sharded.add(name or '(root)', parameters, next(iter(parameters.values())).device,
                                     wrapped_by[wrapped._get_fsdp_state()][1], {part: known_of[part] for part in parameters},
                                     fsdp_groups(wrapped))
    return units


def _remote(name: str, parameter: torch.Tensor, padded: torch.Size | None, dtype: torch.dtype | None) -> tuple[Part, nn.Parameter]:
    """Makes the part and the parameter that replaces a parameter. padded: the shape that FSDP2 gathers from every rank. None: FSDP2 left
    the parameter out."""
    from torch.distributed.tensor import DTensor
    rank, key = groups.world().rank, placement.key_of(name, parameter)
    if key is None or padded is None or not is_sharded(parameter):
        what = 'a plain tensor' if not is_sharded(parameter) else f'a DTensor placed as {parameter.placements}'
        raise Error(f"parameter '{name}' is {what}, and fully_shard has not sharded it; leave out ignored_params", 'UNSUPPORTED')
    placement.check(name, parameter, key, rank)
    box = placement.box(key, tuple(parameter.shape), rank)
    part = Part(name, parameter.shape, box, padded, dtype or parameter.dtype, key[0])
    memory = Remote(part, parameter.to_local().shape, parameter.dtype, _device_of(parameter))
    made = DTensor.from_local(memory, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                              stride=parameter.stride())
    return part, named(nn.Parameter(made, requires_grad=parameter.requires_grad))


def _device_of(parameter: torch.Tensor) -> torch.device:
    """Returns where a sharded parameter is gathered."""
    device = torch.device(parameter.device_mesh.device_type) if parameter.is_meta and is_sharded(parameter) else parameter.device
    return torch.device('cuda', torch.cuda.current_device()) if device.type == 'cuda' else device


def _fsdp_params(module: Wrapped) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yields the parameters of a module that fully_shard has wrapped, each with what FSDP2 knows of it."""
    for group in fsdp_groups(module):
        for fsdp_param in group.fsdp_params:
            yield fsdp_param.sharded_param, fsdp_param
