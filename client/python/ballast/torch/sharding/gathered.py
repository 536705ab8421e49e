"""Whole parameters of a model that shard() has taken, for export, for evaluation on one rank, and to write values."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.ranks.together import everyone
from ballast.torch.sharding.sharded import Sharded, models_of
from ballast.torch.sharding.unit import Unit
from ballast.torch.states.values import give
from ballast.torch.tensors.kinds import DTYPES, digest_of
from ballast.torch.tensors.remote import Part, part_of


@contextlib.contextmanager
def gathered(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Within it, `module` (a model that shard() has taken, or a part of one) has whole parameters at the job's version, on the host, in
    their own dtype, and in memory for all of them: to save state_dict(), say. They are copies. Forward passes need no gathered(): FSDP2
    gathers for them; within it they take the copies, under torch.no_grad(), and no other rank has to run them. Any one rank may enter, if
    the job is open; the first use of a job is of all ranks.

    write: what the block has written to copies (in place, through .data or numpy, or by another Parameter of the same shape and dtype)
    becomes the parameters' values at its end, in one transaction. All ranks enter, and write the same. requires_grad counts with and
    without.

    Errors: an Error if no parameter of the module was sharded. At the end of the block, with the name of the parameter: one was written
    to without write; one has another shape or dtype, was taken out or added, or its module was replaced; RANKS_DIFFER if ranks wrote
    other values. The module is then as it was before the block, attributes included, and so it is if the block raises."""
    models = models_of(module)
    for model in models:
        model.passes.settle()
        model.passes.prepare()
    copies = _Copies(module, {part: (model, unit) for model in models for unit in model.units for part in unit.parts})
    if not copies.places:
        raise Error('gathered(module): no parameter of it lives on the servers; was shard() called, does no forward pass run, and is the '
                    'module the model, or a part of it?', 'BAD_REQUEST')
    refused: Exception | None = None
    changed: dict[Part, torch.Tensor] = {}
    try:
        copies.enter()
        yield module
        changed = copies.changed()
        if changed and not write:
            raise Error(f"parameter '{next(iter(changed)).name}' was written to within gathered(): that was a copy, and the servers have "
                        'their own values still; say gathered(module, write=True), on all ranks, or load a state_dict() that has the new '
                        "values by the model's load_state_dict(), outside gathered()", 'UNSUPPORTED')
        copies.carry()
    except BaseException as error:
        copies.restore()
        if not write or not isinstance(error, Exception):
            raise
        refused = error
    finally:
        copies.leave()
    if write:
        for model in models:
            _give(model, {part: value for part, value in changed.items() if part in model.parameters}, refused)


def _give(model: Sharded, changed: dict[Part, torch.Tensor], refused: Exception | None) -> None:
    """COLLECTIVE. refused: what the block raised on this rank, which is an error on all."""
    job = model.open()

    def act() -> dict[str, int | None]:
        if refused is not None:
            raise refused
        return {part.name: digest_of(changed[part]) if part in changed else None for part in model.parameters}
    _, said = everyone(job.exchange('gathered(write=True)'), act, lambda digests: json.dumps(digests).encode())
    written: dict[str, tuple[int, int | None]] = {}
    for rank, digests in enumerate(map(json.loads, said)):
        for name, digest in digests.items():
            first, other = written.setdefault(name, (rank, digest))
            if digest != other:
                raise Error(f"gathered(write=True): ranks {first} and {rank} wrote other values to parameter '{name}', or one of them did "
                            'not write to it; write the same on all ranks', 'RANKS_DIFFER')
    if any(digest is not None for _, digest in written.values()):
        give(job, {id(model.parameters[part]): part.of(value) for part, value in changed.items()})


class _Place(NamedTuple):
    module: nn.Module
    leaf: str
    part: Part
    parameter: nn.Parameter


class _Copies:
    """Copies in the place of the parameters of a module, and all that the module was before."""

    def __init__(self, module: nn.Module, owners: Mapping[Part, tuple[Sharded, Unit]]) -> None:
        """owners: of each part, at least of those of the module."""
        self._module, self._owners = module, owners
        self.places = [_Place(inner, leaf, part, parameter) for inner in module.modules()
                       for leaf, parameter in inner._parameters.items()
                       if parameter is not None and (part := part_of(parameter)) is not None]
        self._leaves = {inner: set(inner._parameters) for inner in module.modules()}
        self._before: list[Callable[[], None]] = []
        self._copies: dict[Part, nn.Parameter] = {}
        self._digests: dict[Part, int] = {}
        self._there: dict[Part, nn.Parameter] = {}  # that the block has left

    def enter(self) -> None:
        # transformers' models keep their sizes in a config too.
        configs = {id(config): config for config in (getattr(inner, 'config', None) for inner in self._leaves)
                   if isinstance(getattr(config, '__dict__', None), dict)}
        self._before = [_kept(each) for each in (*self._leaves, *configs.values())]
        parameters = {part: parameter for _, _, part, parameter in self.places}
        digests = {}
        with concurrent.futures.ThreadPoolExecutor(1, 'ballast-gathered') as digesting:
            for part, values in _read(parameters, self._owners):
                self._copies[part] = nn.Parameter(values, requires_grad=parameters[part].requires_grad)
                digests[part] = digesting.submit(digest_of, values)
            self._digests = {part: digest.result() for part, digest in digests.items()}
        for inner, leaf, part, _ in self.places:
            model, unit = self._owners[part]
            inner._parameters[leaf] = model.copies[part] = self._copies[part]
            for wrapped in unit.modules:
                vars(wrapped)['_apply'] = functools.partial(_refuse_apply, part)  # FSDP2's own takes the copies for parameters

    def leave(self) -> None:
        for inner, leaf, part, parameter in self.places:
            inner._parameters[leaf] = parameter
            model, unit = self._owners[part]
            model.copies.pop(part, None)
            for wrapped in unit.modules:
                vars(wrapped).pop('_apply', None)

    def carry(self) -> None:
        """What was said of a copy's requires_grad is said of the parameter's."""
        for _, _, part, parameter in self.places:
            parameter.requires_grad_(self._there[part].requires_grad)

    def restore(self) -> None:
        for restore in self._before:
            restore()

    def changed(self) -> dict[Part, torch.Tensor]:
        """The values that the block has written."""
        inside = set(self._module.modules())
        there: dict[Part, nn.Parameter] = {}
        memory: dict[int, Part] = {}
        for inner, leaf, part, _ in self.places:
            now = inner._parameters.get(leaf)
            if inner not in inside:
                raise _refused(part.name, 'its module was replaced or taken out')
            if now is None:
                raise _refused(part.name, 'it was taken out of its module')
            if now.shape != part.shape or now.dtype != self._copies[part].dtype:
                raise _refused(part.name, f'it has shape {list(now.shape)} and {now.dtype} now, and had {list(part.shape)} and '
                                          f'{self._copies[part].dtype}')
            if there.setdefault(part, now) is not now:
                raise _refused(part.name, 'it is shared by modules, one of which has another Parameter now')
            if now.numel() > 0 and memory.setdefault(now.data_ptr(), part) is not part:
                raise _refused(part.name, f"it shares memory with '{memory[now.data_ptr()].name}' now")
            if now.grad is not None:
                raise _refused(part.name, 'a backward pass gave the copy a gradient, which no step takes')
        for path, inner in self._module.named_modules():
            added = next((leaf for leaf, now in inner._parameters.items() if now is not None and leaf not in self._leaves.get(inner, ())),
                         None)
            if added is not None:
                raise _refused(f'{path}.{added}' if path else added, 'it was added')
        self._there = there
        return {part: now.detach().cpu() for part, now in there.items() if digest_of(now) != self._digests[part]}


def _read(parameters: Mapping[Part, nn.Parameter], owners: Mapping[Part, tuple[Sharded, Unit]],
          ) -> Iterator[tuple[Part, torch.Tensor]]:
    """Whole parameters in their own dtype: by pulls, or read one by one and rounded where gathers have another."""
    pulled: dict[Sharded, list[Part]] = {}
    for part, parameter in parameters.items():
        model, _ = owners[part]
        job = model.open_job()
        if DTYPES[parameter.dtype] == job.options.optimizer.working:
            pulled.setdefault(model, []).append(part)
            continue
        values = torch.empty(part.shape.numel(), dtype=torch.float32, device='cpu')
        job.session.read(model.tensors[part], 'master', values)
        yield part, values.to(parameter.dtype).view(part.shape)
    for model, parts in pulled.items():
        yield from model.pulls.whole(parts)


def _refused(name: str, what: str) -> Error:
    return Error(f"parameter '{name}' within gathered(): {what}. A job has the modules and shapes that shard() took: change those "
                 'before shard(), in a new job, and write values alone, within gathered(model, write=True). The model is as it was before '
                 'the block', 'UNSUPPORTED')


def _refuse_apply(part: Part, *_: Any, **__: Any) -> NoReturn:
    raise _refused(part.name, 'to() and the like change its dtype or device')


def _kept(of: Any) -> Callable[[], None]:
    """Returns what brings back the class and attributes of an object, and what lists and dicts among these had."""
    kind, before = type(of), dict(vars(of))
    contents = [(value, value.copy()) for value in before.values() if isinstance(value, (dict, list, set))]

    def restore() -> None:
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        if type(of) is not kind:
            of.__class__ = kind  # as torch.nn.utils.parametrize gives it another
        vars(of).clear()
        vars(of).update(before)
    return restore
