"""Loads state in torch.optim's format into a job: moments, step counts, and the masters of 16-bit parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree

from ballast.errors import Error, warn
from ballast.torch.agreement import roster as rosters
from ballast.torch.job.fit import lines
from ballast.torch.job.job import Job
from ballast.torch.job.moments import OURS
from ballast.torch.modes import plainly
from ballast.torch.ranks.together import alike, together
from ballast.torch.states import checkpoint, entries, marker, matching
from ballast.torch.states.entries import Entry, Saved
from ballast.torch.states.writing import Masters, bring_in


class Plan(NamedTuple):
    """What a load is going to do, after a look at the state."""
    what: str  # the same on all ranks
    said: marker.Marker | None = None  # go back to the version that it names, or:
    entries: Mapping[int, Saved] | None = None  # bring these in, by id of the parameter; None: nothing
    begins: bool = False  # the entries are those of a job that has made no step
    unknown: bool = False  # ... if the job, which is not open, is one
    steps: int | None = None  # of the loop; None: the most that a parameter has made
    extras: dict[torch.Tensor, dict[str, Any]] | None = None  # what others kept beside our state, by parameter; None: not asked


def load(job: Job, state_dict: Mapping[str, Any]) -> None:
    """Loads a state. All ranks call it with the same state. If the state does not fit, all refuse it before anything changes."""
    resume, was_open = job.options.resume, job.opened is not None
    try:
        with _groups_as_before(job):
            plan = _agreed(job, 'load_state_dict()', lambda: _plan(job, state_dict))
            try:
                if plan.said is not None and not was_open:
                    job.options.resume = 'must'  # who loads a state wants the job that has it
                if plan.said is not None:
                    checkpoint.rollback(job, plan.said.version, plan.said)
                elif plan.unknown:
                    _check_begins(job)
            except BaseException:
                if not was_open:
                    job.leave()
                raise
            if plan.entries is not None:
                bring_in(job, 'load_state_dict()', plan.entries, Masters.FRESH if plan.begins else Masters.OF_ENTRY)
            job.extras = plan.extras or {}
    finally:
        job.options.resume = resume


def restore(job: Job, call: str, look: Callable[[], Plan]) -> None:
    """Loads the entries that look() finds. All ranks call it. Each entry has a master, and the parameter becomes what the master rounds to.
    If look() raises on one rank, nothing changes on any. call: the user's."""
    with _groups_as_before(job):
        plan = _agreed(job, call, look)
        bring_in(job, call, plan.entries or {}, Masters.WIN, plan.steps)


@contextlib.contextmanager
def _groups_as_before(job: Job) -> Iterator[None]:
    """Puts param_groups back if the load fails."""
    before = [dict(group) for group in job.param_groups]
    try:
        yield
    except BaseException:
        for group, old in zip(job.param_groups, before):
            group.clear()
            group.update(old)
        raise


@plainly
def put(job: Job, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Gives the servers entries in torch.optim's format, by id of the parameter. {}: no step was made. All ranks call it. The loop's step
    count and blob stay."""
    if job.opened is None and job.options.resume == 'never' and not any(states.values()):
        return  # the job will be new
    if job.opened is None:
        job.open()

    def look() -> Plan:
        job.open()
        found = entries.read(job, job.param_groups, lambda g, i: states.get(id(job.param_groups[g]['params'][i])))
        found = {key: entry for key, entry in found.items() if key in states}
        return Plan(entries.described(job, found), entries=found)
    plan = _agreed(job, 'an assignment to optimizer.state', look)
    bring_in(job, 'an assignment to optimizer.state', plan.entries or {}, Masters.OF_SERVERS, job.progress.steps, job.progress.blob)


def _agreed(job: Job, call: str, look: Callable[[], Plan]) -> Plan:
    """Runs look() on every rank, since each sees only its own shards."""
    def act() -> Plan:
        job.wait()
        return look()
    exchange = job.exchange(call)
    # Ranks with other parameters load other state: replicas are compared where the state is written.
    is_alike = rosters.gather(exchange, together(exchange, lambda: lines(job.parameters, job.members)), job.group).is_alike
    return alike(exchange, act, lambda plan: [*([('what is loaded', plan.what)] if is_alike else []), ('resume', repr(job.options.resume))])


def _plan(job: Job, state_dict: Mapping[str, Any]) -> Plan:
    saved = state_dict.get('state') or {}
    groups = matching.matched(job.parameters, state_dict['param_groups'], tells=bool(saved))
    said = marker.of(state_dict['param_groups'])
    plan = None if said is None else _plan_named(job, said, saved)
    checkpoint.check_options(job, groups)
    checkpoint.load_groups(job, groups)
    if plan is None:
        plan = _plan_entries(job, groups, saved)
    plan = plan._replace(extras=_extras(job, groups, saved))
    if plan.begins and job.opened is None and job.options.resume == 'never':
        return plan._replace(entries=None)  # the job will be new
    return plan


def _plan_named(job: Job, said: marker.Marker, saved: Mapping[Any, Any]) -> Plan:
    """The state names a job, and mostly a version of it."""
    if any(_has_ours(entry) for entry in saved.values()):
        raise Error(f"the state names job '{said.job}' and also has moments; give either a state_dict() or a full_state_dict()", 'BAD_SPEC')
    if said.version < 0:
        return _plan_unopened(job, said)
    checkpoint.check_job(said, job.options.job)
    if not said.decided_by[0] and job.group.rank == 0:
        warn(f"the state names version {said.version} of job '{said.job}' as earlier versions of the package did: it does not say which "
             'job of that name it is of, nor which history of it. If the job was dropped and made again since, or its directory was '
             'replaced by an older copy, this loads another version. Save the state again')
    return Plan(f'a state_dict of {said.show()}', said=said)


def _plan_entries(job: Job, groups: Sequence[dict[str, Any]], saved: Mapping[Any, Any]) -> Plan:
    """The state has moments. groups: of matching.matched()."""
    found = entries.read(job, groups, lambda g, i: saved.get(groups[g]['params'][i]))
    begins = not any(entry.steps or entry.moments for entry in found.values())
    return Plan(entries.described(job, found), entries=found, begins=begins)


def _has_ours(entry: Any) -> bool:
    return isinstance(entry, Mapping) and any(isinstance(value, torch.Tensor) for key, value in entry.items() if key in OURS)


def _extras(job: Job, groups: Sequence[dict[str, Any]], saved: Mapping[Any, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """Returns what others kept beside our state, in the dtype and on the device of the parameter, as torch.optim loads it. groups: of
    matching.matched()."""
    found = {}
    for g, i, parameter in job.parameters.placed():
        dtype = parameter.dtype if parameter.is_floating_point() else None
        extras = {key: value for key, value in (saved.get(groups[g]['params'][i]) or {}).items() if key not in OURS}
        if extras:
            found[parameter] = _pytree.tree_map_only(
                torch.Tensor, functools.partial(_to, parameter.device, dtype), extras)
    return found


def _to(device: torch.device, dtype: torch.dtype | None, value: torch.Tensor) -> torch.Tensor:
    return value.to(device=device, dtype=dtype)


def _plan_unopened(job: Job, said: marker.Marker) -> Plan:
    """The state_dict() is from before its job was open. If that job could only be a new one, the state is the beginning, as in torch before
    the first step. Otherwise it depends on what the job turned out to be, and only its own optimizer knows that."""
    nothing = {id(parameter): Entry(0, {}, None) for parameter in job.parameters.all()}
    beginning = Plan('a state_dict from before the first step', entries=nothing, begins=True)
    own = said.origin == job.origin
    if said.begins:
        return beginning
    if job.opened is None:
        return Plan('its own state_dict from before the job was open') if own else beginning._replace(unknown=True)
    if job.progress.steps == 0 or (own and job.opened.found is None):
        return beginning
    if own and job.opened.session.version == job.opened.found:
        return Plan('the state that the job was found in')
    _refuse_unopened(job)


def _check_begins(job: Job) -> None:
    job.open(partly=True)
    if job.progress.steps > 0:
        _refuse_unopened(job)


def _refuse_unopened(job: Job) -> NoReturn:
    job.progress.check_whole(job.options.job)
    raise Error("this state_dict was taken before its job was open, with resume='auto' or 'must', and does not say which state that was. "
                f"Job '{job.options.job}' has made {job.progress.steps} steps. To go on from them, load nothing. To begin anew, give the "
                'job another name, or call optimizer.state.clear(). For a state that can be loaded, call resume() before state_dict()',
                'BAD_SPEC')
