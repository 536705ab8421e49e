"""State in torch.optim's format on its way into a job: moments, step counts, and the masters of 16-bit parameters."""

import math
from typing import Any, NamedTuple

import torch

from ballast.errors import Error
from ballast.torch import checkpoint, job_spec, ranks
from ballast.torch.agreement import together
from ballast.torch.members import is_sharded, local, on_host
from ballast.torch.modes import same_bits
from ballast.torch.registration import name_of, placed
from ballast.torch.state import MOMENTS, moment_names

# In the blob, in place of the steps made: a load is under way.
UNDER_WAY = 2**64 - 1
# Of parameters in fp32, what one transaction writes: conversions take no more memory than this.
_BATCH_BYTES = 256 << 20
_KNOWN = {name for names in MOMENTS.values() for name in names}


class Entry(NamedTuple):
    """One parameter's state, as it was saved."""
    steps: int
    moments: dict[str, Any]  # by name; empty: zeros
    master: Any


def refuse_partly(job):
    raise Error(f"a load_state_dict() into job '{job}' ended before all of its state was there, and what is there is neither "
                'the old one nor the new: call load_state_dict() again with the same state, or rollback() to one of versions()',
                'INCOMPLETE')


def load(optimizer, state_dict):
    """All ranks, with the same state. What does not fit is refused, on all of them, before anything is changed."""
    before = [dict(group) for group in optimizer.param_groups]

    def look():
        checkpoint.check_groups(optimizer, state_dict)
        named = checkpoint.named(state_dict)
        if named is not None:
            checkpoint.check_job(named, optimizer._options.job)
            return named, None
        checkpoint.load_groups(optimizer, state_dict)
        if not state_dict.get('state') and optimizer._session is None:
            return None, {}  # of an optimizer that had made no step
        return None, _read(optimizer, state_dict)

    def alike(seen):
        named, entries = seen
        if named is not None:
            return f'a state_dict of version {named[1]}'
        steps = {entry.steps for entry in entries.values()}
        return f'the state of {len(entries)} parameters' + (f' after {max(steps)} steps' if steps else '')

    try:
        if ranks.active():  # a rank looks at its own shards: what is wrong with them the others do not see
            def say(mine):
                return ranks.exchange(f"load_state_dict of job '{optimizer._options.job}'", mine, optimizer._options.step_timeout)
            named, entries = together(say, look, alike)
        else:
            named, entries = look()
        if entries:
            _bring_in(optimizer, entries)
    except BaseException:
        for group, old in zip(optimizer.param_groups, before):
            group.clear()
            group.update(old)
        raise
    if named is None:
        return
    _, version = named
    if version is not None:  # else of an optimizer that was not open
        if optimizer._session is None:
            optimizer._options.resume = 'must'  # who loads a state wants the job that has it
        optimizer.rollback(version)
    checkpoint.load_groups(optimizer, state_dict)


# --- what was saved

def _read(optimizer, state_dict):
    """Entries by id of the parameter. Not collective but for DTensors."""
    spec = job_spec.of(optimizer)
    job_spec.check(optimizer, spec)
    names = moment_names(optimizer._kind, spec)
    saved_groups = state_dict['param_groups']
    for group in saved_groups:
        decoupled = group.get('decoupled_weight_decay')
        if optimizer._kind in ('adam', 'adamw') and decoupled not in (None, optimizer._kind == 'adamw'):
            raise Error(f'this state is of torch.optim.{"AdamW" if decoupled else "Adam"}, whose weight decay is another; load '
                        "it into ballast.torch's optimizer of that name", 'BAD_SPEC')
    entries = {}
    for g, i, parameter in placed(optimizer):
        saved = state_dict['state'].get(saved_groups[g]['params'][i]) or {}
        name = name_of(optimizer, g, i, parameter)
        entries[id(parameter)] = _entry(optimizer._kind, names, name, parameter, saved)
    return entries


def _entry(kind, names, name, parameter, saved):
    foreign = sorted(key for key in saved if key in _KNOWN and key not in names and saved[key] is not None)
    if foreign:
        raise Error(f"the state of parameter '{name}' has {foreign[0]!r}, which this job's optimizer ({kind}) does not keep: "
                    f'it is of another optimizer, or of other options; expected {_shown(names)}', 'BAD_SPEC')
    given = {key: saved[key] for key in names if saved.get(key) is not None}
    steps = _steps(kind, name, saved, bool(given))
    if steps == 0:
        return Entry(0, {}, _tensor(name, 'master', parameter, saved.get('master')))
    missing = [key for key in names if key not in given]
    if missing:
        raise Error(f"the state of parameter '{name}' has no {missing[0]!r}; it has {_shown(saved)}, expected "
                    f'{_shown(names)}: is it of another optimizer?', 'BAD_SPEC')
    moments = {}
    for k, key in enumerate(names):
        moment = moments[key] = _tensor(name, key, parameter, given[key])
        if not bool(torch.isfinite(local(moment)).all()):
            raise Error(f"{key!r} of parameter '{name}' has an Inf or a NaN", 'BAD_REQUEST')
        if (kind == 'adagrad' or k > 0) and bool((local(moment) < 0).any()):
            raise Error(f"{key!r} of parameter '{name}' has a negative element, and is a mean of squares", 'BAD_REQUEST')
    return Entry(steps, moments, _tensor(name, 'master', parameter, saved.get('master')))


def _shown(keys):
    return ', '.join(repr(key) for key in keys) or 'none'


def _steps(kind, name, saved, has_moments):
    if 'step' not in saved:
        if has_moments and kind not in ('sgd', 'lion'):
            raise Error(f"the state of parameter '{name}' has no 'step'; it has {_shown(saved)}", 'BAD_SPEC')
        return int(has_moments)  # torch's SGD counts none: all that matters is that there was one
    steps = float(saved['step'])
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


def _moment(member, entry, name):
    if not entry.moments:
        return torch.zeros(local(member.parameter).numel(), dtype=torch.float32, device='cpu')
    return _own(entry.moments[name], member.parameter)


def _master(session, member, entry, fresh):
    """The parameter's values, but where the master that there is rounds to them: then that."""
    values = on_host(member.parameter)
    if entry.master is not None:
        known = _own(entry.master, member.parameter)
    elif fresh:
        return values.float().contiguous()
    else:
        known = torch.empty(member.parameter.numel(), dtype=torch.float32, device='cpu')
        session.read(member.name, 'master', known)
        known = _own(known.reshape(member.parameter.shape), member.parameter)
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


def _parameters_are_ahead(optimizer):
    """Of the masters, on any rank: they were edited, or never pulled."""
    edited = [member.edited(member.parameter) for member in optimizer._members]
    if optimizer._options.world_size > 1:
        edited = [any(each) for each in optimizer._session.exchange(bytes(edited))]
    return optimizer._unpulled or any(edited)


@torch.no_grad()
def _bring_in(optimizer, entries):
    """In several transactions: until the last one the job's blob says that its state is not whole."""
    was_open = optimizer._session is not None
    # Of the job, though they may be frozen here.
    trained = {name_of(optimizer, g, i, parameter) for g, i, parameter in placed(optimizer) if entries[id(parameter)].steps > 0}
    session = optimizer._open(partly=True, trained=trained)
    optimizer._register(optimizer._new_tensors(trained))
    optimizer._commit_written()
    fresh = not was_open and not optimizer._unpulled  # the masters are the parameters
    members = [member for member in optimizer._members if id(member.parameter) in entries]
    of = {id(member): entries[id(member.parameter)] for member in members}
    writes = []
    if _parameters_are_ahead(optimizer) or any(entry.master is not None for entry in of.values()):
        writes += [('master', None, batch) for batch in _batches(members)]
    for k, name in enumerate(moment_names(optimizer._kind, optimizer._options.optimizer)):
        writes += [(f'moment{k + 1}', name, batch) for batch in _batches(members)]
    steps = max((entry.steps for entry in of.values()), default=0)
    for i, (array, name, batch) in enumerate(writes):
        values = [_master(session, member, of[id(member)], fresh) if name is None else _moment(member, of[id(member)], name)
                  for member in batch]
        blob = optimizer._pack_blob(steps if i + 1 == len(writes) else UNDER_WAY)
        before = session.version
        try:
            session.commit_state(array, [member.name for member in batch], values, [of[id(member)].steps for member in batch], blob)
        finally:
            if session.version > before:
                optimizer._partly = i + 1 < len(writes)
    optimizer._unpulled = False
    optimizer._steps, optimizer._blob, optimizer._skips = steps, b'', 0
    for member in members:
        member.noted(member.parameter)
