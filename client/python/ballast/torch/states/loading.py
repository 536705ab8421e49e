"""State in torch.optim's format on its way into a job: moments, step counts, and the masters of 16-bit parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree

from ballast.errors import Error, warn
from ballast.torch.agreement import roster as rosters
from ballast.torch.agreement.agree import Collected, agree, check_loaded, check_values
from ballast.torch.job import edits, progress, registration, spec
from ballast.torch.job.fit import lines
from ballast.torch.job.job import Job
from ballast.torch.job.moments import OURS, moment_names, read_part
from ballast.torch.job.opened import OpenJob
from ballast.torch.modes import plainly, same_bits
from ballast.torch.ranks.together import alike, everyone, together
from ballast.torch.states import checkpoint, entries, marker, matching
from ballast.torch.states.entries import Entry, Saved
from ballast.torch.tensors import marks, placement
from ballast.torch.tensors.kinds import digest_of, is_sharded, local, on_host
from ballast.torch.tensors.members import Member

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ballast import _native
    from ballast.torch.agreement.roster import Roster
    from ballast.torch.ranks.groups import Exchange

# Bytes of parameters in fp32 that one transaction writes: conversions take no more memory than this.
_BATCH_BYTES = 256 << 20


class Plan(NamedTuple):
    """The outcome of a look at the state that is loaded."""
    what: str  # the same on all ranks
    said: marker.Marker | None = None  # go back to the version that it names, or:
    entries: Mapping[int, Saved] | None = None  # bring these in, by id of the parameter; None: nothing
    begins: bool = False  # the entries are those of a job that has made no step
    unknown: bool = False  # ... if the job, which is not open, is one
    steps: int | None = None  # of the loop; None: the most that a parameter has made
    extras: dict[torch.Tensor, dict[str, Any]] | None = None  # what others kept beside our state, by parameter; None: not asked


def load(job: Job, state_dict: Mapping[str, Any]) -> None:
    """All ranks, with the same state. A state that does not fit is refused, on all of them, before anything is changed."""
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
                _bring_in(job, 'load_state_dict()', plan.entries, fresh=plan.begins)
            job.extras = plan.extras or {}
    finally:
        job.options.resume = resume


def restore(job: Job, call: str, look: Callable[[], Plan]) -> None:
    """All ranks: makes the entries that look() finds the job's. Each has a master: parameters become what masters round to, whatever they
    were. A rank that look() refuses leaves all as they were. call: the user's."""
    with _groups_as_before(job):
        plan = _agreed(job, call, look)
        _bring_in(job, call, plan.entries or {}, steps=plan.steps, masters_win=True)


@contextlib.contextmanager
def _groups_as_before(job: Job) -> Iterator[None]:
    """param_groups become what they were, where the load fails."""
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
    """All ranks: entries by id of the parameter, in torch.optim's format, become those of the servers; {}: no step made. The steps that
    the loop has made, and its blob, stay."""
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
    _bring_in(job, 'an assignment to optimizer.state', plan.entries or {}, steps=job.progress.steps, blob=job.progress.blob,
              stays=True)


def _agreed(job: Job, call: str, look: Callable[[], Plan]) -> Plan:
    """look() on every rank: each looks at its own shards, and what is wrong with them the others do not see."""
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
    if said is not None and any(_has_ours(entry) for entry in saved.values()):
        raise Error(f"the state names job '{said.job}' and has moments as well: give a state_dict() or a full_state_dict()", 'BAD_SPEC')
    if said is not None and said.version >= 0:
        checkpoint.check_job(said, job.options.job)
        plan = Plan(f'a state_dict of {said.show()}', said=said)
        if not said.decided_by[0] and job.group.rank == 0:
            warn(f"the state names version {said.version} of job '{said.job}' as earlier versions of the package did: it does not say "
                 'which job of that name it is of, nor which history of it. If the job was dropped and made again since, or its directory '
                 'replaced by an older copy, another version is loaded; save the state again')
    elif said is not None:
        plan = _plan_unopened(job, said)
    checkpoint.check_options(job, groups)
    checkpoint.load_groups(job, groups)
    if said is None:
        found = entries.read(job, groups, lambda g, i: saved.get(groups[g]['params'][i]))
        begins = not any(entry.steps or entry.moments for entry in found.values())
        plan = Plan(entries.described(job, found), entries=found, begins=begins)
    plan = plan._replace(extras=_extras(job, groups, saved))
    if plan.begins and job.opened is None and job.options.resume == 'never':
        return plan._replace(entries=None)  # the job will be new
    return plan


def _has_ours(entry: Any) -> bool:
    return isinstance(entry, Mapping) and any(isinstance(value, torch.Tensor) for key, value in entry.items() if key in OURS)


def _extras(job: Job, groups: Sequence[dict[str, Any]], saved: Mapping[Any, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """What others kept beside our state, in the dtype and on the device of the parameter, as torch.optim loads it. groups: of
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
    """The state_dict() is from before its job was open. Where that job could only be a new one, the state is the beginning, as torch's is
    from before the first step; else it depends on what the job turned out to be, which its own optimizer knows."""
    nothing = {id(parameter): Entry(0, {}, None) for parameter in job.parameters.all()}
    beginning = Plan('a state_dict from before the first step', entries=nothing, begins=True)
    own = said.origin == job.origin
    if said.begins or (job.opened is not None and (job.progress.steps == 0 or own and job.opened.found is None)):
        return beginning
    if job.opened is None:
        return Plan('its own state_dict from before the job was open') if own else beginning._replace(unknown=True)
    if own and job.opened.session.version == job.opened.found:
        return Plan('the state that the job was found in')
    _refuse_unopened(job)


def _check_begins(job: Job) -> None:
    job.open(partly=True)
    if job.progress.steps > 0:
        _refuse_unopened(job)


def _refuse_unopened(job: Job) -> NoReturn:
    job.progress.check_whole(job.options.job)
    raise Error(f"this state_dict was taken before its job was open, with resume='auto' or 'must', and does not say which state that was; "
                f"job '{job.options.job}' has made {job.progress.steps} steps. To go on from them, load nothing; to begin anew, give "
                'the job another name, or say optimizer.state.clear(); for a state that can be loaded, call resume() before state_dict()',
                'BAD_SPEC')


# --- into the job

def _own(value: torch.Tensor, member: Member, rank: int) -> torch.Tensor:
    """This rank's part of `value`, as contiguous fp32 on the CPU. COLLECTIVE where `value` is sharded otherwise than the parameter."""
    parameter = member.parameter
    if is_sharded(value):
        same = is_sharded(parameter) and value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
        value = local(value) if same else _whole(member.name, value)
    if value.shape != member.shape:
        value = value[tuple(slice(begin, end) for begin, end in placement.box(member.line.key, tuple(parameter.shape), rank))]
    return value.to(device='cpu', dtype=torch.float32).contiguous()


def _whole(name: str, value: DTensor) -> torch.Tensor:
    """COLLECTIVE."""
    placement.check_torchs(name, value)
    moved = value.to(value.device_mesh.device_type)
    return moved.full_tensor() if is_sharded(moved) else moved


def _given(member: Member, entry: Saved, name: str | None, rank: int) -> torch.Tensor | None:
    """This rank's part of a moment, or of the master (None). COLLECTIVE, see _own()."""
    given = entry.master if name is None else entry.moment(name)
    return None if given is None else _own(given, member, rank)


def _values(session: _native.Session, batch: Sequence[Member], parts: Sequence[torch.Tensor | None], name: str | None, fresh: bool,
            stays: bool, masters_win: bool) -> list[torch.Tensor]:
    """By member of the batch, what is written. parts: of _given()."""
    return [part if masters_win and part is not None else _value(session, member, part, name, fresh, stays)
            for member, part in zip(batch, parts)]


def _value(session: _native.Session, member: Member, given: torch.Tensor | None, name: str | None, fresh: bool,
           stays: bool) -> torch.Tensor:
    if name is None:
        return _master(session, member, given, fresh, stays)
    return torch.zeros(local(member.parameter).numel(), dtype=torch.float32, device='cpu') if given is None else given


def _master(session: _native.Session, member: Member, known: torch.Tensor | None, fresh: bool, stays: bool) -> torch.Tensor:
    """The parameter's values, but where a master rounds to them: the known one, or the one that there is. stays: the latter first."""
    if member.here is None:
        return read_part(session, member, 'master') if known is None or stays else known
    values = on_host(member.parameter)
    masters = [] if known is None else [known]
    if not fresh and (stays or known is None or not bool(_rounds(known, values).all())):
        masters.insert(len(masters) if stays else 0, read_part(session, member, 'master'))
    found = values.float()
    for master in masters:  # the last one first
        found = torch.where(_rounds(master, values), master, found)
    return found.contiguous()


def _rounds(master: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """By element, whether it rounds to the values."""
    return same_bits(master.to(values.dtype), values)


def _batches(exchange: Exchange, roster: Roster, members: Sequence[Member]) -> list[list[Member]]:
    """As many on all ranks, a parameter in the same one everywhere; some may be empty here. COLLECTIVE."""
    by_name = {member.name: member for member in members}
    _, said = everyone(exchange, lambda: by_name, lambda by_name: bytes(name in by_name for name, _ in roster.parts))
    batches: list[list[Member]] = []
    size = 0
    for (name, _), elements, *given in zip(roster.parts, roster.sizes, *said):
        if not any(given):
            continue
        if not batches or size + 4 * elements > _BATCH_BYTES:
            batches.append([])
            size = 0
        size += 4 * elements
        if name in by_name:
            batches[-1].append(by_name[name])
    return batches


def _collect(job: OpenJob, trained: Collection[str]) -> Collected:
    """The parameters that register with the load, and those that were edited before."""
    fresh = registration.late_tensors(job, trained)
    spec.check_dtypes(job.options.optimizer, [member for member, _, _ in fresh], [None] * len(fresh))
    members = job.members + [member for member, _, _ in fresh]
    return Collected(fresh, members, [None] * len(members), edits.edited(job, members), [],
                     lambda: lines(job.parameters, members), steps=0, debug=False, orders={}, attempt=job.session.attempt, went=False,
                     tied={})


def _check_frozen(job: OpenJob, given: Mapping[int, Saved]) -> None:
    for member in job.members:
        entry = given.get(id(member.parameter))
        if member.is_frozen and entry is not None and entry.steps > 0:
            raise Error(f"the state has moments of parameter '{member.name}' after {entry.steps} steps, and the job was made with it "
                        'frozen: its servers have the value alone. Leave the parameter out of the state, or load it into a new job that '
                        'trains the parameter', 'BAD_SPEC')


@torch.no_grad()
def _bring_in(job: Job, call: str, given: Mapping[int, Saved], fresh: bool = False, steps: int | None = None, blob: bytes = b'',
              masters_win: bool = False, stays: bool = False) -> None:
    """In several transactions: until the last one the job's blob says that its state is not whole. given: by id of the parameter. fresh:
    masters are the parameters, whatever they were. call: the user's. steps, blob: of the loop; None: the most that a parameter has made.
    masters_win: all entries have masters, which parameters become. stays: masters that round to the parameters stay, whatever entries
    have."""
    was_open = job.opened is not None
    # The job trains these, though they may be frozen here.
    trained = {job.parameters.name_of(g, i, parameter) for g, i, parameter in job.parameters.placed()
               if id(parameter) in given and given[id(parameter)].steps > 0}
    opened = job.open(partly=True, trained=trained)
    session = opened.session
    exchange = job.exchange(call)
    job.discard(exchange)
    agreed = agree(exchange, opened.roster, lambda: _collect(opened, trained))
    registration.register(opened, agreed.collected.fresh, exchange, agreed.roster, agreed.registers)
    edits.commit_written(opened, exchange)
    # Values of those that are frozen come with the model's state_dict, and they have nothing else.
    members = [member for member in opened.members if id(member.parameter) in given and not member.is_frozen]
    together(exchange, lambda: _check_frozen(opened, given))
    of = {id(member): given[id(member.parameter)] for member in members}
    names, batches = moment_names(job.algorithm.kind, job.options.optimizer), _batches(exchange, opened.roster, members)
    writes: list[tuple[str, str | None, list[Member]]] = []
    # Parameters are ahead of masters where they were edited, or never pulled.
    has_masters = not masters_win and any(entry.master is not None for entry in of.values())
    if masters_win:
        writes += [('master', None, batch) for batch in batches]
    elif any(said != b'0' for said in everyone(exchange, lambda: has_masters, lambda has: b'%d' % has)[1]) or (
            fresh or not names or opened.unpulled or agreed.edits):
        check_values(exchange, opened.roster, opened.members, members, has_values=True)
        writes += [('master', None, batch) for batch in batches]
    fresh = fresh or (not was_open and not opened.unpulled)  # else they are, if the job is new
    for k, moment in enumerate(names):
        writes += [(f'moment{k + 1}', moment, batch) for batch in batches]
    steps = max((entry.steps for entry in of.values()), default=0) if steps is None else steps
    for i, (array, name, batch) in enumerate(writes):
        parts = [_given(member, of[id(member)], name, opened.group.rank) for member in batch]
        values = together(exchange, functools.partial(_values, session, batch, parts, name, fresh, stays, masters_win))
        check_loaded(exchange, opened.roster, opened.members, {id(member): digest_of(value) for member, value in zip(batch, values)},
                     name or 'the master')
        last = i + 1 == len(writes)
        sealed = progress.pack(steps, blob) if last else progress.pack_under_way()
        before = session.version
        try:
            session.commit_state(array, [member.name for member in batch], values, [of[id(member)].steps for member in batch], sealed)
            if masters_win and name is None and opened.lends_masters:
                for member, value in zip(batch, values):
                    member.parameter.copy_(value)
        finally:
            if session.version > before:
                job.progress.partly = not last
                if last and opened.lends_masters:
                    job.connection.hold_masters()
                if last:
                    opened.unpulled = masters_win
                    job.progress.loaded(steps, blob)
    if masters_win:
        opened.pull()
    marks.note(members)
