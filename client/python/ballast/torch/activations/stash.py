"""ballast.torch.stash: the face of the activation stash."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import uuid
import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ballast import _native, place
from ballast.errors import Error
from ballast.torch.activations.movement import DeviceBytes, DeviceCopies, HostBytes
from ballast.torch.activations.saved import InPlace, Lot, Moved, Wrapped, layout_of
from ballast.torch.tensors.host_memory import is_elsewhere

# Smaller tensors stay, since the fixed cost of a transfer would be most of its time.
SMALL_BYTES = 64 << 10
# DRAM for what is on its way to and from the file. Copies of a GPU run ahead of the disk by this much.
_STAGING, _STAGING_BESIDE_GPU = 32 << 20, 256 << 20
# How much device memory what comes back ahead of its use may take, and how many lots to look at for it.
_AHEAD_BYTES, _AHEAD_LOTS = 128 << 20, 16


def stash(model: nn.Module | None = None, *, dram: int | str | None = None, nvme: int | str | None = None,
          directory: str | os.PathLike[str] | None = None) -> Stash:
    """Moves what autograd saves within this context out of device memory, and brings it back in backward just before it is used:

        stash = ballast.torch.stash(model, dram='16GiB', nvme='200GiB', directory='/nvme')
        with stash:
            loss = model(x).square().mean()   # or, for the model alone: stash(x).square().mean()
        loss.backward()

    Gradients have the same bits as without it. Bytes go to page-locked DRAM until `dram` is used up. Then they go to a file in `directory`,
    which has no name and disappears with the process.

    model: its parameters and buffers stay in place. Without a model, only parameters and views of them do.
    dram: a budget in bytes, '512MiB' or '2GB'. None: with a GPU 0.8 of the free memory; without one 0, since the model itself is in DRAM.
    nvme: a budget in the same words. None: with a directory 0.8 of the free disk, else 0. Transfers take another 32 MiB of DRAM (256 MiB
        with a GPU).
    directory: None: the system's folder for temporary files.

    Tensors below 64 KiB stay in place, and so does any tensor that is not plain memory of the CPU or a GPU (sparse, quantized).
    Threads: any. Each thread that runs a forward pass enters the context itself. A forked child cannot use it (UNSUPPORTED).
    Errors: forward raises them as it puts bytes aside, and backward as it brings them back: BUDGET, DISK_FULL, IO (the disk failed),
    CHECKSUM (the disk returned other bytes). This call raises BAD_CONFIG without a budget, or with one that the machine does not have.
    """
    return Stash(model, dram, nvme, directory)


class Stash:
    """See stash(). Its memory is freed once it is closed or dropped, and no graph with tensors in it is left."""

    def __init__(self, model: nn.Module | None, dram: int | str | None, nvme: int | str | None,
                 directory: str | os.PathLike[str] | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise Error(f'model={type(model).__name__}: expected a torch.nn.Module, or None', 'BAD_CONFIG')
        self.model = model
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._place = place.for_scratch(directory, 0 if dram is None and gpu is None else dram, nvme, tempfile.gettempdir())
        if self._place.dram == self._place.nvme == 0:
            raise Error('dram and nvme are 0: expected a budget, such as dram=\'8GiB\', or nvme=\'100GiB\' and a directory', 'BAD_CONFIG')
        self._copies: DeviceCopies | None = DeviceCopies(_native.Stash(
            os.path.join(self._place.directory, f'stash-{uuid.uuid4().hex}'), self._place.dram, self._place.nvme,
            _STAGING if gpu is None else _STAGING_BESIDE_GPU, gpu))
        self._entered = threading.local()
        self._weights: frozenset[int] = frozenset()
        self._lots: weakref.WeakValueDictionary[Any, Lot] = weakref.WeakValueDictionary()
        self._device_lots: weakref.WeakValueDictionary[int, Lot] = weakref.WeakValueDictionary()  # in the order of saving
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Stash:
        self._open()
        self._weights = frozenset() if self.model is None else _storages_of(self.model)
        hooks = saved_tensors_hooks(self._pack, _restore)
        hooks.__enter__()
        self._entered.__dict__.setdefault('hooks', []).append(hooks)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.hooks.pop().__exit__(*error)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs the model's forward pass within the context."""
        if self.model is None:
            raise Error('the stash has no model to call: make it as ballast.torch.stash(model, ...)', 'BAD_REQUEST')
        with self:
            return self.model(*arguments, **keywords)

    def stats(self) -> dict[str, float]:
        """Returns counts of bytes. `dram` and `nvme`: what is there now. All others are totals. `moved`: put aside. `written`:
        to the file. `read`: from it. `shared`: saved again, but kept once. `weights` and `small`: left in place. `waited_seconds` is
        how long forward and backward waited for the disk."""
        counters = self._open().native.counters
        with self._lock:
            counts = dict(self._counts)
        return {'dram': counters.dram, 'nvme': counters.nvme, 'written': counters.written, 'read': counters.read,
                **{key: counts.get(key, 0) for key in ('moved', 'shared', 'weights', 'small')},
                'waited_seconds': counters.waited_seconds}

    def close(self) -> None:
        """No forward pass may begin after this. Backward passes that still wait may run; then the memory is freed."""
        self._copies = None

    def _open(self) -> DeviceCopies:
        copies = self._copies
        if copies is None:
            raise Error('the stash is closed: make another', 'BAD_REQUEST')
        return copies

    def _count(self, key: str, size: int) -> None:
        with self._lock:
            self._counts[key] += size

    def _pack(self, tensor: torch.Tensor) -> InPlace | Moved | Wrapped:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            self._count('weights', tensor.numel() * tensor.element_size())
            return InPlace(tensor)
        if type(tensor) is not torch.Tensor:
            return self._pack_subclass(tensor)
        if tensor.layout is not torch.strided or tensor.device.type not in ('cpu', 'cuda') or _has_flags(tensor):
            return InPlace(tensor)
        size = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if size < SMALL_BYTES or storage._cdata in self._weights or tensor.data_ptr() % tensor.element_size() != 0:
            self._count('weights' if storage._cdata in self._weights else 'small', size)
            return InPlace(tensor)
        layout = layout_of(tensor, storage)
        lot = self._lots.get(layout.key)
        if lot is not None and lot.is_current:
            self._count('shared', size)
        else:
            lot = self._lots[layout.key] = Lot(tensor, layout, self._move)
            self._count('moved', layout.size)
            if is_elsewhere(tensor):
                lot.number = next(self._numbers)
                self._device_lots[lot.number] = lot
        return Moved(lot, layout, self._came_back)

    def _pack_subclass(self, tensor: torch.Tensor) -> InPlace | Moved | Wrapped:
        if hasattr(tensor, 'trigger_wait'):  # AsyncCollectiveTensor: its bytes may be on their way
            return self._pack(tensor.trigger_wait())
        return Wrapped(tensor, self._pack) if is_traceable_wrapper_subclass(tensor) else InPlace(tensor)

    def _move(self, flat: torch.Tensor) -> HostBytes | DeviceBytes:
        copies = self._open()
        return DeviceBytes(copies, flat) if is_elsewhere(flat) else HostBytes(copies.native, flat)

    def _came_back(self, lot: Lot) -> None:
        """Fetches the lots that were saved before this one, since backward wants them next."""
        if lot.number is None:
            return
        ahead = 0
        for number in range(lot.number - 1, max(lot.number - 1 - _AHEAD_LOTS, -1), -1):
            before = self._device_lots.get(number)
            if before is None:
                continue
            ahead += before.size
            if ahead > _AHEAD_BYTES:
                return
            before.fetch_ahead()


def _restore(saved: InPlace | Moved | Wrapped) -> torch.Tensor:
    return saved.restore()


def _has_flags(tensor: torch.Tensor) -> bool:
    """The tensor's memory alone does not determine its values."""
    return tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested or tensor.data_ptr() == 0


def _storages_of(model: nn.Module) -> frozenset[int]:
    """Returns the identities of the storages of the model's parameters and buffers."""
    found, tensors = set(), [*model.parameters(), *model.buffers()]
    while tensors:
        tensor = tensors.pop()
        if is_traceable_wrapper_subclass(tensor):
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            tensors += [part for part in parts if isinstance(part, torch.Tensor)]
        elif tensor.layout is torch.strided:
            found.add(tensor.untyped_storage()._cdata)
    return frozenset(found)
