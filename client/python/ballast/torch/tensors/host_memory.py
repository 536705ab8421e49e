"""Memory of the host for tensors on a GPU. Servers read gradients from it, and write parameters to it."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable

import torch

# torch's allocator of pinned memory rounds up to a power of two, so small tensors share a slab.
_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """The tensor's memory is not the host's."""
    return tensor.device.type != 'cpu'


class HostMemory:
    """Keeps a page-locked place for each parameter and each gradient from step to step. It enqueues copies on the caller's current stream,
    so they keep their order with what the loop enqueues before and after them."""

    def __init__(self) -> None:
        self._places: dict[Hashable, torch.Tensor] = {}
        self._slab: torch.Tensor | None = None
        self._used = 0  # bytes of it
        self._streams: set[torch.cuda.Stream] = set()

    def place(self, key: Hashable, like: torch.Tensor) -> torch.Tensor:
        """Returns a contiguous tensor with the shape and dtype of `like`, the same for a key each time."""
        found = self._places.get(key)
        if found is None or found.dtype != like.dtype or found.shape != like.shape:
            found = self._places[key] = self._take(like.numel() * like.element_size(), like.is_cuda).view(like.dtype).view(like.shape)
        return found

    def _take(self, size: int, pinned: bool) -> torch.Tensor:
        if size >= _SLAB_BYTES:
            return torch.empty(size, dtype=torch.uint8, device='cpu', pin_memory=pinned)
        if self._slab is None or self._used + size > _SLAB_BYTES:
            self._slab, self._used = torch.empty(_SLAB_BYTES, dtype=torch.uint8, device='cpu', pin_memory=pinned), 0
        taken = self._slab[self._used:self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        for tensor in (to, source):
            if tensor.is_cuda:
                self._streams.add(torch.cuda.current_stream(tensor.device))
        to.copy_(source, non_blocking=True)

    def enqueued(self) -> list[torch.cuda.Event]:
        """Returns events behind all copies so far. Once they are over, the host's side may be used."""
        return [stream.record_event() for stream in list(self._streams)]


def current_streams(tensors: Iterable[torch.Tensor]) -> list[torch.cuda.Stream]:
    """Returns the current streams of the devices that tensors are on."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device) for device in devices]


def on_streams(streams: Iterable[torch.cuda.Stream]) -> contextlib.ExitStack:
    """Returns a context that enqueues copies on `streams`, on any thread."""
    stack = contextlib.ExitStack()
    for stream in streams:
        stack.enter_context(torch.cuda.stream(stream))
    return stack
