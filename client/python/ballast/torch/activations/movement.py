"""Moves bytes of a tensor's memory to the stash and back. The native module divides them into parts, and orders them on disk
(client/python/native/stash)."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ballast import _native


class Fetched(NamedTuple):
    """Bytes that came back. The current stream must wait for `arrival` before it uses `buffer`. None: they are already there."""
    buffer: torch.Tensor
    arrival: torch.cuda.Event | None = None


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.split(_native.STASH_PART_BYTES))


class HostBytes:
    """Bytes of the host's memory. The caller's thread copies them."""

    def __init__(self, native: _native.Stash, flat: torch.Tensor) -> None:
        """Copies `flat`, a vector of uint8. Errors: Stash::Put's (stash.h)."""
        self._size = flat.numel()
        self._parts = [native.put(piece) for piece in _pieces(flat)]

    @property
    def comes_without_waiting(self) -> bool:
        """False: nothing fetches these bytes ahead of use, since the copy would take the same thread the same time."""
        return False

    def fetch(self, shift: int) -> Fetched:
        """Returns a new vector of uint8 that has the bytes from `shift` on. Errors: StashedPart::Take's."""
        buffer = torch.empty(shift + self._size, dtype=torch.uint8, device='cpu')
        for part, piece in zip(self._parts, _pieces(buffer[shift:])):
            part.take(piece)
        return Fetched(buffer)


class DeviceCopies:
    """Copies between devices and page-locked memory, on a separate stream for each device. Threads: any."""

    def __init__(self, native: _native.Stash) -> None:
        self.native = native
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Ends copies in their order. Whoever waits for staging memory waits for this thread, which waits only for devices.
        self._behind = concurrent.futures.ThreadPoolExecutor(1, 'ballast-stash')

    @contextlib.contextmanager
    def on_side_stream(self, tensor: torch.Tensor) -> Iterator[None]:
        """Runs copies of the block beside the current stream, after what that stream has been given so far. They may use the tensor's
        memory."""
        if tensor.device.type != 'cuda':
            yield
            return
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        side = self._streams[tensor.device]
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            yield
        tensor.record_stream(side)

    def end(self, copied: torch.cuda.Event | None, call: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Runs `call` once the device has passed `copied`."""
        return self._behind.submit(_call_behind, copied, call)


def _call_behind(copied: torch.cuda.Event | None, call: Callable[[], None]) -> None:
    if copied is not None:
        copied.synchronize()
    call()


def _event_now(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event behind what the current stream has been given so far."""
    if device.type != 'cuda':
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))
    return event


class DeviceBytes:
    """Bytes of a device's memory. The caller's thread enqueues copies, and waits only for the disk."""

    def __init__(self, copies: DeviceCopies, flat: torch.Tensor) -> None:
        """As HostBytes. The caller may free the memory of `flat` at once."""
        self._copies, self._device, self._size = copies, flat.device, flat.numel()
        self._parts: list[tuple[_native.StashedPart, concurrent.futures.Future[None]]] = []
        with copies.on_side_stream(flat):
            for piece in _pieces(flat):
                part = copies.native.begin(piece.numel())
                part.memory().copy_(piece, non_blocking=True)
                self._parts.append((part, copies.end(_event_now(self._device), part.finish)))

    @property
    def comes_without_waiting(self) -> bool:
        """fetch() would not wait for the disk."""
        return all(ended.done() and part.ready for part, ended in self._parts)

    def fetch(self, shift: int) -> Fetched:
        """As HostBytes."""
        buffer = torch.empty(shift + self._size, dtype=torch.uint8, device=self._device)
        with self._copies.on_side_stream(buffer):
            for (part, ended), piece in zip(self._parts, _pieces(buffer[shift:])):
                ended.result()
                piece.copy_(part.hold(), non_blocking=True)
                self._copies.end(_event_now(self._device), part.release)
            return Fetched(buffer, _event_now(self._device))
