"""Where a parameter's elements are: which ranks have it, and which part each of them has."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.ranks.groups import Group, world
from ballast.torch.tensors.kinds import is_sharded, tensor_module

# Ranks, sizes of the mesh's axes, (axis, dimension) of each cut.
Key = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int], ...]]


def key_of(name: str, parameter: torch.Tensor, group: Group | None = None) -> Key | None:
    """Returns the placement of a DTensor, by ranks of the group (None: the default group). None: a plain tensor, whole on this rank."""
    if not is_sharded(parameter):
        return None
    types, mesh = tensor_module(), parameter.device_mesh.mesh
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        # Also torch's _StridedShard, which is no Shard in every release.
        if placement.is_partial() or not hasattr(placement, 'dim'):
            raise Error(f"parameter '{name}' is a DTensor placed as {parameter.placements}; expected shards and replicas, as fully_shard "
                        'and parallelize_module make them', 'UNSUPPORTED')
        # A strided shard was cut last, though its axis comes first. fully_shard makes one of a tensor that is parallel already.
        (plain if type(placement) is types.Shard else strided).append((axis, placement.dim % parameter.dim()))
    group, ranks = group or world(), mesh.flatten().tolist()
    other = next((rank for rank in ranks if rank not in group.numbers), None)
    if other is not None:
        raise Error(f"parameter '{name}' is a DTensor over the ranks {ranks}, but the optimizer is of the ranks {list(group.numbers)}; "
                    f'give it as group= one that has rank {other} too, or None for all ranks', 'UNSUPPORTED')
    return tuple(group.numbers[rank] for rank in ranks), tuple(mesh.shape), tuple(plain + strided)


def parts_of(key: Key, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the dimension along which servers divide the tensor, and into how many parts. Without parts, a shard along another dimension
    than the first would be one range for each row. A job keeps the parts that it was made with."""
    _, sizes, cuts = key
    counts: dict[int, int] = {}
    for axis, dimension in cuts:
        counts[dimension] = counts.get(dimension, 1) * sizes[axis]
    for dimension, count in sorted(counts.items()):
        if dimension > 0 and count > 1 and shape[dimension] % count == 0:
            return dimension, count
    return 0, 1


@functools.lru_cache(maxsize=4096)
def native(key: Key) -> _native.Placement:
    ranks, sizes, cuts = key
    return _native.Placement(list(ranks), list(sizes), list(cuts))


@functools.lru_cache(maxsize=65536)
def box(key: Key, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, int], ...]:
    """Returns (begin, end) of each dimension of the part that `rank` has."""
    return tuple(native(key).box(list(shape), key[0].index(rank)))


def check(name: str, parameter: torch.Tensor, key: Key, rank: int) -> None:
    """Refuses a DTensor whose memory here is not the part that its placements say it is."""
    ranks, _, _ = key
    if rank not in ranks:
        raise Error(f"parameter '{name}' is a DTensor over the ranks {list(ranks)}, and rank {rank} is not among them; give the optimizer "
                    'on each rank the parameters that this rank has', 'UNSUPPORTED')
    if parameter.dim() == 0 or not is_sharded(parameter):
        return
    expected = [end - begin for begin, end in box(key, tuple(parameter.shape), rank)]
    here = list(parameter._local_tensor.shape)
    if expected != here and not (0 in expected and 0 in here):
        raise Error(f"parameter '{name}' of shape {list(parameter.shape)}, a DTensor placed as {parameter.placements}, has {here} on rank "
                    f'{rank}; expected {expected}, the chunks of torch.chunk along each axis, those of fully_shard cut last', 'UNSUPPORTED')


def _offset_of_torchs() -> Any:
    """Returns torch's function for a part's shape and offset, with which Distributed Checkpoint reads and writes. None: this release has no
    function of that name."""
    try:
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    except ImportError:
        return None
    return _compute_local_shape_and_global_offset


@functools.lru_cache(maxsize=65536)
def _is_mistaken(key: Key, shape: tuple[int, ...], placements: tuple[Any, ...]) -> bool:
    ranks, sizes, cuts = key
    counts: dict[int, int] = {}
    for axis, dimension in cuts:
        counts[dimension] = counts.get(dimension, 1) * sizes[axis]
    if all(shape[dimension] % count == 0 for dimension, count in counts.items()) or len(cuts) == len(counts):
        return False  # even, or each dimension is cut once
    offset_of = _offset_of_torchs()
    if offset_of is None:
        return True
    for place, rank in enumerate(ranks):
        coordinate = [place // math.prod(sizes[axis + 1:]) % sizes[axis] for axis in range(len(sizes))]
        part, first = offset_of(shape, sizes, coordinate, placements)
        ours = box(key, shape, rank)
        if 0 not in part and any((begin, end) != (at, at + size) for (begin, end), at, size in zip(ours, first, part)):
            return True
        if (0 in part) != any(begin == end for begin, end in ours):
            return True
    return False


def check_torchs(name: str, tensor: torch.Tensor) -> None:
    """Refuses a DTensor if torch mistakes some rank's part. That happens, for some sizes, with an uneven shard of fully_shard over one of
    parallelize_module along the same dimension. All ranks decide alike."""
    key = key_of(name, tensor)
    if key is not None and is_sharded(tensor) and _is_mistaken(key, tuple(tensor.shape), tuple(tensor.placements)):
        raise Error(f"parameter '{name}' of shape {list(tensor.shape)} is a DTensor placed as {tensor.placements} over {list(key[1])} "
                    'ranks, and torch takes other elements for a part of it than the rank has, so Distributed Checkpoint would write and '
                    'read wrong values. Use export_state(), or full_state_dict(), whose tensors are whole', 'UNSUPPORTED')
