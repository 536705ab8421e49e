"""Entries of a state in torch.optim's format: one parameter's moments and step count, checked against the job that they go into."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ballast.errors import Error
from ballast.torch.job.job import Job
from ballast.torch.job.moments import KNOWN, OURS, moment_names
from ballast.torch.tensors.kinds import is_sharded, local


class Saved(Protocol):
    """One parameter's state, wherever it is read from: an Entry, or a file that is mapped anew for each look."""

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
    """Entries by id of the parameter. groups: of matching.matched(). saved_of(group, index): what was saved of that parameter here, or
    None. Not collective but for DTensors."""
    kind, of_job = job.algorithm.kind, job.spec
    job.check_groups(of_job)
    names = moment_names(kind, of_job)
    for group in groups:
        decoupled = group.get('decoupled_weight_decay')
        if kind in ('adam', 'adamw') and decoupled not in (None, kind == 'adamw'):
            raise Error(f'this state is of torch.optim.{"AdamW" if decoupled else "Adam"}, whose weight decay is another; load '
                        "it into ballast.torch's optimizer of that name", 'BAD_SPEC')
    entries = {}
    for g, i, parameter in job.parameters.placed():
        name = job.parameters.name_of(g, i, parameter)
        start = job.param_groups[g].get('initial_accumulator_value', 0)
        entries[id(parameter)] = _entry(kind, names, name, parameter, saved_of(g, i) or {}, start)
    return entries


def _entry(kind: str, names: Sequence[str], name: str, parameter: torch.Tensor, saved: Any, start: float) -> Entry:
    """start: what Adagrad's sum is before the first step, which servers add at that step."""
    if not isinstance(saved, Mapping):
        raise Error(f"the state of parameter '{name}' is a {type(saved).__name__}; expected a dict of {_shown(names)}", 'BAD_SPEC')
    absent = [key for key, value in saved.items() if key in OURS and isinstance(value, Mapping) and not value]
    if absent:  # as torch.distributed.checkpoint's functions put it
        raise Error(f"the flattened state has no {absent[0]!r} of parameter '{name}': it is of a durable job, or of other parameters; "
                    'expected one with moments, or a job of that name', 'BAD_SPEC')
    foreign = sorted(key for key in saved if key in KNOWN and key not in names and saved[key] is not None)
    if foreign:
        raise Error(f"the state of parameter '{name}' has {foreign[0]!r}, which this job's optimizer ({kind}) does not keep: "
                    f'it is of another optimizer, or of other options; expected {_shown(names)}', 'BAD_SPEC')
    given = {key: saved[key] for key in names if saved.get(key) is not None}
    steps = _steps(kind, name, saved, bool(given))
    master = None if saved.get('master') is None else _tensor(name, 'master', parameter, saved['master'])
    if steps == 0 and not given:
        return Entry(0, {}, master)
    missing = [key for key in names if key not in given]
    if missing:
        raise Error(f"the state of parameter '{name}' has no {missing[0]!r}; it has {_shown(saved)}, expected "
                    f'{_shown(names)}: is it of another optimizer?', 'BAD_SPEC')
    moments = {}
    for k, key in enumerate(names):
        moment = _tensor(name, key, parameter, given[key])
        moments[key] = moment = moment - start if steps == 0 and start else moment
        if not bool(torch.isfinite(local(moment)).all()):
            raise Error(f"{key!r} of parameter '{name}' has an Inf or a NaN", 'BAD_REQUEST')
        if (kind == 'adagrad' or k > 0) and bool((local(moment) < 0).any()):
            raise Error(f"{key!r} of parameter '{name}' has a negative element, and is a mean of squares", 'BAD_REQUEST')
        if kind == 'sgd' and steps == 0 and bool(local(moment).any()):
            raise Error(f"{key!r} of parameter '{name}' is not zero, and its 'step' is 0, before which there is none; leave 'step' out, "
                        'as torch.optim.SGD does', 'BAD_REQUEST')
    return Entry(steps, moments, master)


def _shown(keys: Iterable[str]) -> str:
    return ', '.join(repr(key) for key in keys) or 'none'


def _steps(kind: str, name: str, saved: Mapping[str, Any], has_moments: bool) -> int:
    if 'step' not in saved:
        if has_moments and kind not in ('sgd', 'lion'):
            raise Error(f"the state of parameter '{name}' has no 'step'; it has {_shown(saved)}", 'BAD_SPEC')
        return int(has_moments)  # torch's SGD counts none: all that matters is that there was one
    try:
        steps = float(saved['step'])
    except (TypeError, ValueError):
        raise Error(f"the 'step' of parameter '{name}' is {saved['step']!r}; expected a whole number", 'BAD_REQUEST') from None
    if not math.isfinite(steps) or steps < 0 or steps != int(steps):
        raise Error(f"the 'step' of parameter '{name}' is {steps}; expected a whole number", 'BAD_REQUEST')
    return int(steps)


def _tensor(name: str, key: str, parameter: torch.Tensor, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise Error(f"{key!r} of parameter '{name}' is no tensor of floating-point numbers", 'BAD_DTYPE')
    if value.shape != parameter.shape:
        raise Error(f"{key!r} of parameter '{name}' has shape {list(value.shape)}, the parameter has {list(parameter.shape)}",
                    'BAD_SPEC')
    return value.detach()


def described(job: Job, entries: Mapping[int, Entry]) -> str:
    """A text of what the entries are, which ranks compare."""
    steps = {entry.steps for entry in entries.values()}
    text = f'the state of {len(entries)} parameters' + (f' after {max(steps)} steps' if steps else '')
    if not job.group.several:
        return text
    sums = [(job.parameters.name_of(g, i, parameter), entry.steps, [_sum(entry.moments[key]) for key in sorted(entry.moments)],
             _sum(entry.master))
            for g, i, parameter in job.parameters.placed() for entry in [entries.get(id(parameter))] if entry is not None]
    return f'{text} (digest {zlib.crc32(repr(sums).encode()):08x})'


def _sum(tensor: torch.Tensor | None) -> int | str | None:
    """The sum of the bits of a whole tensor: ranks that have different ones would mix them. Shards differ."""
    if tensor is None or is_sharded(tensor):
        return None if tensor is None else str(tensor.placements)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64))
