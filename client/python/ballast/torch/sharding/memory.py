"""Memory of the host for what comes and goes with each unit: pulls, and the buffers of gathers and reductions."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Sequence

import torch

# Smaller buffers are malloc's.
_BYTES_MIN = 1 << 20
# Of tensors that share a buffer.
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


def held(size: int, pinned: bool) -> int:
    """Returns how many bytes a buffer of this size takes. torch rounds page-locked ones up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size > 0 else size


class Memory:
    """Reuses a buffer once no tensor uses it. New memory costs a page fault for each 4 KiB, and buffers that come and go in malloc's heap
    leave gaps. It holds as much as was in use at one time. Threads: tensors may end on any."""

    def __init__(self, seldom: bool = False) -> None:
        """seldom: while no tensor uses a buffer, the operating system may take its memory for others."""
        self._seldom = seldom
        self._free: dict[int, list[mmap.mmap]] = {}  # by bytes

    def take(self, elements: int, dtype: torch.dtype, pinned: bool = False) -> torch.Tensor:
        """Returns a tensor of one dimension, without setting its elements. pinned: page-locked, for copies to and from a GPU. torch keeps
        those buffers, and reuses one once the copies enqueued for it are over."""
        size = elements * dtype.itemsize
        if pinned:
            return torch.empty(elements, dtype=dtype, device='cpu', pin_memory=True)
        if size < _BYTES_MIN:
            return torch.empty(elements, dtype=dtype, device='cpu')
        room = -(-size // _HUGE_PAGE) * _HUGE_PAGE if self._seldom else size
        free = self._free.setdefault(room, [])
        memory = free.pop() if free else self._map(room)
        # The tensor's storage keeps the view, and the view tells when the storage has ended.
        view = memoryview(memory)[:size]
        weakref.finalize(view, self._put_back, memory, free).atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def _map(self, size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._seldom:
            with contextlib.suppress(OSError):  # some kernels have none
                memory.madvise(mmap.MADV_HUGEPAGE)  # a quarter of the time of small pages, at the first use
        return memory

    def _put_back(self, memory: mmap.mmap, free: list[mmap.mmap]) -> None:
        if self._seldom:
            try:
                memory.madvise(mmap.MADV_FREE)
            except OSError:  # locked memory, for example; its mapping ends here
                return
        free.append(memory)

    def take_alike(self, tensors: Sequence[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
        """Returns contiguous tensors of the same shapes and dtypes, in one buffer."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        pieces = self.take(sum(sizes), torch.uint8, pinned).split(sizes)
        return [piece[:tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
                for piece, tensor in zip(pieces, tensors)]
