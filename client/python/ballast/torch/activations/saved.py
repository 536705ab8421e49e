"""A tensor that autograd saved, as the stash keeps it: whether it stays in place, which bytes go, and the tensor that comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ballast.torch.activations.movement import DeviceBytes, Fetched, HostBytes

# Libraries of linear algebra choose a kernel by the alignment of an operand, so a tensor comes back with the same offset within this.
_ALIGNMENT = 64
# A tensor with gaps takes its whole storage along if that is at most this many times its own bytes. Its neighbours share the storage.
_WHOLE_MAX = 4


class InPlace:
    """A tensor that stays where it is. torch leaves it to the hooks to check versions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # A reference without a graph, since an output that holds its own graph would never be freed.
        self._tensor, self._version = tensor.detach(), tensor._version

    def restore(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: '
                f'[{self._tensor.type()} {list(self._tensor.shape)}] is at version {self._tensor._version}; expected version '
                f'{self._version} instead.')
        return self._tensor


class Layout(NamedTuple):
    """Which bytes of a tensor's storage go, and how the tensor lies over them."""
    key: Hashable  # equal for tensors that share them
    begin: int  # bytes, as the others
    size: int
    is_packed: bool  # without the tensor's gaps
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # of the tensor's first byte, from `begin`


def layout_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Layout:
    width = tensor.element_size()
    first = int(tensor.storage_offset()) * width
    own = tensor.numel() * width
    extent = (1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride()))) * width
    place = storage._cdata, tensor._version
    geometry = tensor.dtype, tensor.shape, tensor.stride()
    if extent <= own:
        return Layout((*place, first, extent), first, extent, False, *geometry, 0)
    if storage.nbytes() <= _WHOLE_MAX * own:
        return Layout((*place, 0, storage.nbytes()), 0, storage.nbytes(), False, *geometry, first)
    return Layout((*place, first, *geometry), first, own, True, *geometry, 0)


class Lot:
    """Bytes of a storage that are put aside once for all tensors that are saved over them. Threads: any."""

    def __init__(self, tensor: torch.Tensor, layout: Layout, move: Callable[[torch.Tensor], HostBytes | DeviceBytes]) -> None:
        """Puts the bytes of `tensor` aside. Errors: those of `move`."""
        storage = tensor.untyped_storage()
        self._storage = StorageWeakRef(storage)  # while it is there no other storage has this one's key
        # The tensor's counter of versions, without its memory.
        self._counter, self._version = tensor.detach(), tensor._version
        self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.size = layout.size
        self.number: int | None = None  # in the order of saving, among a device's lots
        self._shift = (tensor.data_ptr() - layout.offset) % _ALIGNMENT
        self._bytes = move(_bytes_to_go(tensor, storage, layout))
        self._lock = threading.Lock()
        self._users = 0  # tensors saved over the bytes
        self._left = 0  # of them, those that have not come back since the bytes were fetched
        self._fetched: Fetched | None = None

    @property
    def is_current(self) -> bool:
        """No operation has changed the storage since. A write by way of `.data` has a counter of its own, and is not seen."""
        return self._counter._version == self._version

    def add_user(self) -> None:
        with self._lock:
            self._users += 1

    def fetch_ahead(self) -> None:
        """Begins to bring the bytes back, if it need not wait."""
        if not self._bytes.comes_without_waiting or not self._lock.acquire(blocking=False):
            return
        try:
            self._fetch()
        finally:
            self._lock.release()

    def _fetch(self) -> Fetched:
        if self._fetched is None:
            self._fetched, self._left = self._bytes.fetch(self._shift), self._users
        return self._fetched

    def take(self) -> tuple[torch.UntypedStorage, int]:
        """Returns memory with the bytes, and where they begin. All tensors over the lot share the memory until each has taken it once."""
        with self._lock:
            buffer, arrival = self._fetch()
            self._left -= 1
            if self._left <= 0:
                self._fetched = None
        if arrival is not None:
            current = torch.cuda.current_stream(buffer.device)
            current.wait_event(arrival)
            buffer.record_stream(current)
        return buffer.untyped_storage(), self._shift


def _bytes_to_go(tensor: torch.Tensor, storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    """Returns a vector of uint8: the storage's own memory, or a copy without gaps."""
    if layout.is_packed:
        return tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, layout.begin, (layout.size,), (1,))


class Moved:
    """A tensor whose bytes went with a lot."""

    def __init__(self, lot: Lot, layout: Layout, came_back: Callable[[Lot], None]) -> None:
        self._lot, self._layout, self._came_back = lot, layout, came_back
        lot.add_user()

    def restore(self) -> torch.Tensor:
        layout = self._layout
        storage, begin = self._lot.take()
        self._came_back(self._lot)
        tensor = torch.empty(0, dtype=layout.dtype, device=storage.device)
        first = (begin + layout.offset) // tensor.element_size()
        if not layout.is_packed:
            return tensor.set_(storage, first, layout.shape, layout.stride)
        tensor.set_(storage, first, layout.shape, _dense(layout.shape))
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=storage.device).copy_(tensor)


def _dense(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


class Wrapped:
    """A tensor made of others, such as a DTensor of its local part (torch's __tensor_flatten__)."""

    def __init__(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> None:
        names, self._context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}  # torch >= 2.13 has others beside tensors, such as a mesh
        self._parts = {name: part for name, part in parts.items() if not isinstance(part, torch.Tensor)}
        self._inner = {name: pack(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
        self._type, self._shape, self._stride = type(tensor), tensor.size(), tensor.stride()

    def restore(self) -> torch.Tensor:
        inner = {name: saved.restore() for name, saved in self._inner.items()}
        made: torch.Tensor = self._type.__tensor_unflatten__({**self._parts, **inner}, self._context, self._shape, self._stride)
        return made
