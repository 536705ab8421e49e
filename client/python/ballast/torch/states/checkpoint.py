"""A job's state_dicts, and the way back to a version. A state_dict either names the job and a version that its servers keep, or is in
torch's own format."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.utils import _pytree

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch.job import edits
from ballast.torch.job.job import Job
from ballast.torch.job.opened import OpenJob
from ballast.torch.ranks.groups import Exchange
from ballast.torch.ranks.together import alike, everyone
from ballast.torch.states import marker, matching
from ballast.torch.tensors import marks, placement

Result = TypeVar('Result')

# Keys of a group that are not options of it.
_NOT_OPTIONS = ('params', 'param_names', marker.KEY)


def options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


class _Packed(dict[str, Any]):
    """One of torch's param_groups. When torch.distributed.checkpoint replaces numbers by names, param_names disappears: a group of
    torch.optim mostly has none, and Distributed Checkpoint reads a state only if it finds every key of this group. A pickle or copy of a
    group is an OrderedDict."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == 'params' and value and isinstance(value[0], str):
            self.pop('param_names', None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())


# torch looks into dicts, but not into subclasses of dict.
_pytree.register_pytree_node(_Packed, lambda group: (list(group.values()), list(group)),
                             lambda values, keys: _Packed(zip(keys, values)))


def _packed(job: Job, said: marker.Marker | None = None) -> list[dict[str, Any]]:
    """Returns torch's param_groups, with numbers instead of parameters, and with names if all parameters of a group have one."""
    packed: list[dict[str, Any]] = []
    count = 0
    for group, names in zip(job.param_groups, matching.names(job.parameters)):
        packed.append(_Packed({**options(group), 'params': list(range(count, count + len(group['params'])))}))
        count += len(group['params'])
        if names:
            packed[-1]['param_names'] = names
        if said is not None:
            packed[-1][marker.KEY] = said.tensor()
    return packed


def unopened(job: Job) -> dict[str, Any]:
    """Returns the state_dict of a job that is not open. It names no version."""
    said = marker.Marker(job.options.job, origin=job.origin, begins=job.options.resume == 'never')
    return {'state': _extras(job), 'param_groups': _packed(job, said)}


def keep(job: Job, opened: OpenJob) -> dict[str, Any]:
    """Returns a state_dict that names the job's current version, and makes the servers keep that version. opened: the job's."""
    kept = job.kept.keep(opened.session)
    said = marker.Marker(job.options.job, kept.version, job.progress.steps, life=kept.life, decided_by=kept.decided_by,
                         edited=edits.pending(opened))
    return {'state': _extras(job), 'param_groups': _packed(job, said)}


def full(job: Job, whole: bool) -> dict[str, Any]:
    """Returns the state as torch.optim's optimizer of the same name would. A job without steps gives its moments too, because Distributed
    Checkpoint reads only the keys of the state_dict that it is given. whole: as for Job.read_state(). Otherwise a DTensor whose parts
    Distributed Checkpoint would mistake is refused."""
    parameters = list(job.parameters.all())
    if not whole:
        for g, i, parameter in job.parameters.placed():
            placement.check_torchs(job.parameters.name_of(g, i, parameter), parameter)
    read = {i: job.read_state(parameter, whole) for i, parameter in enumerate(parameters)}
    entries: dict[int, dict[str, Any]] = {i: {**entry} for i, entry in read.items() if entry}
    state = {i: entry for i, entry in entries.items() if entry['step'] > 0} or entries
    if state is entries and any(group.get('dampening') for group in job.param_groups):
        # torch's SGD tells its first step, which dampens nothing, by a momentum that is not there.
        state = {i: {'step': entry['step']} for i, entry in entries.items()}
    for i, extras in _extras(job).items():
        state[i] = {**state.get(i, {}), **extras}
    return {'state': state, 'param_groups': _packed(job)}


def _extras(job: Job) -> dict[int, dict[str, Any]]:
    """Returns what others keep beside our state, by torch's number of the parameter."""
    found = {i: job.extras.get(parameter) for i, (_, _, parameter) in enumerate(job.parameters.placed())}
    return {i: dict(extras) for i, extras in found.items() if extras}


def check_options(job: Job, groups: Sequence[dict[str, Any]]) -> None:
    """Refuses a group without options, which Distributed Checkpoint makes from stages of a pipeline. groups: of matching.matched()."""
    for g, saved in enumerate(groups):
        if 'lr' not in saved:
            name = job.parameters.name_of(g, 0, job.param_groups[g]['params'][0])
            raise Error(f"the state's group of parameter '{name}' has no 'lr', nor other options of group {g}. If ranks have different "
                        'parameters, as stages of a pipeline do, torch saves only the groups of one rank: save and load with '
                        'StateDictOptions(flatten_optimizer_state_dict=True)', 'BAD_SPEC')


def load_groups(job: Job, groups: Sequence[dict[str, Any]]) -> None:
    """groups: of matching.matched()."""
    for group, saved in zip(job.param_groups, groups):
        group.update(copy.deepcopy(options(saved)))  # the loop may change its own in place, a learning rate in a tensor say


def check_job(said: marker.Marker, mine: str) -> None:
    """mine: this job's name."""
    if said.job != mine:
        raise Error(f"the state_dict is of job '{said.job}' at version {said.version}, but this optimizer is of job '{mine}'; give it "
                    f"name='{said.job}'", 'BAD_SPEC')


def before_torchs(job: Job) -> None:
    """Prepares a job for functions of torch.distributed.checkpoint, which look for state before they take a state_dict or load one. To
    load a flattened state they read only the keys of the optimizer's param_groups, and moments only if the optimizer has some."""
    if job.gives_moments:
        job.open(alone=True)
    for group in job.param_groups:
        if job.gives_moments:
            group.pop(marker.KEY, None)
        else:
            group.setdefault(marker.KEY, '')


def versions(job: Job) -> list[int]:
    """Returns the versions that all servers keep."""
    was_open = job.opened is not None
    opened = job.open(partly=True)
    opened = opened if job.progress.partly else job.open(alone=was_open)
    return [pin.version for pin in opened.session.pins()]


def rollback(job: Job, version: int, said: marker.Marker | None = None) -> None:
    """Takes the job, parameters included, back to a version that a state_dict named. said: what that state_dict says. If parameters had
    edits when it was taken, on any rank, they now stay as they are, as edits of that version. COLLECTIVE."""
    was_open = job.opened is not None
    if not was_open:  # ranks that make another call would be in its opening
        _agree_version(job, version, job.check_usable)
    try:
        _roll_back(job, version, said)
    except BaseException:
        if not was_open:
            job.leave()
        raise


def _agree_version(job: Job, version: int, act: Callable[[], Result]) -> Result:
    """Runs act() on every rank, and returns its result here. Refuses ranks that name different versions."""
    return alike(job.exchange('rollback()'), act, lambda _: [('the version', str(version))])


def _roll_back(job: Job, version: int, said: marker.Marker | None) -> None:
    life, decided_by = (0, (0, 0)) if said is None else (said.life, said.decided_by)
    if job.opened is None:
        job.open(partly=True)

    def look() -> OpenJob:
        opened = job.open(partly=True)
        for member in opened.members:
            member.check_shape()  # a pull could not write to it
        if job.options.rank == 0:
            job.kept.check(opened.session, _native.KeptVersion(version, life, decided_by))
        return opened
    opened = _agree_version(job, version, look)
    session = opened.session
    opened.give_values(job.exchange('rollback()'))
    job.discard(job.exchange('rollback()'))
    edits.commit_written(opened, job.exchange('rollback()'))
    before = session.version
    if before != version:
        try:
            session.restore(_native.KeptVersion(version, life, decided_by))
        finally:  # Ctrl-C may come when the job is there
            if session.version != before:
                opened.unpulled = True
                opened.take_blob()
    job.progress.check_whole(job.options.job)
    job.kept.loaded(version)
    _, edited = everyone(job.exchange('rollback()'), lambda: said is not None and said.edited != 0, lambda edited: bytes([edited]))
    if any(map(any, edited)):
        _keep_edits(opened, job.exchange('rollback()'), said, version)
    else:
        _pull_over_edits(opened, version)


def _keep_edits(opened: OpenJob, exchange: Exchange, said: marker.Marker | None, version: int) -> None:
    edits.keep(opened, exchange)
    opened.unpulled = False
    if opened.options.rank == 0 and said is not None and said.edited != edits.digest(opened):
        warn(f"the state of version {version} was taken while parameters held values that no step had taken. Only the model's own "
             'state_dict() has those values, and the parameters here hold others. Load the state of the model, too')


def _pull_over_edits(opened: OpenJob, version: int) -> None:
    edited = [member for member, is_edited in zip(opened.members, marks.edited(opened.members)) if is_edited]
    before = [member.digest_now() for member in edited]
    opened.pull()
    undone = [member.name for member, digest in zip(edited, before) if member.digest_now() != digest]
    if undone:
        warn(f"parameter '{undone[0]}'{f' and {len(undone) - 1} others, which were' if undone[1:] else ', which was'} written to since the "
             f"last step, now hold{'' if undone[1:] else 's'} the value of version {version}: a state that names a version brings its "
             "parameters too. To keep other values, load the model's state after the optimizer's")
