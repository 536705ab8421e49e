"""Entries of a state in torch.optim's format: one parameter's moments and step count, checked against the job that they go into."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ballast.errors import Error
from ballast.torch.job.job import Job
from ballast.torch.job.moments import KNOWN, OURS, SQUARES
from ballast.torch.tensors.kinds import is_sharded, local


class Saved(Protocol):
    """One parameter's state, from anywhere: an Entry, or a file that is mapped for each look."""

    @property
    def steps(self) -> int: ...
    @property
    def master(self) -> torch.Tensor | None: ...
    def moment(self, name: str) -> torch.Tensor | None: ...


class Entry(NamedTuple):
    """One parameter's state, as it was saved."""
    steps: int
    moments: dict[str, torch.Tensor]  # by name; empty: zeros
    master: torch.Tensor | None

    def moment(self, name: str) -> torch.Tensor | None:
        return self.moments.get(name)


def read(job: Job, groups: Sequence[dict[str, Any]], saved_of: Callable[[int, int], Any]) -> dict[int, Entry]:
    """Returns entries by id of the parameter. groups: of matching.matched(). saved_of(group, index): returns what was saved of that
    parameter, or None. Collective only for DTensors."""
    of_job, arrays = job.spec, job.arrays()
    job.check_groups(of_job)
    _check_decay(job.algorithm.kind, groups)
    found = {}
    for g, i, parameter in job.parameters.placed():
        start = job.param_groups[g].get('initial_accumulator_value', 0)
        kind = 'muon' if job.algorithm.assists(job.param_groups[g]) else job.algorithm.kind
        wanted = Wanted(kind, tuple(arrays[g]), job.parameters.name_of(g, i, parameter), parameter, start)
        found[id(parameter)] = entry_of(wanted, saved_of(g, i) or {})
    return found


def _check_decay(kind: str, groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        decoupled = group.get('decoupled_weight_decay')
        if kind in ('adam', 'adamw') and decoupled not in (None, kind == 'adamw'):
            raise Error(f'this state is of torch.optim.{"AdamW" if decoupled else "Adam"}, whose weight decay works differently; load it '
                        "into ballast.torch's optimizer of that name", 'BAD_SPEC')


class Wanted(NamedTuple):
    """One parameter of a job, as far as a saved entry must fit it."""
    kind: str  # of the job's optimizer
    moments: Sequence[str]  # their names
    name: str
    parameter: torch.Tensor
    start: float = 0  # what Adagrad's sum is before the first step, which servers add at that step


def entry_of(wanted: Wanted, saved: Any) -> Entry:
    """Checks a saved entry, and returns it. saved: in torch.optim's format. {}: no step was made."""
    _check_keys(wanted, saved)
    given = {key: saved[key] for key in wanted.moments if saved.get(key) is not None}
    steps = _steps(wanted, saved, bool(given))
    master = None if saved.get('master') is None else _tensor(wanted, 'master', saved['master'])
    if steps == 0 and not given:
        return Entry(0, {}, master)
    missing = [key for key in wanted.moments if key not in given]
    if missing:
        raise Error(f"the state of parameter '{wanted.name}' has no {missing[0]!r}; it has {_shown(saved)}, expected "
                    f'{_shown(wanted.moments)}. Is it of another optimizer?', 'BAD_SPEC')
    return Entry(steps, {key: _moment(wanted, key, given[key], steps) for key in wanted.moments}, master)


def _check_keys(wanted: Wanted, saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise Error(f"the state of parameter '{wanted.name}' is a {type(saved).__name__}; expected a dict of {_shown(wanted.moments)}",
                    'BAD_SPEC')
    absent = [key for key, value in saved.items() if key in OURS and isinstance(value, Mapping) and not value]
    if absent:  # as torch.distributed.checkpoint's functions put it
        raise Error(f"the flattened state has no {absent[0]!r} of parameter '{wanted.name}': it is of a durable job, or of other "
                    'parameters. Give a state with moments, or load it into a job of that name', 'BAD_SPEC')
    foreign = sorted(key for key in saved if key in KNOWN and key not in wanted.moments and saved[key] is not None)
    if foreign:
        raise Error(f"the state of parameter '{wanted.name}' has {foreign[0]!r}, which this job's optimizer ({wanted.kind}) does not "
                    f'keep; expected {_shown(wanted.moments)}. Is the state of another optimizer, or of other options? A value of '
                    'your own needs another key', 'BAD_SPEC')


def _moment(wanted: Wanted, key: str, given: Any, steps: int) -> torch.Tensor:
    moment = _tensor(wanted, key, given)
    if steps == 0 and wanted.start:
        moment = moment - wanted.start
    if not bool(torch.isfinite(local(moment)).all()):
        raise Error(f"{key!r} of parameter '{wanted.name}' has an Inf or a NaN", 'BAD_REQUEST')
    if key in SQUARES and bool((local(moment) < 0).any()):
        raise Error(f"{key!r} of parameter '{wanted.name}' is a mean of squares, but has a negative element", 'BAD_REQUEST')
    if wanted.kind == 'sgd' and steps == 0 and bool(local(moment).any()):
        raise Error(f"{key!r} of parameter '{wanted.name}' is not zero, but its 'step' is 0, and there is no momentum before the first "
                    "step; leave 'step' out, as torch.optim.SGD does", 'BAD_REQUEST')
    return moment


def _shown(keys: Iterable[str]) -> str:
    return ', '.join(repr(key) for key in keys) or 'none'


def _steps(wanted: Wanted, saved: Mapping[str, Any], has_moments: bool) -> int:
    if 'step' not in saved:
        if has_moments and wanted.kind not in ('sgd', 'lion', 'muon'):
            raise Error(f"the state of parameter '{wanted.name}' has no 'step'; it has {_shown(saved)}", 'BAD_SPEC')
        return int(has_moments)  # torch's SGD counts none: all that matters is that there was one
    try:
        steps = float(saved['step'])
    except (TypeError, ValueError):
        raise Error(f"the 'step' of parameter '{wanted.name}' is {saved['step']!r}; expected a whole number", 'BAD_REQUEST') from None
    if not math.isfinite(steps) or steps < 0 or steps != int(steps):
        raise Error(f"the 'step' of parameter '{wanted.name}' is {steps}; expected a whole number", 'BAD_REQUEST')
    return int(steps)


def _tensor(wanted: Wanted, key: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise Error(f"{key!r} of parameter '{wanted.name}' is not a floating-point tensor", 'BAD_DTYPE')
    if value.shape != wanted.parameter.shape:
        raise Error(f"{key!r} of parameter '{wanted.name}' has shape {list(value.shape)}, but the parameter has "
                    f'{list(wanted.parameter.shape)}', 'BAD_SPEC')
    return value.detach()


def described(job: Job, entries: Mapping[int, Entry]) -> str:
    """Returns a text about the entries, which ranks compare."""
    steps = {entry.steps for entry in entries.values()}
    text = f'the state of {len(entries)} parameters' + (f' after {max(steps)} steps' if steps else '')
    if not job.group.several:
        return text
    sums = [(job.parameters.name_of(g, i, parameter), entry.steps, [_sum(entry.moments[key]) for key in sorted(entry.moments)],
             _sum(entry.master))
            for g, i, parameter in job.parameters.placed() for entry in [entries.get(id(parameter))] if entry is not None]
    return f'{text} (digest {zlib.crc32(repr(sums).encode()):08x})'


def _sum(tensor: torch.Tensor | None) -> int | str | None:
    """Returns the sum of the bits of a whole tensor, since ranks with different tensors would mix them. Shards differ between ranks."""
    if tensor is None or is_sharded(tensor):
        return None if tensor is None else str(tensor.placements)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64))
