"""Parameters that servers send in blocks of 8 bits (shard(working='f8')), and that gathers decode on the device.

A block has BLOCK codes of e4m3 and then a scale, which each value is its code times. A part of a parameter is pulled with all blocks that
have an element of it: it begins amid the first of them, at its place in the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ballast.errors import Error
from ballast.torch.tensors.remote import Part

# kernels/float_formats.h has the same numbers.
BLOCK, _SCALE_BYTES = 256, 4
BLOCK_BYTES = BLOCK + _SCALE_BYTES


def decoded(coded: torch.Tensor) -> torch.Tensor:
    """Returns f32 [..., elements] of uint8 [..., whole blocks], on the same device. A block with Inf or NaN comes back as NaN."""
    blocks = coded.unflatten(-1, (-1, BLOCK_BYTES))
    scales = blocks[..., BLOCK:].contiguous().view(torch.float32)
    values: torch.Tensor = blocks[..., :BLOCK].contiguous().view(torch.float8_e4m3fn).float() * scales
    return values.flatten(-2)


class _Place(NamedTuple):
    """Where a part lies in the bytes of a rank."""
    begin: int
    end: int
    ahead: list[int]  # by rank: elements before its part in the first block


class Coded:
    """The bytes that each rank brings to a gather of a unit: its parts, each in as many blocks as the rank needs that needs most."""

    def __init__(self, parts: Sequence[Part], ranks: int) -> None:
        """ranks: how many gather together. REQUIRES: check() has passed for all parts."""
        self.ranks = ranks
        self._places: dict[Part, _Place] = {}
        self.bytes = 0
        for part in parts:
            share = part.padded.numel()
            ahead = [rank * share % BLOCK for rank in range(ranks)]
            size = -(-(max(ahead) + share) // BLOCK) * BLOCK_BYTES if share else 0
            self._places[part] = _Place(self.bytes, self.bytes + size, ahead)
            self.bytes += size

    def places(self, memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Returns the place of each part's pull in the bytes of this rank, whose rest becomes zero. sizes: of the pulls."""
        places = []
        for place, size in zip(self._places.values(), sizes):
            places.append(memory[place.begin:place.begin + size])
            memory[place.begin + size:place.end].zero_()
        return places

    def values(self, part: Part, coded: torch.Tensor, to: torch.Tensor) -> None:
        """Decodes a part of all ranks. coded: uint8 [ranks, bytes]. to: [ranks, padded elements], of any dtype of gathers."""
        place = self._places[part]
        if place.begin == place.end:
            return
        values = decoded(coded[:, place.begin:place.end])
        if not any(place.ahead):
            to.copy_(values[:, :to.shape[1]])
            return
        for rank, ahead in enumerate(place.ahead):
            to[rank].copy_(values[rank, ahead:ahead + to.shape[1]])


def check(name: str, shape: torch.Size, box: Sequence[tuple[int, int]], share: int, rank: int) -> None:
    """Refuses a part that is not rows of the parameter, as fully_shard divides them. box: (begin, end) of each dimension. share: elements
    of each rank's part, padded. rank: among those that gather together."""
    begins_there = any(begin == end for begin, end in box) or not box or box[0][0] * shape[1:].numel() == rank * share
    if not begins_there or any(bounds != (0, extent) for bounds, extent in zip(box[1:], shape[1:])):
        raise Error(f"shard(working='f8'): parameter '{name}' of shape {list(shape)} has {list(box)} on rank {rank} of a gather; expected "
                    'rows alone, divided over the ranks that gather together, since the elements of a block have one scale. Leave out '
                    "tensor and expert parallelism and shard_placement_fn, or working='f8'", 'UNSUPPORTED')
