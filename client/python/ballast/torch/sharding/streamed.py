"""Brings a checkpoint of weights to the servers, tensor by tensor: which tensor is whose value, and this rank's part of it."""

from __future__ import annotations

import collections
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ballast import _native
from ballast.errors import Error
from ballast.torch.job.naming import unwrapped
from ballast.torch.job.progress import origin_of
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.remote import Part
from ballast.torch.weights import buffers, names, tensors
from ballast.torch.weights.checkpoint import Checkpoint, checked
from ballast.torch.weights.shards import Box, Entry
from ballast.torch.weights.tensors import Whole

# Of a value, to tell checkpoints apart that differ only in values.
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class Place(NamedTuple):
    """Where a parameter's value is."""
    entry: Entry
    at: tuple[int, ...]

    def read(self, box: Box) -> torch.Tensor:
        return self.entry.read([(first + begin, first + end) for first, (begin, end) in zip(self.at, box)])


class Streamed:
    """A checkpoint, as far as it is a model's. Threads: the training loop's."""

    def __init__(self, model: nn.Module, weights: Any) -> None:
        """Reads all headers, and checks that the checkpoint fits. Changes nothing. weights: of shard().

        Errors: BAD_CONFIG without a checkpoint, CHECKSUM for a damaged one, BAD_SPEC for names, shapes or dtypes that do not fit."""
        given = checked(weights)
        self.checkpoint = Checkpoint(given.path)
        self.origin = origin_of(self.checkpoint.identity)
        self.bytes = 0  # read of it by this rank so far
        wanted = {whole.name: whole for whole in tensors.wholes(model)}
        own = {tensor: unwrapped(name) for name, tensor in (*model.named_buffers(), *model.named_parameters())}
        found = names.translated(model, self.checkpoint.entries.keys(), wanted.keys(), given.rename)
        for key in [key for key, name in found.of.items() if _is_among(given.ignore, key, name)]:
            del found.of[key]
        self.names = {name: key for key, name in found.of.items() if name in wanted}  # the checkpoint's, by the model's
        self._check_names(model, found)
        self._places: dict[str, list[Place]] = {}  # by the first name that the model has for the tensor
        for name, key in self.names.items():
            entry = self.checkpoint.entries[key]
            _check(wanted[name], entry)
            for tensor, at in wanted[name].placed():
                self._places.setdefault(own[tensor], []).append(Place(entry, at))
        firsts: dict[str, tuple[str, torch.Tensor]] = {}
        for whole in wanted.values():
            for tensor, _ in whole.placed():
                firsts.setdefault(own[tensor], (whole.name, tensor))
        self._check_missing(firsts, given.missing)
        self.buffers = self._read_buffers(model, own)

    def _check_names(self, model: nn.Module, found: names.Names) -> None:
        twice = next((name for name, count in collections.Counter(found.of.values()).items() if count > 1 and name in self.names), None)
        converted = next((key for key in found.converted if found.of.get(key) in self.names), None)
        if converted is not None:
            raise names.refuse_converted(self.checkpoint.path, converted, found.of[converted])
        if twice is not None:
            both = [key for key, name in found.of.items() if name == twice]
            raise Error(f"'{self.checkpoint.path}' has tensors '{both[0]}' and '{both[1]}', and both are '{twice}' of the model; leave one "
                        'out by ballast.torch.Weights(path, ignore=[...])', 'BAD_SPEC')
        more = [key for key, name in found.of.items() if name not in self.names and not _is_among(names.ignored(model), key, name)]
        if more:
            raise Error(f"'{self.checkpoint.path}' has tensor '{more[0]}', for which the model has no place ({len(more)} such). Is this "
                        f"the model's checkpoint? To leave them out: weights=ballast.torch.Weights(path, ignore=[{more[0]!r}]); to give "
                        'them the names of the model: rename=[(pattern, replacement)]', 'BAD_SPEC')

    def _check_missing(self, wanted: Mapping[str, tuple[str, torch.Tensor]], patterns: Sequence[str]) -> None:
        """wanted: by the model's own name, the name that a checkpoint has for it, and the tensor. patterns: of Weights."""
        lacking = [each for own, each in wanted.items() if own not in self._places]
        allowed = [_is_among(patterns, name) for name, _ in lacking]
        bare = [name for (name, tensor), may in zip(lacking, allowed) if may and tensor.is_meta]
        if bare:
            raise Error(f"'{bare[0]}' is among Weights(missing=) and on the meta device, so nothing has values for it; give it values "
                        "before shard(), as module.to_empty(device='cpu') and module.reset_parameters() do", 'BAD_SPEC')
        missing = [name for (name, _), may in zip(lacking, allowed) if not may]
        if missing:
            raise Error(f"'{self.checkpoint.path}' has no tensor for '{missing[0]}' of the model ({len(missing)} such). Is this the "
                        "model's checkpoint? If they have values of their own, as a new head does: weights=ballast.torch.Weights(path, "
                        f'missing=[{missing[0]!r}])', 'BAD_SPEC')

    # --- parameters

    def has(self, part: Part) -> bool:
        return part.name in self._places

    def places(self, part: Part) -> list[Place]:
        """Returns where the part's parameter is, once for each of its names that the checkpoint has."""
        return self._places[part.name]

    def read(self, part: Part) -> torch.Tensor:
        """Returns this rank's part of a value, in the checkpoint's dtype. Servers refuse what is not finite, by the tensor's name."""
        first, *others = self.places(part)
        values = first.read(part.box)
        self.bytes += values.nbytes
        for other in others:
            again = other.read(part.box)
            self.bytes += again.nbytes
            if again.dtype != values.dtype or not torch.equal(again, values):
                raise Error(f"parameter '{part.name}' is tied in the model, but {first.entry.where} and {other.entry.where} have different "
                            'values. Make the model without the tie (tie_word_embeddings=False), or leave one out by '
                            'ballast.torch.Weights(path, ignore=[...])', 'BAD_SPEC')
        return values

    def digest(self, part: Part) -> int:
        """Tells whether ranks with the same part read the same value: by all headers and a sample, so that nobody reads it twice."""
        place, digest = self.places(part)[0], self.checkpoint.digest
        for box in _samples(part.box, place.entry):
            values = place.read(box).reshape(-1).view(torch.uint8)
            if len(values) > 0:
                digest = zlib.crc32(_native.crc32c(values).to_bytes(4, 'little'), digest)
        return digest

    # --- buffers

    def _read_buffers(self, model: nn.Module, own: Mapping[torch.Tensor, str]) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Returns owner, name in it and values of the buffers that the checkpoint has."""
        found, there = [], buffers.persistent(model)
        for path, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                name = f'{path}.{leaf}' if path else leaf
                if buffer is not None and name in there and own[buffer] in self._places:
                    values = self._places[own[buffer]][0].entry.read().to(buffer.dtype, copy=True)
                    self.bytes += values.nbytes
                    found.append((module, leaf, values))
        return found


def _samples(box: Box, entry: Entry) -> Iterator[Box]:
    """Yields boxes of some rows each, as _SAMPLES says."""
    if not box:
        yield box
        return
    first, last = box[0]
    count = max(1, _SAMPLE_BYTES // max(1, (entry.end - entry.begin) // max(1, entry.shape[0])))
    for begin in range(first, last, max(count, (last - first) // _SAMPLES)):
        yield [(begin, min(begin + count, last)), *box[1:]]


def _is_among(patterns: Iterable[str], *names: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _check(wanted: Whole, entry: Entry) -> None:
    if entry.shape != wanted.shape:
        raise Error(f"{entry.where} has shape {list(entry.shape)}, and '{wanted.name}' of the model has {list(wanted.shape)}; expected the "
                    'same', 'BAD_SPEC')
    dtype = wanted.first.dtype
    expected = list(DTYPES) if dtype.is_floating_point else [dtype]
    if entry.dtype not in expected:
        raise Error(f"{entry.where} is {entry.kind}, and '{wanted.name}' of the model is {dtype}; expected "
                    f"{', '.join(str(each).removeprefix('torch.') for each in expected)}. Quantized and double weights: load them by "
                    'from_pretrained(), and save them in 16 or 32 bits', 'BAD_DTYPE')
