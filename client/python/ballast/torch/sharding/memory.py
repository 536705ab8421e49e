"""The host's memory for what comes and goes with each unit: pulls, and the buffers of gathers and reductions."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch

# Smaller buffers are malloc's.
_BYTES_MIN = 1 << 20
# Of tensors that share a buffer.
_ALIGNMENT = 64


def held(size: int, pinned: bool) -> int:
    """Bytes of a buffer for so many: torch rounds page-locked ones up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size > 0 else size


class Memory:
    """A buffer is taken again once no tensor uses it: new memory costs a page fault every 4 KiB, and buffers of malloc's heap that come and
    go leave gaps. Holds as much as was in use at one time. Threads: any, for the end of tensors."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by bytes

    def take(self, elements: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """A tensor of one dimension, its elements whatever the buffer had. pinned: page-locked, for copies to and from a GPU, in buffers
        that torch keeps: it gives one out again once the copies that were enqueued are over."""
        size = elements * dtype.itemsize
        if pinned:
            return torch.empty(elements, dtype=dtype, device='cpu', pin_memory=True)
        if size < _BYTES_MIN:
            return torch.empty(elements, dtype=dtype, device='cpu')
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The tensor's storage keeps the view, and the view tells when the storage has ended.
        view = memoryview(memory)
        weakref.finalize(view, free.append, memory).atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def take_alike(self, tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
        """Tensors of the same shapes and dtypes, contiguous, in one buffer."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        pieces = self.take(sum(sizes), torch.uint8, pinned).split(sizes)
        return [piece[:tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
                for piece, tensor in zip(pieces, tensors)]
