"""A checkpoint of weights: one file of safetensors, or several with an index, as save_pretrained() writes them."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ballast.errors import Error
from ballast.torch.weights.shards import Entry, File

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_SUFFIX, _INDEX_SUFFIX = '.safetensors', '.safetensors.index.json'


class Weights(NamedTuple):
    """What shard(weights=) reads, if names need help.

    path: a folder, an index, or a single file of safetensors.
    rename: (pattern, replacement) pairs of re.sub(), which turn names of the checkpoint into the model's, one after another.
    ignore: patterns of re.search(), for tensors of the checkpoint that are not read.
    missing: patterns of parameters and buffers that the checkpoint lacks. They keep the values that the model has."""
    path: str | os.PathLike[str]
    rename: Sequence[tuple[str, str]] = ()
    ignore: Sequence[str] = ()
    missing: Sequence[str] = ()


def checked(weights: Any) -> Weights:
    """Returns what shard(weights=) was given. Refuses what is no path and no list of patterns."""
    given = weights if isinstance(weights, Weights) else Weights(weights)
    if not isinstance(given.path, (str, os.PathLike)):
        raise Error(f'weights={given.path!r}: expected a path, or ballast.torch.Weights(path, ...)', 'BAD_CONFIG')
    if isinstance(given.rename, str) or not all(isinstance(each, tuple) and len(each) == 2 for each in given.rename):
        raise Error(f'Weights(rename={given.rename!r}): expected a list of (pattern, replacement) pairs', 'BAD_CONFIG')
    for name, patterns in (('rename', [pattern for pattern, _ in given.rename]), ('ignore', given.ignore), ('missing', given.missing)):
        try:
            if isinstance(patterns, str):
                raise TypeError('expected a list of patterns')
            for pattern in patterns:
                re.compile(pattern)
        except (TypeError, re.error) as error:
            raise Error(f'Weights({name}={patterns!r}): {error}', 'BAD_CONFIG') from error
    return given


class Checkpoint:
    """All headers of a checkpoint, checked. Its tensors by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Errors: BAD_CONFIG if there is no checkpoint; CHECKSUM if a file is damaged, lacks tensors or is cut off."""
        self.path = os.fspath(path)
        self.index, files = _found(self.path)
        folder = os.path.dirname(self.index or files[0])
        listed = {} if self.index is None else _read_index(self.index)
        self.files = [File(each) for each in files or sorted({os.path.join(folder, name) for name in listed.values()})]
        self.entries: dict[str, Entry] = {}
        self._take_entries()
        self._check_index(listed)

    def _take_entries(self) -> None:
        for file in self.files:
            for name, entry in file.entries.items():
                if name in self.entries:
                    raise Error(f"'{self.entries[name].file.path}' and '{file.path}' both have tensor '{name}'; expected one of them",
                                'BAD_SPEC')
                self.entries[name] = entry

    def _check_index(self, listed: Mapping[str, str]) -> None:
        for name, file_name in listed.items():
            there = self.entries.get(name)
            if there is None or os.path.basename(there.file.path) != file_name:
                raise Error(f"'{self.index}' has tensor '{name}' in '{file_name}', which does not have it. Take another copy of the "
                            'checkpoint', 'CHECKSUM')

    @property
    def digest(self) -> int:
        """Tells checkpoints with other tensors or files apart."""
        digest = 0
        for file in self.files:
            digest = zlib.crc32(file.header, digest)
        return digest

    @property
    def identity(self) -> int:
        """As digest, but copies that differ in values alone have others, too: by samples, so that nobody reads everything twice."""
        return zlib.crc32(repr([file.samples() for file in self.files]).encode())


def _found(path: str) -> tuple[str | None, list[str]]:
    """Returns the index, or else the single file."""
    if os.path.isdir(path):
        path = _within(path)
    elif not path.endswith(_SUFFIX) and not path.endswith(_INDEX_SUFFIX):
        what = 'this is another file' if os.path.exists(path) else 'there is no such path'
        raise Error(f"weights='{path}': expected a folder, a file of safetensors, or an index '*{_INDEX_SUFFIX}'; {what}", 'BAD_CONFIG')
    return (path, []) if path.endswith(_INDEX_SUFFIX) else (None, [path])


def _within(folder: str) -> str:
    """Returns the index that the folder has, or else its file."""
    there = sorted(os.listdir(folder))
    if SINGLE in there:  # as transformers has it, whatever index is beside it
        return os.path.join(folder, SINGLE)
    for suffix, first in ((_INDEX_SUFFIX, INDEX), (_SUFFIX, SINGLE)):
        fitting = [first] if first in there else [name for name in there if name.endswith(suffix)]
        if len(fitting) == 1:
            return os.path.join(folder, fitting[0])
        if fitting:
            raise Error(f"weights='{folder}': the folder has {', '.join(fitting[:3])} and no '{first}'; give the path of the index or of "
                        'the one file', 'BAD_CONFIG')
    other = next((f", but '{name}'; load that into a model once, and save it by save_pretrained()" for name in there
                  if name.endswith(('.bin', '.pt', '.pth', '.ckpt'))), '')
    raise Error(f"weights='{folder}': the folder has no *{_SUFFIX}{other}", 'BAD_CONFIG')


def _read_index(path: str) -> dict[str, str]:
    try:
        with open(path, encoding='utf-8') as file:
            listed: Any = json.load(file)['weight_map']
        if not listed or not all(isinstance(each, str) and os.path.basename(each) == each for each in listed.values()):
            raise ValueError("'weight_map' does not name files of the folder")
        return dict(listed)
    except OSError as error:
        raise Error(f"'{path}' cannot be read: {error.strerror or error}", 'BAD_CONFIG') from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Error(f"'{path}' is damaged: {error!r}. Take another copy of the checkpoint", 'CHECKSUM') from error
