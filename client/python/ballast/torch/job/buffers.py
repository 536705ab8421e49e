"""Buffers of the models that a job trains: statistics of BatchNorm, counters. They are the trainer's, and no server keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ballast.errors import warn
from ballast.torch.job.modules import all_modules
from ballast.torch.job.naming import unwrapped
from ballast.torch.tensors.kinds import digest_of

# Names that a warning has.
_TOLD = 3
# Larger buffers are not compared between steps: they are tables.
_COMPARED_BYTES = 64 << 20


class _Buffer:
    """One of a module's, by its name there."""

    def __init__(self, name: str, module: nn.Module, leaf: str) -> None:
        self.name, self.key = name, (id(module), leaf)
        self._module, self._leaf = weakref.ref(module), leaf

    @property
    def is_statistic(self) -> bool:
        """Training changes it for sure. A layer that was put to eval() keeps its statistics."""
        module = self._module()
        return isinstance(module, _NormBase) and module.training

    def digest(self) -> int | None:
        """None: nobody can tell."""
        module = self._module()
        buffer = None if module is None else module._buffers.get(self._leaf)
        if buffer is None:
            return None
        try:
            return None if buffer.numel() * buffer.element_size() > _COMPARED_BYTES else digest_of(buffer)
        except (RuntimeError, TypeError, ValueError):  # it has no memory of its own, as on the meta device or in a lazy layer
            return None


class Buffers:
    """Those that a state_dict() of a model has, and that a resume leaves as the new process made them."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._job, self._steps = '', 0
        self._watched: list[_Buffer] = []
        self._digests: list[int | None] | None = None  # of those watched, at a step

    def of(self, model: nn.Module) -> None:
        """The job trains this model too."""
        if all(there() is not model for there in self._models):
            self._models.append(weakref.ref(model))

    def warn(self, job: str, steps: int, trained: Iterable[torch.Tensor]) -> None:
        """The job goes on after so many steps. trained: its parameters, whose modules may be of no model that the job knows.

        Names all buffers of the models that it knows. Of others it names statistics now, and those that training changes at the second
        step: masks and rotary tables stay as they are."""
        self._job, self._steps = job, steps
        models = [model for model in (there() for there in self._models) if model is not None]
        known = list(_persistent(models))
        mine = {buffer.key for buffer in known}
        others = {id(each) for each in trained} - {id(each) for model in models for each in model.parameters()}
        found = [buffer for buffer in _persistent(_owners(others)) if buffer.key not in mine]
        statistics = [buffer.name for buffer in found if buffer.is_statistic]
        self._watched, self._digests = [buffer for buffer in found if not buffer.is_statistic], None
        names = [buffer.name for buffer in known] + statistics
        if names:
            warn(f"job '{job}' goes on after {steps} steps, but no server keeps buffers of the model: {_some(names)} are as this process "
                 f'made or loaded them. {_ADVICE}')

    def before_step(self) -> None:
        """Looks, at two steps after a resume, which buffers training changes."""
        if not self._watched:
            return
        digests, before = [buffer.digest() for buffer in self._watched], self._digests
        if before is None:
            self._digests = digests
            return
        changed = [buffer.name for buffer, was, now in zip(self._watched, before, digests)
                   if None not in (was, now) and was != now]
        self._watched, self._digests = [], None
        if changed:
            warn(f"job '{self._job}' went on after {self._steps} steps, and training changes buffers of the model that no server keeps: "
                 f'{_some(changed)} began as this process made or loaded them. {_ADVICE}')


_ADVICE = ("Save them with each checkpoint: torch.save(dict(model.named_buffers()), 'buffers.pt'). Load them before resume(): "
           "model.load_state_dict(torch.load('buffers.pt'), strict=False)")


def _some(names: Sequence[str]) -> str:
    return ', '.join(names[:_TOLD]) + (f' and {len(names) - _TOLD} more' if len(names) > _TOLD else '')


def _persistent(models: Iterable[nn.Module]) -> Iterator[_Buffer]:
    """Buffers that a state_dict() has, each once."""
    seen = set()
    for model in models:
        for path, module in model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and leaf not in module._non_persistent_buffers_set and (id(module), leaf) not in seen:
                    seen.add((id(module), leaf))
                    yield _Buffer(unwrapped(f'{path}.{leaf}' if path else leaf), module, leaf)


def _owners(wanted: Set[int]) -> list[nn.Module]:
    """Returns the models that parameters of these ids are of, the largest first."""
    if not wanted:
        return []
    parents: dict[int, list[nn.Module]] = {}  # by id of the child
    up: list[nn.Module] = []  # still to go up from
    for module in all_modules():
        for child in list(module._modules.values()):
            parents.setdefault(id(child), []).append(module)
        if not wanted.isdisjoint(map(id, list(module._parameters.values()))):
            up.append(module)
    roots, seen = [], {id(module) for module in up}
    while up:
        module = up.pop()
        above = parents.get(id(module), [])
        if not above:
            roots.append(module)
        fresh = {id(each): each for each in above if id(each) not in seen}
        seen |= fresh.keys()
        up += fresh.values()
    return sorted(roots, key=lambda root: -sum(1 for _ in root.modules()))
