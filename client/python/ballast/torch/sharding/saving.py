"""Writes a model of shard() as save_pretrained() would, one tensor after another."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.modes import plainly
from ballast.torch.sharding.sharded import Sharded, models_of
from ballast.torch.sharding.streamed import Streamed
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.remote import Part, part_of
from ballast.torch.weights import tensors
from ballast.torch.weights.checkpoint import INDEX, SINGLE
from ballast.torch.weights.shards import Entry, Planned, Writing, sync
from ballast.torch.weights.tensors import Whole

_SHARD_BYTES = 5_000_000_000  # of save_pretrained()


class _Item(NamedTuple):
    """A tensor to write."""
    planned: Planned
    rows: list[list[torch.Tensor]]  # as Whole has them
    file: str  # of the checkpoint that it came from, or ''


@plainly
def save_weights(model: nn.Module, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None,
                 shard_bytes: int | None = None) -> None:
    """Writes parameters and persistent buffers of a model of shard() into `folder`, as files of safetensors with an index, and its config
    if it has one of transformers. from_pretrained() and shard(weights=) read it.

    One rank calls it, while no rank makes a step: let the others wait in a barrier, since a gather waits for step_timeout at most. That of
    a job that is not open yet is for all ranks. The host needs memory for one
    parameter, and for pulls ahead (shard(prefetch_bytes=)). A folder gets its index once all files are on disk.

    dtype: of parameters. None: that of shard(weights=), or else the parameter's own. Masters are rounded to it.
    shard_bytes: of a file, at most. None: tensors lie as in shard(weights=), or else 5 GB a file.

    Names are those of shard(weights=), or else the model's own. If nothing was trained, each tensor has the bits of shard(weights=), but
    for frozen ones, which servers keep in the working dtype or in 8 bits (shard(frozen=)).
    Errors: BAD_CONFIG if the folder has such files already; UNSUPPORTED if other ranks have other parameters."""
    if shard_bytes is not None and (not isinstance(shard_bytes, int) or shard_bytes < 1):
        raise Error(f'save_weights(shard_bytes={shard_bytes!r}): expected an integer of at least 1', 'BAD_CONFIG')
    if dtype is not None and dtype not in DTYPES:
        raise Error(f'save_weights(dtype={dtype}): expected float32, bfloat16 or float16', 'BAD_CONFIG')
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    if hasattr(model, 'peft_config'):
        raise Error("save_weights(): the model has adapters of peft, which from_pretrained() reads from files of their own. Save them by "
                    'model.save_pretrained(folder), within ballast.torch.gathered(model) on all ranks', 'UNSUPPORTED')
    # A .tmp is of a save that was killed.
    there = next((name for name in os.listdir(folder) if '.safetensors' in name and not name.endswith('.tmp')), None)
    if there is not None:
        raise Error(f"save_weights(): '{folder}' has '{there}' already; give it a folder without weights", 'BAD_CONFIG')
    owners = _owners(model)
    streamed = next((sharded.values.streamed for sharded in models_of(model) if sharded.passes.model is model), None)
    files = _divided(_items(model, streamed, dtype), shard_bytes)
    _write_config(model, folder, dtype)
    _write(folder, files, owners)


def _owners(model: nn.Module) -> dict[Part, Sharded]:
    owners = {}
    for sharded in models_of(model):
        sharded.passes.settle()
        sharded.passes.prepare()
        if not sharded.open_job().roster.is_alike:
            raise Error('save_weights() writes the parameters of the calling rank, but the ranks of this job have different ones, as '
                        "stages of a pipeline do. Continue the job on one rank that has all of them (resume='must'), and save there",
                        'UNSUPPORTED')
        owners.update(dict.fromkeys(sharded.parameters, sharded))
    if not owners:
        raise Error('save_weights(model): no parameter of this model lives on the servers. Call shard() first; a model that is here whole '
                    'has save_pretrained(), or torch.save(model.state_dict())', 'BAD_REQUEST')
    return owners


def _items(model: nn.Module, streamed: Streamed | None, dtype: torch.dtype | None) -> list[_Item]:
    """Returns tensors in the order of the checkpoint of shard(weights=), under the names that it has; then all others, once each."""
    read: list[tuple[Entry, Whole]] = []
    others: dict[torch.Tensor, Whole] = {}
    for whole in tensors.wholes(model):
        key = None if streamed is None else streamed.names.get(whole.name)
        if streamed is not None and key is not None:
            read.append((streamed.checkpoint.entries[key], whole))
        else:
            others.setdefault(whole.first, whole)
    found = []
    for entry, whole in sorted(read, key=lambda each: (each[0].file.path, each[0].begin)):
        others.pop(whole.first, None)
        found.append(_Item(_planned(entry.name, entry.dtype, whole, dtype), whole.rows, entry.file.path))
    return found + [_Item(_planned(whole.name, None, whole, dtype), whole.rows, '') for whole in others.values()]


def _planned(name: str, own: torch.dtype | None, whole: Whole, dtype: torch.dtype | None) -> Planned:
    """own: of the checkpoint. dtype: of save_weights()."""
    return Planned(name, (dtype if whole.is_parameter else None) or own or whole.first.dtype, whole.shape)


def _divided(items: Sequence[_Item], shard_bytes: int | None) -> list[list[_Item]]:
    """Returns items by file."""
    files: list[list[_Item]] = []
    size, bound = 0, shard_bytes or _SHARD_BYTES
    for item in items:
        is_apart = bool(item.file) and shard_bytes is None  # it lies with those of its file, whatever their size
        if not files or (item.file != files[-1][0].file if is_apart else size + item.planned.bytes > bound):
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.planned.bytes
    return files


# --- writing

def _write(folder: str, files: Sequence[Sequence[_Item]], owners: Mapping[Part, Sharded]) -> None:
    names = [SINGLE] if len(files) == 1 else [f'model-{i + 1:05}-of-{len(files):05}.safetensors' for i in range(len(files))]
    done: list[str] = []
    try:
        for name, items in zip(names, files):
            done.append(os.path.join(folder, name))
            _write_file(done[-1], items, owners)
        if len(files) > 1:
            done.append(os.path.join(folder, INDEX))
            _write_index(folder, dict(zip(names, files)))
        sync(folder)
    except BaseException:
        for path in done:
            for each in (path, path + '.tmp'):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(each)
        raise


def _write_file(path: str, items: Sequence[_Item], owners: Mapping[Part, Sharded]) -> None:
    writing = Writing(path, [item.planned for item in items])
    try:
        values = _values([(tensor, item.planned.dtype) for item in items for row in item.rows for tensor in row], owners)
        for item in items:
            writing.add(_row([next(values) for _ in row]) for row in item.rows)
        writing.end()
    except BaseException:
        writing.drop()
        raise


def _row(tiles: Sequence[torch.Tensor]) -> torch.Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(list(tiles), 1)


def _values(wanted: Sequence[tuple[torch.Tensor, torch.dtype]], owners: Mapping[Part, Sharded]) -> Iterator[torch.Tensor]:
    """Yields whole tensors, in these dtypes and this order. Those that servers keep in their dtype come by pulls, several of which are
    under way at a time. Of the others the masters are read one by one and rounded."""
    def way(each: tuple[torch.Tensor, torch.dtype]) -> Sharded | None:
        part = part_of(each[0])
        owner = None if part is None else owners[part]
        return owner if owner is not None and DTYPES.get(each[1]) == owner.open_job().options.optimizer.working else None
    for owner, run in itertools.groupby(wanted, way):
        if owner is not None:
            yield from (values for _, values in owner.pulls.whole([_part(tensor) for tensor, _ in run]))
        else:
            yield from (_rounded(_master(tensor, owners), dtype, tensor) for tensor, dtype in run)


def _rounded(values: torch.Tensor, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    rounded = values.to(dtype).contiguous()
    if dtype == torch.float16 and not bool(torch.isfinite(rounded).all()):
        part = part_of(tensor)
        name = 'a buffer' if part is None else part.name
        raise Error(f"save_weights(): '{name}' has values beyond float16; expected dtype=torch.bfloat16 or torch.float32", 'BAD_DTYPE')
    return rounded


def _part(tensor: torch.Tensor) -> Part:
    part = part_of(tensor)
    assert part is not None
    return part


def _master(tensor: torch.Tensor, owners: Mapping[Part, Sharded]) -> torch.Tensor:
    part = part_of(tensor)
    if part is None:
        return tensor.detach().cpu()
    owner = owners[part]
    values = owner.pulls.whole_memory.take(part.shape.numel(), torch.float32)
    owner.open_job().session.read(owner.tensors[part], 'master', values)
    return values.view(part.shape)


def _write_index(folder: str, files: Mapping[str, Sequence[_Item]]) -> None:
    planned = [(item.planned, name) for name, items in files.items() for item in items]
    index = {'metadata': {'total_size': sum(each.bytes for each, _ in planned)},
             'weight_map': {each.name: name for each, name in sorted(planned)}}
    path = os.path.join(folder, INDEX)
    with open(path + '.tmp', 'w', encoding='utf-8') as file:
        json.dump(index, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def _write_config(model: nn.Module, folder: str, dtype: torch.dtype | None) -> None:
    """Writes what from_pretrained() needs besides weights, if the model is one of transformers. dtype: of save_weights()."""
    config: Any = copy.deepcopy(getattr(model, 'config', None))
    if hasattr(config, 'save_pretrained'):
        # fully_shard has given the model a class of its own.
        config.architectures = config.architectures or [type(model).__name__.removeprefix('FSDP')]
        if dtype is not None:
            config.dtype = dtype
        config.save_pretrained(folder)
    generation: Any = getattr(model, 'generation_config', None)
    if hasattr(generation, 'save_pretrained'):
        generation.save_pretrained(folder)
