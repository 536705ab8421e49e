"""Gives whole parameters of a model of shard(): for export, for evaluation on one rank, and to write values."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
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
    """Gives `module` whole parameters for the time of the block, for example to save its state_dict(). `module` is a model of shard(), or a
    part of one. The parameters are copies at the job's version, on the host, in their own dtype; the host needs memory for all of them.

    Forward passes do not need gathered(), since FSDP2 gathers for them. Within the block a forward pass uses the copies. It must run under
    torch.no_grad(), and no other rank has to run it. If the job is open, one rank may enter alone; the first use of a job is for all ranks.

    write: at the end of the block, what it wrote to the copies becomes the values of the parameters, in one transaction. The block may
        write in place, through .data or numpy, or put another Parameter of the same shape and dtype in place. All ranks enter, and write
        the same. A change of requires_grad counts with write and without.

    Errors: an Error if no parameter of the module was sharded. At the end of the block, an Error names the parameter if it was written to
    without write; if it has another shape or dtype, was taken out or added; or if its module was replaced. RANKS_DIFFER if ranks wrote
    different values. After an error, in the block or at its end, the module is as it was before the block, attributes included."""
    models = models_of(module)
    for model in models:
        model.passes.settle()
        model.passes.prepare()
    copies = _Copies(module, {part: (model, unit) for model in models for unit in model.units for part in unit.parts})
    if not copies.places:
        raise Error('gathered(module): no parameter of this module lives on the servers. Call shard() first, give gathered() that model '
                    'or a part of it, and enter it outside of forward passes', 'BAD_REQUEST')
    refused: Exception | None = None
    changed: dict[Part, torch.Tensor] = {}
    try:
        copies.enter()
        yield module
        changed = copies.changed()
        if changed and not write:
            raise Error(f"parameter '{next(iter(changed)).name}' was written to within gathered(), but that was a copy, and the servers "
                        'still have their own values. Use gathered(module, write=True), on all ranks, or load a state_dict() that has the '
                        "new values by the model's load_state_dict(), outside gathered()", 'UNSUPPORTED')
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
    """Gives the servers what the block wrote. COLLECTIVE. refused: what the block raised on this rank, which becomes an error on all."""
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
                raise Error(f"gathered(write=True): ranks {first} and {rank} wrote different values to parameter '{name}', or one of them "
                            'did not write to it; write the same on all ranks', 'RANKS_DIFFER')
    if any(digest is not None for _, digest in written.values()):
        give(job, {id(model.parameters[part]): part.of(value) for part, value in changed.items()})


class _Place(NamedTuple):
    module: nn.Module
    leaf: str
    part: Part
    parameter: nn.Parameter


class _Copies:
    """Copies that take the place of a module's parameters, and what is needed to restore the module."""

    def __init__(self, module: nn.Module, owners: Mapping[Part, tuple[Sharded, Unit]]) -> None:
        """owners: the model and unit of each part, at least for those of the module."""
        self._module, self._owners = module, owners
        self.places = [_Place(inner, leaf, part, parameter) for inner in module.modules()
                       for leaf, parameter in inner._parameters.items()
                       if parameter is not None and (part := part_of(parameter)) is not None]
        self._leaves = {inner: set(inner._parameters) for inner in module.modules()}
        self._applies: dict[nn.Module, Any] = {}  # what converts a module outside of the block
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
        with _digesting() as threads:
            for part, values in _read(parameters, self._owners):
                self._copies[part] = nn.Parameter(values, requires_grad=parameters[part].requires_grad)
                digests[part] = threads.submit(digest_of, values)
            self._digests = {part: digest.result() for part, digest in digests.items()}
        for inner, leaf, part, _ in self.places:
            model, unit = self._owners[part]
            inner._parameters[leaf] = model.copies[part] = self._copies[part]
            for wrapped in unit.modules:
                self._applies.setdefault(wrapped, vars(wrapped)['_apply'])
                vars(wrapped)['_apply'] = functools.partial(_refuse_apply, part)

    def leave(self) -> None:
        for inner, leaf, part, parameter in self.places:
            inner._parameters[leaf] = parameter
            self._owners[part][0].copies.pop(part, None)
        for wrapped, its in self._applies.items():
            vars(wrapped)['_apply'] = its

    def carry(self) -> None:
        """Gives each parameter the requires_grad of its copy."""
        for _, _, part, parameter in self.places:
            parameter.requires_grad_(self._there[part].requires_grad)

    def restore(self) -> None:
        for restore in self._before:
            restore()

    def changed(self) -> dict[Part, torch.Tensor]:
        """Returns the values that the block has written."""
        inside = set(self._module.modules())
        there: dict[Part, nn.Parameter] = {}
        memory: dict[int, Part] = {}
        for inner, leaf, part, _ in self.places:
            if inner not in inside:
                raise _refused(part.name, 'its module was replaced or taken out')
            now = self._checked(part, inner._parameters.get(leaf))
            if there.setdefault(part, now) is not now:
                raise _refused(part.name, 'it is shared by modules, one of which has another Parameter now')
            if now.numel() > 0 and memory.setdefault(now.data_ptr(), part) is not part:
                raise _refused(part.name, f"it shares memory with '{memory[now.data_ptr()].name}' now")
        self._check_added()
        self._there = there
        with _digesting() as threads:
            digests = dict(zip(there, threads.map(digest_of, there.values())))
        return {part: now.detach().cpu() for part, now in there.items() if digests[part] != self._digests[part]}

    def _checked(self, part: Part, now: nn.Parameter | None) -> nn.Parameter:
        """Checks what the block has left in the place of a copy, and returns it."""
        if now is None:
            raise _refused(part.name, 'it was taken out of its module')
        if now.shape != part.shape or now.dtype != self._copies[part].dtype:
            raise _refused(part.name, f'it has shape {list(now.shape)} and {now.dtype} now, and had {list(part.shape)} and '
                                      f'{self._copies[part].dtype}')
        if now.grad is not None:
            raise _refused(part.name, 'a backward pass gave the copy a gradient, which no step takes')
        return now

    def _check_added(self) -> None:
        for path, inner in self._module.named_modules():
            before = self._leaves.get(inner, ())
            added = next((leaf for leaf, now in inner._parameters.items() if now is not None and leaf not in before), None)
            if added is not None:
                raise _refused(f'{path}.{added}' if path else added, 'it was added')


def _read(parameters: Mapping[Part, nn.Parameter], owners: Mapping[Part, tuple[Sharded, Unit]],
          ) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yields whole parameters in their own dtype. They come by pulls; if gathers have another dtype, masters are read one by one and
    rounded."""
    pulled: dict[Sharded, list[Part]] = {}
    for part, parameter in parameters.items():
        model, _ = owners[part]
        job = model.open_job()
        if DTYPES[parameter.dtype] == job.options.optimizer.working:
            pulled.setdefault(model, []).append(part)
            continue
        values = model.pulls.whole_memory.take(part.shape.numel(), torch.float32)
        job.session.read(model.tensors[part], 'master', values)
        yield part, values.to(parameter.dtype).view(part.shape)
    for model, parts in pulled.items():
        yield from model.pulls.whole(parts)


def _digesting() -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads for digests of copies. More would only wait for memory."""
    return concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), 'ballast-gathered')


def _refused(name: str, what: str) -> Error:
    return Error(f"parameter '{name}' within gathered(): {what}. A job keeps the modules and shapes that shard() took. Change those "
                 'before shard(), in a new job, and write only values within gathered(model, write=True). The model is as it was before '
                 'the block', 'UNSUPPORTED')


def _refuse_apply(part: Part, *_: Any, **__: Any) -> NoReturn:
    raise _refused(part.name, 'to() and the like change its dtype or device')


def _kept(of: Any) -> Callable[[], None]:
    """Returns a function that restores the class and attributes of an object, and the contents of lists and dicts among these."""
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
