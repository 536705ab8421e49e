"""Writes a job into a universal checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ballast.errors import Error
from ballast.torch.agreement.agree import check_values
from ballast.torch.export import Progress
from ballast.torch.job import edits
from ballast.torch.job.moments import MASTER, Array, read_array
from ballast.torch.modes import plainly
from ballast.torch.ranks.together import in_parts, together
from ballast.torch.tensors import marks
from ballast.torch.tensors.kinds import is_sharded, on_host
from ballast.torch.universal import layout
from ballast.torch.universal.loading import names_of
from ballast.torch.weights.shards import sync

if TYPE_CHECKING:
    from ballast.torch.job.job import Job
    from ballast.torch.job.opened import OpenJob
    from ballast.torch.optimizer import Optimizer
    from ballast.torch.ranks.groups import Exchange
    from ballast.torch.tensors.members import Member

CALL = 'save_universal()'


class _Part(NamedTuple):
    """A parameter, as each rank that has a part of it tells it."""
    name: str
    shape: tuple[int, ...]
    group: int
    steps: int


@plainly
def save_universal(optimizer: Optimizer, folder: str | os.PathLike[str], tag: str | None = None, *, lr_scheduler: Any = None,
                   client_state: Mapping[str, Any] | None = None) -> str:
    """Writes a universal checkpoint into FOLDER/TAG, and its name into FOLDER/latest_universal. DeepSpeed loads it with
    "checkpoint": {"load_universal": true}. All ranks call it, with a folder that they share. Returns the path.

    For each parameter, one rank that has a part of it writes all of it, one tensor at a time. The checkpoint gets its name once it is
    whole and on disk.

    tag: None for global_stepN_universal.
    lr_scheduler: the checkpoint includes its state_dict(), which DeepSpeed's own schedulers want.
    client_state: plain values and tensors, which DeepSpeed's load_checkpoint() returns."""
    job = optimizer.job
    exchange: Exchange = job.exchange(CALL)
    client = dict(client_state or {})
    together(exchange, lambda: _check(job, tag, client))
    opened = together(exchange, job.open)
    exchange = job.exchange(CALL)
    opened.give_values(exchange)
    edited = _edited(opened, exchange)
    said = in_parts(exchange, json.dumps(together(exchange, lambda: _parts(opened))).encode())
    holders, parts = _merged([[_Part(*part) for part in json.loads(each)] for each in said])
    together(exchange, lambda: _check_steps(parts))
    path = os.path.join(folder, tag or f'global_step{job.progress.steps}_universal')
    states = {'lr_scheduler': lr_scheduler.state_dict() if hasattr(lr_scheduler, 'state_dict') else lr_scheduler, **client}
    with _Writing(path, is_first=job.group.rank == 0) as writing:
        together(exchange, lambda: writing.begin(parts))
        _write_parts(opened, exchange, writing.folder, parts, {part.name for part in parts if holders[part.name] == job.group.rank}, edited)
        together(exchange, lambda: writing.end(parts, _optimizer_state(job, parts), _model_states(job, parts, states)))
    return path


def _check(job: Job, tag: str | None, client: Mapping[str, Any]) -> None:
    names_of(job)
    if tag is not None:
        layout.check_tag(tag)
    taken = sorted(layout.RESERVED & client.keys())
    if taken:
        raise Error(f'client_state has the key {taken[0]!r}, which is DeepSpeed\'s own; give it another name', 'BAD_CONFIG')


def _edited(job: OpenJob, exchange: Exchange) -> set[str]:
    """Returns the names of parameters that were edited on any rank since the last step, which replicas hold alike. COLLECTIVE."""
    edits.commit_written(job, exchange)  # what an earlier step or gathered() took over
    mine = together(exchange, lambda: [member.name for member, edited in zip(job.members, marks.edited(job.members)) if edited])
    names = {name for said in in_parts(exchange, json.dumps(mine).encode()) for name in json.loads(said)}
    if names:
        check_values(exchange, job.roster, job.members, [member for member in job.members if member.name in names])
    return names


def _parts(job: OpenJob) -> list[_Part]:
    """Returns this rank's parameters, without frozen ones, which universal checkpoints do not hold."""
    found = []
    for member in job.members:
        steps = 0 if member.is_frozen else job.session.tensor_steps(member.name)
        if steps == 0 and not member.parameter.requires_grad:
            continue
        if '/' in member.name or '\0' in member.name or member.name in ('.', '..'):
            raise Error(f"parameter '{member.name}' cannot be the name of a folder, which a universal checkpoint makes of it; rename its "
                        'module', 'UNSUPPORTED')
        found.append(_Part(member.name, tuple(member.parameter.shape), member.group, steps))
    return found


def _merged(said: list[list[_Part]]) -> tuple[dict[str, int], list[_Part]]:
    """Returns by name the rank that writes a parameter, such that all ranks write about as much; and all parameters, once each."""
    parts: dict[str, _Part] = {}
    having: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(said):
        for part in of_rank:
            parts.setdefault(part.name, part)
            having.setdefault(part.name, []).append(rank)
    writes = [0] * len(said)
    holders = {}
    for part in parts.values():
        rank = min(having[part.name], key=writes.__getitem__)
        holders[part.name] = rank
        writes[rank] += math.prod(part.shape)
    return holders, list(parts.values())


def _check_steps(parts: list[_Part]) -> None:
    """Refuses different step counts, since DeepSpeed counts the steps of a group, and with ZeRO-3 of all groups together."""
    for part in parts:
        if part.steps != parts[0].steps:
            raise Error(f"parameter '{parts[0].name}' has made {parts[0].steps} steps and '{part.name}' {part.steps}, but DeepSpeed has "
                        'one count for all; freeze the parameters that are not trained', 'UNSUPPORTED')


# --- files

class _Writing:
    """The folder of a checkpoint while it is written. It has another name until it is whole. is_first: this rank makes the folder, and
    names it."""

    def __init__(self, path: str, is_first: bool) -> None:
        root, tag = os.path.split(path)
        self._path, self._root, self._is_first = path, root, is_first
        self.folder = os.path.join(root, f'.{tag}.unfinished')

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None and self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self, parts: list[_Part]) -> None:
        if not self._is_first:
            return
        if os.path.lexists(self._path):
            raise Error(f"'{self._path}' is there already; give another tag, or move it away", 'BAD_CONFIG')
        with _wrapped(self.folder):
            os.makedirs(self._root or '.', exist_ok=True)
            if os.path.lexists(self.folder):  # of a save that was killed
                shutil.rmtree(self.folder)
            for part in parts:
                os.makedirs(os.path.join(self.folder, 'zero', part.name))

    def end(self, parts: list[_Part], optimizer: dict[str, Any], model: dict[str, Any]) -> None:
        if not self._is_first:
            return
        _save(optimizer, os.path.join(self.folder, layout.OPTIMIZER))
        for name in (layout.MODEL, layout.MODEL_ZERO3):
            _save(model, os.path.join(self.folder, name))
        zero = os.path.join(self.folder, 'zero')
        for part in parts:
            for file in (*layout.FILES.values(), layout.STEP):
                path = os.path.join(zero, part.name, file)
                if not os.path.exists(path):
                    raise Error(f"rank 0 does not see '{path}', though another rank wrote it; expected one folder for all ranks, on a "
                                'file system that they share', 'UNSUPPORTED')
            with _wrapped(zero):
                sync(os.path.join(zero, part.name))
        with _wrapped(self._path):
            sync(zero)
            sync(self.folder)
            os.rename(self.folder, self._path)
            sync(self._root or '.')
            latest = os.path.join(self._root, layout.LATEST)
            with open(latest + '.tmp', 'w', encoding='utf-8') as names:
                names.write(os.path.basename(self._path))
                names.flush()
                os.fsync(names.fileno())
            os.replace(latest + '.tmp', latest)
            sync(self._root or '.')


@contextlib.contextmanager
def _wrapped(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter: torch's writer, of a full disk
        raise Error(f"'{path}' cannot be written: {error}", 'IO') from error


def _save(value: Any, path: str) -> None:
    with _wrapped(path), open(path, 'xb') as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _write_parts(job: OpenJob, exchange: Exchange, folder: str, parts: list[_Part], mine: set[str], edited: set[str]) -> None:
    """mine: names of the parameters that this rank writes. COLLECTIVE."""
    total = sum(12 * math.prod(part.shape) for part in parts if part.name in mine)
    files = _Files(job, folder, Progress('saving a universal checkpoint', total))
    together(exchange, lambda: files.write([part for part in parts if part.name in mine - edited]))
    for part in parts:
        if part.name in edited:
            together(exchange, partial(files.write_edited, part, part.name in mine))


class _Files:
    """Writes the files of single parameters."""

    def __init__(self, job: OpenJob, folder: str, progress: Progress) -> None:
        self._job, self._folder, self._progress = job, folder, progress
        self._members = {member.name: member for member in job.members}

    def write(self, parts: list[_Part]) -> None:
        for part in parts:
            self._write(part, None)

    def write_edited(self, part: _Part, is_holder: bool) -> None:
        """Writes a parameter with the master that the next step would give it. The job keeps its own master: perhaps the loop swapped an
        average in, only to save it. All ranks that have a part of the parameter call this."""
        member = self._members.get(part.name)
        if member is None:
            return
        parameter = member.parameter.detach()
        values = parameter.full_tensor() if is_sharded(parameter) else parameter
        if is_holder:
            self._write(part, on_host(values))

    def _write(self, part: _Part, values: torch.Tensor | None) -> None:
        member, place = self._members[part.name], os.path.join(self._folder, 'zero', part.name)
        for what, array in zip(layout.FILES, (MASTER, Array('moment1'), Array('moment2'))):
            _save({'cat_dim': 0, layout.PARAM: self._array(member, array, values)}, os.path.join(place, layout.FILES[what]))
            self._progress.add(4 * math.prod(part.shape))
        # torch's optimizers want a tensor; DeepSpeed's make a number of it.
        _save(torch.tensor(float(part.steps), dtype=torch.float32, device='cpu'), os.path.join(place, layout.STEP))

    def _array(self, member: Member, array: Array, values: torch.Tensor | None) -> torch.Tensor:
        read = read_array(self._job.session, member, member.parameter, array)
        return read if values is None or array != MASTER else edits.over(read, values.reshape(read.shape))


def _optimizer_state(job: Job, parts: list[_Part]) -> dict[str, Any]:
    decoupled = job.algorithm.kind == 'adamw'
    groups = [{'lr': float(group['lr']), 'betas': tuple(float(beta) for beta in group['betas']), 'eps': float(group['eps']),
               'weight_decay': float(group['weight_decay']), 'decoupled_weight_decay': decoupled, 'params': [g]}
              for g, group in enumerate(job.param_groups)]
    # ZeRO-3 gives the hyper-parameters of the first group to all: those that are not the same everywhere are left to its configuration.
    common = {key: value for key, value in groups[0].items() if key == 'params' or all(group[key] == value for group in groups)}
    steps = parts[0].steps if parts else 0
    # A number, since ZeRO-3 gives the one of the first group to all: a tensor they would share, and each count up.
    state = {g: {'step': steps} for g in range(len(groups))}
    return {'ds_version': layout.VERSION, 'param_groups': groups, 'optimizer_state_dict': {'state': state, 'param_groups': [common]}}


def _model_states(job: Job, parts: list[_Part], states: dict[str, Any]) -> dict[str, Any]:
    shapes = [{part.name: torch.Size(part.shape) for part in parts if part.group == g} for g in range(len(job.param_groups))]
    steps = parts[0].steps if parts else 0
    return {'module': {}, 'buffer_names': [], 'param_shapes': shapes, 'global_steps': job.progress.steps,
            'skipped_steps': max(0, job.progress.steps - steps), 'dp_world_size': job.group.world_size, 'mp_world_size': 1,
            'ds_version': layout.VERSION, 'universal_checkpoint_info': {'universal_checkpoint_version': 0.4}, **states}
