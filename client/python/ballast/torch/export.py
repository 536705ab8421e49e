"""State as safetensors files that carry digests: out of a job, and into one.

A folder has shards, state-00001.safetensors and so on, and state.safetensors.index.json, which lists what belongs to the export. The index
is written last: without it there is no export. A tensor has the name of its parameter and of what it is, such as
'h.0.attn.weight.exp_avg'. All are fp32.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ballast.errors import Error
from ballast.torch.modes import plainly
from ballast.torch.ranks.together import together
from ballast.torch.states import checkpoint
from ballast.torch.weights.shards import sync

if TYPE_CHECKING:
    from ballast.torch.job.job import Job
    from ballast.torch.optimizer import Optimizer

INDEX = 'state.safetensors.index.json'
_FORMAT = 'ballast-state-1'
_SHARD_BYTES = 1 << 30
_QUIET_SECONDS = 2.0


class Progress:
    """Prints a line on stderr every few seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._said = what, total, 0, time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said > _QUIET_SECONDS:
            self._said = now
            print(f'ballast: {self._what}: {self._done >> 20} of {self._total >> 20} MiB', file=sys.stderr)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().data.cast('B') if tensor.numel() else b'').hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise Error('safetensors is not installed: pip install safetensors numpy', 'UNSUPPORTED') from error
    return safetensors


def _plain(value: Any) -> Any:
    """Returns a hyper-parameter as JSON can hold it."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value


class _Shards:
    """Files of about 1 GiB, written as they fill."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._save = _safetensors().torch.save_file
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._bytes = self._count = 0
        self.files: dict[str, str] = {}  # by tensor
        self.digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor
        self.digests[name] = _digest(tensor)
        self._bytes += 4 * tensor.numel()
        if self._bytes >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        self._count += 1
        name = f'state-{self._count:05}.safetensors'
        path = os.path.join(self._folder, name)
        self._save(self._held, path)
        sync(path)
        self.files.update({tensor: name for tensor in self._held})
        self._held, self._bytes = {}, 0


@plainly
def export_state(optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Writes moments, step counts, masters and param_groups of `optimizer` into a folder that is empty or new.

    One rank calls it, while no rank makes a step. All ranks must have the same parameters. One file of about 1 GiB is in memory at a
    time."""
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise Error(f"'{folder}' is not empty; give the export a folder that is new or empty", 'BAD_CONFIG')
    job = optimizer.job
    if not job.open(alone=True).roster.is_alike:
        raise Error('export_state() writes the parameters of the calling rank, but the ranks of this job have different ones. Continue '
                    "the job on one rank that has all of them (resume='must'), and export there", 'UNSUPPORTED')
    shards, steps = _Shards(folder), {}
    named = [(job.parameters.name_of(g, i, parameter), parameter) for g, i, parameter in job.parameters.placed()]
    # Masters and two moments, mostly.
    progress = Progress('exporting state', sum(12 * parameter.numel() for _, parameter in named))
    for name, parameter in named:
        entry = job.read_state(parameter, whole=True)
        steps[name] = int(entry.pop('step', 0))
        if steps[name] == 0:
            continue
        if 'master' not in entry:
            entry['master'] = job.read_master(parameter)
        for key, tensor in entry.items():
            shards.add(f'{name}.{key}', tensor)
            progress.add(4 * tensor.numel())
    shards.flush()
    groups = [{key: _plain(value) for key, value in checkpoint.options(group).items()} for group in optimizer.param_groups]
    names = iter([name for name, _ in named])
    for group, of in zip(groups, optimizer.param_groups):
        group['params'] = [next(names) for _ in of['params']]
    index = {'metadata': {'format': _FORMAT, 'optimizer': job.algorithm.name, 'param_groups': groups, 'steps': steps},
             'weight_map': shards.files, 'sha256': shards.digests}
    temporary = os.path.join(folder, INDEX + '.tmp')
    with open(temporary, 'w', encoding='utf-8') as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(folder, INDEX))
    sync(folder)


def _read_index(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    path = os.path.join(folder, INDEX)
    try:
        with open(path, encoding='utf-8') as file:
            index = json.load(file)
        metadata = index['metadata']
        if metadata['format'] != _FORMAT:
            raise Error(f"'{path}' is of format {metadata['format']!r}; expected {_FORMAT!r}", 'BAD_CONFIG')
        return metadata, index['weight_map'], index['sha256']
    except FileNotFoundError as error:
        raise Error(f"'{path}' does not exist: the folder has no export, or the export did not end", 'BAD_CONFIG') from error
    except (ValueError, KeyError, TypeError) as error:
        raise Error(f"'{path}' cannot be read: {error!r}", 'BAD_CONFIG') from error


def _read_tensors(folder: str | os.PathLike[str], files: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Returns tensors by name, after it has compared each with its digest."""
    safe_open = _safetensors().safe_open
    tensors: dict[str, torch.Tensor] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        if os.path.basename(file) != file:
            raise Error(f"the index names '{file}', which is not in the folder itself", 'BAD_CONFIG')
        by_file.setdefault(file, []).append(name)
    total = sum(os.path.getsize(os.path.join(folder, file)) for file in by_file if os.path.exists(os.path.join(folder, file)))
    progress = Progress('importing state', total)
    for file, names in sorted(by_file.items()):
        try:
            with safe_open(os.path.join(folder, file), framework='pt') as shard:
                for name in names:
                    tensors[name] = shard.get_tensor(name)
                    progress.add(4 * tensors[name].numel())
        except Exception as error:  # safetensors has its own, and OSError
            raise Error(f"'{os.path.join(folder, file)}' cannot be read: {error}; take another copy of the export",
                        'CHECKSUM') from error
        for name in names:
            if tensors[name].dtype != torch.float32 or _digest(tensors[name]) != digests.get(name):
                raise Error(f"tensor '{name}' in '{os.path.join(folder, file)}' is not what was exported (SHA-256); take another "
                            'copy of the export', 'CHECKSUM')
    return tensors


@plainly
def import_state(optimizer: Optimizer, folder: str | os.PathLike[str]) -> None:
    """Loads an export of export_state() into `optimizer`, as load_state_dict() does. All ranks call it.

    It first reads all of the export into memory and compares each tensor with its digest; only then does it change anything."""
    job = optimizer.job
    optimizer.load_state_dict(together(job.exchange('import_state()'), lambda: _read(job, folder)))


def _read(job: Job, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns a state that has names instead of numbers."""
    metadata, files, digests = _read_index(folder)
    if metadata['optimizer'] != job.algorithm.name:
        raise Error(f"the export is of {metadata['optimizer']}, but this optimizer is {job.algorithm.name}; load it into one of the "
                    "export's kind", 'BAD_SPEC')
    tensors = _read_tensors(folder, files, digests)
    mine = [job.parameters.name_of(g, i, parameter) for g, i, parameter in job.parameters.placed()]
    exported = [name for group in metadata['param_groups'] for name in group['params']]
    if sorted(mine) != sorted(exported):
        apart = sorted(set(mine) ^ set(exported))
        raise Error(f"the export has other parameters than this optimizer: only one of them has '{apart[0] if apart else mine[0]}'",
                    'BAD_SPEC')
    entries = {name: {'step': torch.tensor(float(steps), dtype=torch.float32, device='cpu')}
               for name, steps in metadata['steps'].items() if steps > 0}
    for tensor, value in tensors.items():
        name, _, key = tensor.rpartition('.')
        entries[name][key] = value
    return {'state': entries, 'param_groups': metadata['param_groups']}
