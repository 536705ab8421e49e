"""Memory of the host for tensors that lie on a GPU: servers read gradients from it, and write parameters to it."""

import contextlib

import torch

# torch's allocator of pinned memory rounds up to a power of two: small tensors share one.
_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64


def is_elsewhere(tensor):
    """Its memory is not the host's."""
    return tensor.device.type != 'cpu'


class HostMemory:
    """A place for each parameter and each gradient, pinned, kept from step to step. Copies are enqueued on the current stream of
    whoever asks: what the loop enqueued before them, and enqueues behind them, sees them in that order."""

    def __init__(self):
        self._places = {}
        self._slab, self._used = None, 0
        self._streams = set()

    def place(self, key, like):
        """A contiguous tensor with the shape and dtype of `like`, for a key the same each time."""
        found = self._places.get(key)
        if found is None or found.dtype != like.dtype or found.shape != like.shape:
            found = self._places[key] = self._take(like.numel() * like.element_size(), like.is_cuda).view(like.dtype).view(like.shape)
        return found

    def _take(self, size, pinned):
        if size >= _SLAB_BYTES:
            return torch.empty(size, dtype=torch.uint8, device='cpu', pin_memory=pinned)
        if self._slab is None or self._used + size > _SLAB_BYTES:
            self._slab, self._used = torch.empty(_SLAB_BYTES, dtype=torch.uint8, device='cpu', pin_memory=pinned), 0
        taken = self._slab[self._used:self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken

    def copy(self, to, source):
        for tensor in (to, source):
            if tensor.is_cuda:
                self._streams.add(torch.cuda.current_stream(tensor.device))
        to.copy_(source, non_blocking=True)

    def enqueued(self):
        """Events behind all copies so far: who waits for them may use the host's side."""
        return [stream.record_event() for stream in list(self._streams)]


def current_streams(tensors):
    """Of the devices that they are on."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device) for device in devices]


def on_streams(streams):
    """A context in which copies are enqueued there, whatever thread it is on."""
    stack = contextlib.ExitStack()
    for stream in streams:
        stack.enter_context(torch.cuda.stream(stream))
    return stack
