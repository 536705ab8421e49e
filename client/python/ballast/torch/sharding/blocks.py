"""Chooses the modules that shard() gathers one at a time, if the caller names none."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

import torch
from torch import nn

from ballast.errors import Error, warn
from ballast.torch.sharding.experts import Split
from ballast.torch.sharding.unit import Unit
from ballast.torch.tiled import TiledLinear

# A unit is worth a warning if it has more than half of the model, and at least this many bytes.
_LARGE_BYTES = 64 << 20


def chosen(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of the model, its experts, and all tiles."""
    # transformers' models name the classes of their blocks.
    names = {name for module in model.modules() for name in getattr(module, '_no_split_modules', None) or ()}
    owners: collections.Counter[torch.Tensor] = collections.Counter(parameter for module in model.modules()
                                                                    for parameter in module._parameters.values() if parameter is not None)
    tiles = [tile for module in model.modules() if isinstance(module, TiledLinear) for tile in module.tiles]
    alone = [expert for alike in experts(model) if all(_is_alone(expert, owners) for expert in alike) for expert in alike]
    return list(dict.fromkeys([*(block for child in model.children() for block in _blocks(child, names, owners)),
                               *(_members(model, owners) if _is_container(model) else ()), *alone, *tiles]))


def experts(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the lists of experts in the model, of which a pass uses those that tokens reach: several alike modules in a ModuleList or
    ModuleDict whose name says 'expert', and not 'shared', since all tokens reach shared ones; and those of split_experts()."""
    found = []
    for name, module in model.named_modules():
        leaf = name.rpartition('.')[2]
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and 'expert' in leaf and 'shared' not in leaf or isinstance(module, Split):
            alike = [member for member in module.children() if any(True for _ in member.parameters())]
            if len({_kind(member) for member in alike}) == 1 and len(alike) > 1:
                found.append(alike)
    return found


def mark_experts(model: nn.Module, units: list[Unit]) -> None:
    """Tells units that experts are, and which are in one list with them. units: of the whole model."""
    by_module = {module: unit for unit in units for module in unit.modules}
    for alike in experts(model):
        for unit in {by_module[inner] for expert in alike for inner in expert.modules() if inner in by_module}:
            unit.is_expert = True
        for unit in (its := [by_module[expert] for expert in alike if expert in by_module]):
            unit.alike = its


def _kind(module: nn.Module) -> tuple[object, ...]:
    return type(module), *((name, parameter.shape) for name, parameter in module.named_parameters())


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _blocks(module: nn.Module, names: Collection[str], owners: collections.Counter[torch.Tensor]) -> list[nn.Module]:
    """Returns the outermost blocks at or below `module`. owners: how many modules have each parameter."""
    if type(module).__name__ in names and _is_alone(module, owners):
        return [module]
    members = _members(module, owners) if _is_container(module) else []
    return members + [block for child in module.children() if child not in members for block in _blocks(child, names, owners)]


def _members(module: nn.Module, owners: collections.Counter[torch.Tensor]) -> list[nn.Module]:
    """Returns the blocks of a container: all members of a ModuleList; of a Sequential or ModuleDict those that are alike, and more than a
    layer."""
    there = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.ModuleList):
        return there
    kinds = collections.Counter(type(child) for child in there)
    return [child for child in there if kinds[type(child)] > 1 and any(True for _ in child.children()) and _is_alone(child, owners)
            and not isinstance(child, (nn.ModuleList, nn.ModuleDict))]


def _is_alone(module: nn.Module, owners: collections.Counter[torch.Tensor]) -> bool:
    """The module has parameters, and shares none with modules outside. FSDP2 could not gather shared ones with it."""
    inside = collections.Counter(parameter for inner in module.modules() for parameter in inner._parameters.values()
                                 if parameter is not None)
    return bool(inside) and all(owners[parameter] == count for parameter, count in inside.items())


def warn_of_large(units: list[Unit]) -> None:
    """Warns of a unit that has most of a large model, since each rank holds all of it at each gather."""
    sizes = {unit: sum(part.shape.numel() * part.gathered.itemsize for part in unit.parts) for unit in units}
    for unit, size in sizes.items():
        if size <= max(_LARGE_BYTES, sum(sizes.values()) / 2):
            continue
        within: collections.Counter[str] = collections.Counter()
        for part in unit.parts:
            within[part.name.rpartition('.')[0]] += part.shape.numel() * part.gathered.itemsize
        name, largest = within.most_common(1)[0]
        warn(f"shard(): unit '{unit.name}' has {size >> 20} of the model's {sum(sizes.values()) >> 20} MiB, and every rank holds a whole "
             f"unit while it computes with it. The largest module in it is '{name}' ({largest >> 20} MiB). Name the modules that are "
             'gathered one at a time: shard(model, units=[*model.layers, ...]). TiledLinear cuts a layer that is large by itself')


def check_fit(unit: str, sizes: Mapping[str, int], device: torch.device) -> None:
    """Refuses a unit that is larger than the card on which it is to be gathered. sizes: bytes of a gather, by parameter."""
    room = card_bytes(device)
    needed = 2 * sum(sizes.values())  # FSDP2 copies what it gathers out of the buffer of the collective
    if room is not None and needed > room:
        largest = max(sizes, key=lambda name: sizes[name])
        raise Error(f"shard(): a gather of unit '{unit}' takes {needed >> 20} MiB, and {device} has {room >> 20} MiB. The largest "
                    f"parameter in it is '{largest}' ({sizes[largest] >> 20} MiB). Cut its layer into tiles, as by "
                    'ballast.torch.TiledLinear.of(layer, out_tiles=8), or name smaller modules, shard(model, units=[...]). '
                    'MixedPrecisionPolicy(param_dtype=torch.bfloat16) halves gathers of float32', 'BUDGET')


def card_bytes(device: torch.device) -> int | None:
    """Returns the memory of a GPU. None: it is no GPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == 'cuda' else None
