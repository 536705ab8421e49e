"""State in torch.optim's format on its way into a job: moments, step counts, and the masters of 16-bit parameters."""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ballast.errors import Error
from ballast.torch import checkpoint, job_spec, marker, matching, ranks
from ballast.torch.agreement import Collected, agree, alike, check_values, together
from ballast.torch.members import is_sharded, local, on_host
from ballast.torch.modes import plainly, same_bits
from ballast.torch.moments import KNOWN, moment_names, read_array
from ballast.torch.registration import name_of, placed

# In the blob, in place of the steps made: a load is under way.
UNDER_WAY = 2**64 - 1
# Of parameters in fp32, what one transaction writes: conversions take no more memory than this.
_BATCH_BYTES = 256 << 20


class Entry(NamedTuple):
    """One parameter's state, as it was saved."""
    steps: int
    moments: dict[str, Any]  # by name; empty: zeros
    master: Any


def refuse_partly(job):
    raise Error(f"a load_state_dict() into job '{job}' ended before all of its state was there, and what is there is neither "
                'the old one nor the new: call load_state_dict() again with the same state, or rollback() to one of versions()',
                'INCOMPLETE')


class Plan(NamedTuple):
    """What a load comes to."""
    what: str  # the same on all ranks
    version: int = -1  # go back to this one, or:
    entries: dict | None = None  # bring these in, by id of the parameter; None: nothing
    begins: bool = False  # the entries are those of a job that has made no step
    unknown: bool = False  # ... if the job, which is not open, is one


def load(optimizer, state_dict):
    """All ranks, with the same state. What does not fit is refused, on all of them, before anything is changed."""
    before = [dict(group) for group in optimizer.param_groups]
    resume, was_open = optimizer._options.resume, optimizer._session is not None
    try:
        plan = _agreed(optimizer, 'load_state_dict()', lambda: _plan(optimizer, state_dict))
        try:
            if plan.version >= 0 and not was_open:
                optimizer._options.resume = 'must'  # who loads a state wants the job that has it
            if plan.version >= 0:
                optimizer.rollback(plan.version)
            elif plan.unknown:
                _check_begins(optimizer)
        except BaseException:
            if not was_open:
                optimizer._leave()
            raise
        if plan.entries is not None:
            _bring_in(optimizer, 'load_state_dict()', plan.entries, fresh=plan.begins)
    except BaseException:
        for group, old in zip(optimizer.param_groups, before):
            group.clear()
            group.update(old)
        raise
    finally:
        optimizer._options.resume = resume


@plainly
def put(optimizer, states):
    """All ranks: entries by id of the parameter, in torch.optim's format, become those of the servers; {}: no step made. The steps that
    the loop has made, and its blob, stay."""
    if optimizer._session is None and optimizer._options.resume == 'never' and not any(states.values()):
        return  # the job will be new
    if optimizer._session is None:
        optimizer._open()

    def look():
        optimizer._open()
        entries = _read(optimizer, optimizer.param_groups, lambda g, i: states.get(id(optimizer.param_groups[g]['params'][i])))
        entries = {key: entry for key, entry in entries.items() if key in states}
        return Plan(_described(optimizer, entries), entries=entries)
    plan = _agreed(optimizer, 'an assignment to optimizer.state', look)
    _bring_in(optimizer, 'an assignment to optimizer.state', plan.entries, steps=optimizer._steps, blob=optimizer._blob)


def _agreed(optimizer, call, look):
    """look() on every rank: each looks at its own shards, and what is wrong with them the others do not see."""
    def act():
        optimizer.wait()
        return look()
    return alike(optimizer._exchange(call), act, lambda plan: [('what is loaded', plan.what), ('resume', repr(optimizer._options.resume))])


def _plan(optimizer, state_dict):
    saved = state_dict.get('state') or {}
    groups = matching.matched(optimizer, state_dict['param_groups'], tells=bool(saved))
    said = marker.of(state_dict['param_groups'])
    if said is not None and any(_has_tensors(entry) for entry in saved.values()):
        raise Error(f"the state names job '{said.job}' and has moments as well: give a state_dict() or a full_state_dict()", 'BAD_SPEC')
    if said is not None and said.version >= 0:
        checkpoint.check_job(said, optimizer._options.job)
        plan = Plan(f"a state_dict of job '{said.job}' at version {said.version}", version=said.version)
    elif said is not None:
        plan = _plan_unopened(optimizer, said)
    checkpoint.load_groups(optimizer, groups)
    if said is None:
        entries = _read(optimizer, groups, lambda g, i: saved.get(groups[g]['params'][i]))
        begins = not any(entry.steps or entry.moments for entry in entries.values())
        plan = Plan(_described(optimizer, entries), entries=entries, begins=begins)
    if plan.begins and optimizer._session is None and optimizer._options.resume == 'never':
        return plan._replace(entries=None)  # the job will be new
    return plan


def _has_tensors(entry):
    return isinstance(entry, Mapping) and any(isinstance(value, torch.Tensor) for value in entry.values())


def _plan_unopened(optimizer, said):
    """Of a state_dict() from before its job was open. Where that could only be a new one, it is the beginning, as torch's is from before
    the first step; else it depends on what the job turned out to be, which its own optimizer knows."""
    nothing = {id(parameter): Entry(0, {}, None) for _, _, parameter in placed(optimizer)}
    beginning = Plan('a state_dict from before the first step', entries=nothing, begins=True)
    own = said.origin == optimizer._origin()
    if said.begins or (optimizer._session is not None and (optimizer._steps == 0 or own and optimizer._found is None)):
        return beginning
    if optimizer._session is None:
        return Plan('its own state_dict from before the job was open') if own else beginning._replace(unknown=True)
    if own and optimizer._session.version == optimizer._found:
        return Plan('the state that the job was found in')
    _refuse_unopened(optimizer)


def _check_begins(optimizer):
    optimizer._open(partly=True)
    if optimizer._steps > 0:
        _refuse_unopened(optimizer)


def _refuse_unopened(optimizer):
    if optimizer._partly:
        refuse_partly(optimizer._options.job)
    raise Error(f"this state_dict was taken before its job was open, with resume='auto' or 'must', and does not say which state that was; "
                f"job '{optimizer._options.job}' has made {optimizer._steps} steps. To go on from them, load nothing; to begin anew, give "
                'the job another name, or say optimizer.state.clear(); for a state that can be loaded, call resume() before state_dict()',
                'BAD_SPEC')


def _described(optimizer, entries):
    steps = {entry.steps for entry in entries.values()}
    text = f'the state of {len(entries)} parameters' + (f' after {max(steps)} steps' if steps else '')
    if not ranks.active():
        return text
    sums = [(name_of(optimizer, g, i, parameter), entry.steps, [_sum(entry.moments[key]) for key in sorted(entry.moments)], _sum(entry.master))
            for g, i, parameter in placed(optimizer) for entry in [entries.get(id(parameter))] if entry is not None]
    return f'{text} (digest {zlib.crc32(repr(sums).encode()):08x})'


def _sum(tensor):
    """Of the bits of a whole tensor: ranks that have different ones would mix them. Shards differ."""
    if tensor is None or is_sharded(tensor):
        return None if tensor is None else str(tensor.placements)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64))


# --- what was saved

def _read(optimizer, groups, saved_of):
    """Entries by id of the parameter. groups: of matching.matched(). saved_of(group, index): what was saved of that parameter here, or
    None. Not collective but for DTensors."""
    spec = job_spec.of(optimizer)
    job_spec.check(optimizer, spec)
    names = moment_names(optimizer._kind, spec)
    for group in groups:
        decoupled = group.get('decoupled_weight_decay')
        if optimizer._kind in ('adam', 'adamw') and decoupled not in (None, optimizer._kind == 'adamw'):
            raise Error(f'this state is of torch.optim.{"AdamW" if decoupled else "Adam"}, whose weight decay is another; load '
                        "it into ballast.torch's optimizer of that name", 'BAD_SPEC')
    entries = {}
    for g, i, parameter in placed(optimizer):
        name = name_of(optimizer, g, i, parameter)
        start = optimizer.param_groups[g].get('initial_accumulator_value', 0)
        entries[id(parameter)] = _entry(optimizer._kind, names, name, parameter, saved_of(g, i) or {}, start)
    return entries


def _entry(kind, names, name, parameter, saved, start):
    """start: what Adagrad's sum is before the first step, which servers add at that step."""
    if not isinstance(saved, Mapping):
        raise Error(f"the state of parameter '{name}' is a {type(saved).__name__}; expected a dict of {_shown(names)}", 'BAD_SPEC')
    absent = [key for key, value in saved.items() if isinstance(value, Mapping) and not value]
    if absent:  # as torch.distributed.checkpoint's functions put it
        raise Error(f"the flattened state has no {absent[0]!r} of parameter '{name}': it is of a durable job, or of other parameters; "
                    'expected one with moments, or a job of that name', 'BAD_SPEC')
    foreign = sorted(key for key in saved if key in KNOWN and key not in names and saved[key] is not None)
    if foreign:
        raise Error(f"the state of parameter '{name}' has {foreign[0]!r}, which this job's optimizer ({kind}) does not keep: "
                    f'it is of another optimizer, or of other options; expected {_shown(names)}', 'BAD_SPEC')
    given = {key: saved[key] for key in names if saved.get(key) is not None}
    steps = _steps(kind, name, saved, bool(given))
    master = _tensor(name, 'master', parameter, saved.get('master'))
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


def _shown(keys):
    return ', '.join(repr(key) for key in keys) or 'none'


def _steps(kind, name, saved, has_moments):
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


def _tensor(name, key, parameter, value):
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise Error(f"{key!r} of parameter '{name}' is no tensor of floating-point numbers", 'BAD_DTYPE')
    if value.shape != parameter.shape:
        raise Error(f"{key!r} of parameter '{name}' has shape {list(value.shape)}, the parameter has {list(parameter.shape)}",
                    'BAD_SPEC')
    return value.detach()


# --- into the job

def _own(value, parameter):
    """What this rank has of `value`, as contiguous fp32 on the CPU. COLLECTIVE where only one of the two is sharded."""
    if is_sharded(value):
        alike = is_sharded(parameter) and value.placements == parameter.placements
        value = local(value) if alike and value.device_mesh == parameter.device_mesh else value.full_tensor()
    if is_sharded(parameter) and value.shape != local(parameter).shape:
        parts = torch.chunk(value, parameter.device_mesh.size())
        rank = parameter.device_mesh.get_local_rank()
        value = parts[rank] if rank < len(parts) else value[:0]
    return value.to(device='cpu', dtype=torch.float32).contiguous()


def _given(member, entry, name):
    """What this rank has of a moment, or of the master (None). COLLECTIVE, see _own()."""
    given = entry.master if name is None else entry.moments.get(name)
    return None if given is None else _own(given, member.parameter)


def _value(session, member, given, name, fresh):
    if name is None:
        return _master(session, member, given, fresh)
    return torch.zeros(local(member.parameter).numel(), dtype=torch.float32, device='cpu') if given is None else given


def _master(session, member, known, fresh):
    """The parameter's values, but where the master that there is rounds to them: then that."""
    values = on_host(member.parameter)
    if known is None and fresh:
        return values.float().contiguous()
    if known is None:
        known = _own(read_array(session, member, member.parameter, 'master'), member.parameter)
    return torch.where(same_bits(known.to(values.dtype), values), known, values.float()).contiguous()


def _batches(members):
    """The same on all ranks."""
    batch, size = [], 0
    for member in members:
        if batch and size + 4 * member.parameter.numel() > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(member)
        size += 4 * member.parameter.numel()
    if batch:
        yield batch


def _collect(optimizer, trained):
    """What registers with the load, and what was edited before."""
    fresh = optimizer._new_tensors(trained)
    optimizer._check_dtypes([member for member, _, _ in fresh], [None] * len(fresh))
    members = optimizer._members + [member for member, _, _ in fresh]
    return Collected(fresh, members, [None] * len(members), [member.edited() for member in members], [], [])


@torch.no_grad()
def _bring_in(optimizer, call, entries, fresh=False, steps=None, blob=b''):
    """In several transactions: until the last one the job's blob says that its state is not whole. fresh: masters are the parameters,
    whatever they were. call: whose it is. steps, blob: of the loop; None: the most that a parameter has made."""
    was_open = optimizer._session is not None
    # Of the job, though they may be frozen here.
    trained = {name_of(optimizer, g, i, parameter) for g, i, parameter in placed(optimizer)
               if id(parameter) in entries and entries[id(parameter)].steps > 0}
    session = optimizer._open(partly=True, trained=trained)
    exchange = optimizer._exchange(call)
    collected, edited, _ = agree(exchange, lambda: _collect(optimizer, trained))
    optimizer._register(collected.fresh, exchange)
    optimizer._commit_written()
    members = [member for member in optimizer._members if id(member.parameter) in entries]
    of = {id(member): entries[id(member.parameter)] for member in members}
    names, writes = moment_names(optimizer._kind, optimizer._options.optimizer), []
    # Parameters are ahead of masters where they were edited, or never pulled.
    if fresh or not names or optimizer._unpulled or any(edited) or any(entry.master is not None for entry in of.values()):
        check_values(exchange, members)
        writes += [('master', None, batch) for batch in _batches(members)]
    fresh = fresh or (not was_open and not optimizer._unpulled)  # else they are, if the job is new
    for k, name in enumerate(names):
        writes += [(f'moment{k + 1}', name, batch) for batch in _batches(members)]
    steps = max((entry.steps for entry in of.values()), default=0) if steps is None else steps
    for i, (array, name, batch) in enumerate(writes):
        given = [_given(member, of[id(member)], name) for member in batch]
        values = together(exchange, lambda given=given, name=name, batch=batch: [
            _value(session, member, mine, name, fresh) for member, mine in zip(batch, given)])
        last = i + 1 == len(writes)
        sealed = optimizer._pack_blob(steps, blob) if last else optimizer._pack_blob(UNDER_WAY)
        before = session.version
        try:
            session.commit_state(array, [member.name for member in batch], values, [of[id(member)].steps for member in batch], sealed)
        finally:
            if session.version > before:
                optimizer._partly = not last
    optimizer._unpulled = False
    optimizer._steps, optimizer._blob, optimizer._skips = steps, blob, 0
    for member in members:
        member.noted()
