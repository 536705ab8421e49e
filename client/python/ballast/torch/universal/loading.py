"""Loads a universal checkpoint into a job."""

from __future__ import annotations

import json
import math
import os
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree

from ballast.errors import Error
from ballast.torch.job.job import Job
from ballast.torch.modes import plainly
from ballast.torch.ranks.together import in_parts, together
from ballast.torch.states import loading
from ballast.torch.states.loading import Plan
from ballast.torch.tensors import placement
from ballast.torch.universal import layout
from ballast.torch.universal.checkpoint import Checkpoint, Stored

if TYPE_CHECKING:
    from ballast.torch.optimizer import Optimizer
    from ballast.torch.ranks.groups import Group

CALL = 'load_universal()'


class Universal(NamedTuple):
    """What a checkpoint has besides parameters and their state."""
    step: int  # of the loop: DeepSpeed's global_steps, as optimizer.resume().step from now on
    lr_scheduler: Any  # the state_dict() of a scheduler, or None
    client_state: dict[str, Any]  # what was given to save_checkpoint(client_state=...)


@plainly
def load_universal(optimizer: Optimizer, folder: str | os.PathLike[str], tag: str | None = None) -> Universal:
    """Loads a universal checkpoint of DeepSpeed or of save_universal(): parameters, fp32 masters, moments and step counts, and lr, betas,
    eps and weight_decay of each group. All ranks call it.

    Each rank checks the CRC-32 of its share of the files, and reads its part of each tensor. Nothing changes before all are checked.
    tag: None for the one that `latest_universal` names."""
    job = optimizer.job
    exchange = job.exchange(CALL)
    job.wait()
    checkpoint, mine = together(exchange, lambda: (Checkpoint(folder, tag), names_of(job)))
    elsewhere = in_parts(exchange, json.dumps(sorted(mine.values())).encode())
    names = {name for said in elsewhere for name in json.loads(said)}
    loading.restore(job, CALL, lambda: _plan(job, checkpoint, mine, names))
    # Copies: tensors are mapped, and the file may be overwritten.
    kept = _pytree.tree_map_only(torch.Tensor, torch.clone, {key: value for key, value in checkpoint.model.items()
                                                             if key == 'lr_scheduler' or key not in layout.RESERVED})
    return Universal(checkpoint.steps_of_loop, kept.pop('lr_scheduler', None), kept)


def check_adam(job: Job) -> None:
    """Refuses an optimizer other than Adam, since a universal checkpoint has only exp_avg and exp_avg_sq."""
    kind = job.algorithm.name
    if kind not in ('adam', 'adamw') or job.spec.amsgrad:
        raise Error(f'a universal checkpoint has the two moments of Adam and AdamW, and this optimizer is {kind}'
                    f'{" with amsgrad" if kind in ("adam", "adamw") else ""}; expected AdamW, Adam or AdamW8bit without amsgrad',
                    'UNSUPPORTED')


def names_of(job: Job) -> dict[int, str]:
    """Returns names by id of the parameter. Refuses a parameter without a name."""
    check_adam(job)
    found: dict[int, str] = {}
    for g, i, parameter in job.parameters.placed():
        name = job.parameters.names.of(job.param_groups[g], i)
        if name is None:
            raise Error(f'the parameter at place {i} of group {g} has no name, but a universal checkpoint goes by names; make the '
                        'optimizer from named_parameters(), or call attach(model)', 'BAD_CONFIG')
        if parameter.numel() > 0:
            found[id(parameter)] = name
    return found


def _plan(job: Job, checkpoint: Checkpoint, mine: dict[int, str], names: set[str]) -> Plan:
    """names: of all ranks' parameters."""
    parameters = {id(parameter): parameter for parameter in job.parameters.all()}
    _check_names(checkpoint, mine, parameters, names)
    loaded = {key: name for key, name in mine.items() if name in checkpoint.trained}
    files = checkpoint.files(sorted(checkpoint.trained & names))
    for path in files[job.group.rank::job.group.world_size]:
        layout.check_digests(path)
    entries = {key: Stored(checkpoint, name, parameters[key].shape, checkpoint.steps(name)) for key, name in loaded.items()}
    _check_steps(checkpoint, {loaded[key]: entry.steps for key, entry in entries.items()})
    for key, entry in entries.items():
        _check_values(loaded[key], parameters[key], entry, job.group)
    _take_options(job, checkpoint, loaded)
    said = json.dumps(sorted((loaded[key], entry.steps) for key, entry in entries.items()))
    return Plan(f'the universal checkpoint at step {checkpoint.steps_of_loop} (digest {zlib.crc32(said.encode()):08x})', entries=entries,
                steps=checkpoint.steps_of_loop)


def _check_names(checkpoint: Checkpoint, mine: dict[int, str], parameters: dict[int, torch.Tensor], names: set[str]) -> None:
    trained = checkpoint.trained
    # A frozen parameter stays as it is, as in DeepSpeed's own load.
    missing = sorted(name for key, name in mine.items() if name not in trained and parameters[key].requires_grad)
    more = sorted(trained - names)
    said = []
    if missing:
        lacking = checkpoint.lacks(missing[0])
        has = f"has no '{lacking}' of parameter '{missing[0]}'" if lacking != layout.FILES['master'] else f"has no parameter '{missing[0]}'"
        said.append(f"'{checkpoint.path}' {has}, which this optimizer trains")
    if more:
        said.append(f"'{checkpoint.path}' has parameter '{more[0]}' with moments, which this optimizer lacks")
    if said:
        raise Error(f'{", and ".join(said)} ({len(missing)} and {len(more)} such); expected the same names on both sides: freeze a '
                    'parameter that is to stay as it is, and give the optimizer those that the checkpoint has', 'BAD_SPEC')
    for name in mine.values():
        lacking = checkpoint.lacks(name) if name in trained else None
        if lacking is not None:
            raise Error(f"'{checkpoint.path}' has no '{lacking}' of parameter '{name}'; take another copy of the checkpoint", 'BAD_SPEC')


def _check_steps(checkpoint: Checkpoint, steps: dict[str, int]) -> None:
    """Refuses parameters of one group with different step counts, since DeepSpeed counts the steps of a group."""
    first: dict[int, str] = {}
    for name, count in steps.items():
        other = first.setdefault(checkpoint.group(name), name)
        if steps[other] != count:
            raise Error(f"parameter '{other}' has made {steps[other]} steps, and '{name}' of the same group {count}, in "
                        f"'{checkpoint.path}'; expected one count: are these the files of two checkpoints?", 'BAD_SPEC')


def _check_values(name: str, parameter: torch.Tensor, entry: Stored, group: Group) -> None:
    """Checks this rank's part of each tensor."""
    key = placement.key_of(name, parameter, group)
    for what, file in layout.FILES.items():
        value = entry.tensor(what)
        if key is not None:
            value = value[tuple(slice(begin, end) for begin, end in placement.box(key, tuple(parameter.shape), group.rank))]
        # aminmax makes no copy, as isfinite(value).all() does.
        if value.numel() > 0 and not all(math.isfinite(each) for each in torch.aminmax(value)):
            raise Error(f"'{file}' of parameter '{name}' has an Inf or a NaN", 'BAD_REQUEST')


# --- hyper-parameters

def _take_options(job: Job, checkpoint: Checkpoint, loaded: dict[int, str]) -> None:
    """Takes lr, betas, eps and weight_decay from DeepSpeed's group that has the parameters of a group here. All else stays."""
    for g, group in enumerate(job.param_groups):
        names = [loaded[id(parameter)] for parameter in group['params'] if id(parameter) in loaded]
        found = [_options(job, name, group, checkpoint.options(name)) for name in names]
        for name, options in zip(names, found):
            for key, value in options.items():
                if value != found[0][key]:
                    raise Error(f"parameters '{names[0]}' and '{name}' are both in group {g} here, but in the checkpoint {key} of one is "
                                f'{found[0][key]} and of the other {value}; give the optimizer a group for each', 'BAD_SPEC')
        if found:
            group.update(found[0])


def _options(job: Job, name: str, mine: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """mine, group: the param_group of parameter `name` here and in the checkpoint."""
    decoupled = group.get('decoupled_weight_decay')
    if decoupled not in (None, job.algorithm.kind == 'adamw'):
        raise Error(f'the checkpoint is of {"AdamW" if decoupled else "Adam"}, whose weight decay works differently; load it into '
                    "ballast.torch's optimizer of that name", 'BAD_SPEC')
    for key, expected in (('bias_correction', True), ('amsgrad', False), ('maximize', bool(mine['maximize']))):
        if bool(group.get(key, expected)) is not expected:
            raise Error(f"the group of parameter '{name}' in the checkpoint has {key}={group[key]!r}; expected {expected}", 'UNSUPPORTED')
    try:
        first, second = group['betas']
        return {'lr': float(group['lr']), 'betas': (float(first), float(second)), 'eps': float(group['eps']),
                'weight_decay': float(group['weight_decay'])}
    except (KeyError, TypeError, ValueError) as error:
        raise Error(f"the group of parameter '{name}' in the checkpoint has no number for lr, betas, eps or weight_decay: {error!r}",
                    'BAD_SPEC') from error
