"""Refuses parameters that share memory, since the update of one would overwrite that of the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ballast.errors import Error
from ballast.torch.tensors.members import Member


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first address, and one past the last."""
    first = tensor.data_ptr()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    begin, end = _bytes(tensor)
    return end - begin == tensor.numel() * tensor.element_size()


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Two tensors whose ranges overlap have a byte in common. They may also interleave without one, as columns of a matrix do."""
    if _is_dense(one) and _is_dense(other):
        return True
    (begin, end), (other_begin, other_end) = _bytes(one), _bytes(other)
    start = min(begin, other_begin)
    taken = torch.zeros(max(end, other_end) - start, dtype=torch.bool, device='cpu')

    def at(tensor: torch.Tensor, offset: int) -> torch.Tensor:
        size = tensor.element_size()
        return taken.as_strided((*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), offset)
    at(one, begin - start).fill_(True)
    return bool(at(other, other_begin - start).any())


def refuse(members: Iterable[Member]) -> None:
    """Refuses two members over one memory, and a member whose elements share memory. Slices of one buffer share no memory."""
    found = []
    for member in members:
        memory = member.here
        if memory is None or memory.numel() == 0 or memory.device.type == 'meta':
            continue
        begin, end = _bytes(memory)
        if end - begin < memory.numel() * memory.element_size():
            raise Error(f"parameter '{member.name}' has elements that share memory, as expand() makes them; clone() it, so that each has "
                        'memory of its own', 'UNSUPPORTED')
        found.append((str(memory.device), begin, end, member.name, memory))
    open_ranges: list[tuple[str, int, str, torch.Tensor]] = []  # that have not ended where the next one begins
    for device, begin, end, name, memory in sorted(found, key=lambda each: each[:3]):
        open_ranges = [each for each in open_ranges if each[0] == device and each[1] > begin]
        for _, _, other_name, other in open_ranges:
            if _touch(memory, other):
                raise Error(f"parameters '{other_name}' and '{name}' share memory (tied by .data?), so the update of one would be lost. "
                            'Use one Parameter under both names: module.weight = other.weight, without .data', 'UNSUPPORTED')
        open_ranges.append((device, end, name, memory))
