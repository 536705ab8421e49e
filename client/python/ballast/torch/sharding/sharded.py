"""A model that shard() has taken: its units, and the job that trains it."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch import arguments
from ballast.torch.group import ranks
from ballast.torch.sharding.collectives import WAYS
from ballast.torch.sharding.memory import Memory
from ballast.torch.sharding.pulls import Pulls
from ballast.torch.sharding.pushes import Pushes
from ballast.torch.sharding.remote import Part, remote_of
from ballast.torch.sharding.unit import Unit
from ballast.torch.sharding.values import Values

if TYPE_CHECKING:
    from ballast import _native
    from ballast.torch.job.job import Job
    from ballast.torch.optimizer import Optimizer
    from ballast.torch.sharding.passes import Passes


# The budget of a server that holds a model which nothing trains: bytes of a parameter, with room for padding, and the least.
_HELD_BYTES, _HELD_BYTES_MIN = 8, 256 << 20
_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Sharded]] = weakref.WeakKeyDictionary()


class Sharded:
    """One rank's side. Threads: the training loop's and autograd's, one at a time."""

    def __init__(self, prefetch_bytes: int, backwards: int, push_early: bool, seed: int, frozen: str, how: str) -> None:
        """Arguments of shard(). frozen: '' for 'state'. how: those that ranks must have alike, as a text."""
        self.units: list[Unit] = []
        self.parameters: dict[Part, torch.Tensor] = {}
        self.places: dict[Part, list[tuple[nn.Module, str, str]]] = {}  # module, its name, the parameter's name in it
        self.tensors: dict[Part, str] = {}  # the job's names
        self.copies: dict[Part, nn.Parameter] = {}  # that are in the places now, within gathered()
        self.passes: Passes | None = None  # there is one as soon as all units are
        self.values = Values(seed, self.places)
        self.memory = Memory()
        self.pulls = Pulls(self.open, prefetch_bytes, self.memory)
        self.pushes = Pushes(backwards, self.memory) if push_early else None
        self.wire = collections.Counter(dict.fromkeys(WAYS, 0))  # bytes that this rank received
        self.how = how
        self.frozen = frozen
        self.number = 0  # among the models of the same ranks, which give theirs to shard() in one order
        self._mixtures = 0  # so far: gathers of different units
        self._job: weakref.ref[Job] | None = None
        self._holder: Optimizer | None = None  # of a model that nothing trains
        self._session: _native.Session | None = None  # the one that parts are placed in
        self._sessions = 0  # so far

    def add(self, name: str, parameters: dict[Part, torch.Tensor], device: torch.device, modules: Sequence[nn.Module],
            known: Mapping[Part, Any], groups: Sequence[Any]) -> Unit:
        """parameters: a unit's, by part. The rest: as Unit's."""
        self.units.append(Unit(name, list(parameters), device, self, modules, known, groups))
        self.parameters.update(parameters)
        return self.units[-1]

    def now(self) -> tuple[int, int, int] | None:
        """Names the values that the job has now; None: no session is open."""
        return None if self._session is None else (self._sessions, self._mixtures, self._session.version)

    def distrust(self) -> None:
        """Ranks may have mixed units: nothing that was gathered counts. COLLECTIVE without a message."""
        self._mixtures += 1

    @property
    def holders(self) -> set[int]:
        """Those that have parts of the model, by number in the default group."""
        return set().union(*(part.ranks for part in self.parameters))

    @property
    def group(self) -> ranks.Group:
        """The ranks that train the job."""
        job = None if self._job is None else self._job()
        return ranks.world() if job is None else job.group

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""
        job = None if self._job is None else self._job()
        return job.options.step_timeout if job is not None else 0.0

    def adopt(self, job: Job, name: str) -> None:
        """An optimizer has been given a parameter of this name."""
        known = None if self._job is None else self._job()
        if known is not None and known is not job and self._holder is not None and known is self._holder.job and not known.is_closed:
            raise Error(f"parameter '{name}' is of a model that was evaluated before it had an optimizer, when nothing of it wanted a "
                        'gradient, and its values are in a job of their own: make the optimizer before the first forward pass',
                        'UNSUPPORTED')
        if known is not None and known is not job and not known.is_closed:
            raise Error(f"parameter '{name}' is of a model that shard() gave to one optimizer, and another has parameters of it: one job "
                        'keeps all of them; close() that optimizer before another is made', 'UNSUPPORTED')
        if job.sharded not in (None, self):
            raise Error(f"parameter '{name}' is of one model that shard() has taken, and the optimizer has parameters of another: shard() "
                        'one module that holds both, or give each an optimizer', 'UNSUPPORTED')
        self._job = weakref.ref(job)
        job.sharded = self
        job.connection.lives_apart()
        job.buffers.of(self.passes.model)

    @property
    def opened(self) -> Job | None:
        """The job, if it is open."""
        job = None if self._job is None else self._job()
        return None if job is None or job.session is None or job.is_closed else job

    def open(self) -> Job:
        """The job, opened by the first call. COLLECTIVE."""
        job = None if self._job is None else self._job()
        if job is None and not any(parameter.requires_grad for parameter in self.parameters.values()):
            job = self._hold()
        if job is None:
            name = self.units[0].parts[0].name
            raise Error(f"parameter '{name}' lives on Ballast's servers, and no optimizer says which: make one, as "
                        'ballast.torch.AdamW(model.named_parameters()), before the first forward pass', 'BAD_REQUEST')
        if job.session is None:
            self._check_together()
            job.open()
        job.check_usable()
        return job

    def _hold(self) -> Job:
        """A model that nothing trains, as a reference of DPO or a teacher, has a job of its own while this object lives: it needs no
        optimizer."""
        from ballast.torch.optimizers import SGD
        needed = sum(part.shape.numel() for part in self.parameters) * _HELD_BYTES
        budgets = {} if arguments.addresses(None) else {'dram': max(_HELD_BYTES_MIN, needed)}
        mesh = next(iter(self.parameters.values())).device_mesh
        group = mesh if mesh.ndim == 1 and mesh.size() < ranks.world().world_size else None
        self._holder = SGD([(part.name, parameter) for part, parameter in self.parameters.items()], durability='none', group=group,
                           name=f'frozen-{ranks.world().run()}-{min(self.holders)}-{self.number}', **budgets)
        return self._holder.job

    def _check_together(self) -> None:
        """Refuses to open a job amid a pass that other ranks do not make: they wait for what the pass gives, and this rank for them."""
        here = self.holders
        elsewhere = sorted(self.group.numbers.keys() - here)
        if elsewhere:
            raise Error(f'parameters of this model are on ranks {sorted(here)}, and ranks {elsewhere} have others, as stages of a pipeline '
                        'do, whose first passes do not begin together: call resume() of the optimizer on all ranks before the first pass',
                        'BAD_REQUEST')

    def check_given(self, given: Iterable[torch.Tensor]) -> None:
        """Refuses an optimizer that lacks parameters of the model, before a job is made without them. given: the optimizer's."""
        there = {remote_of(parameter) for parameter in given}
        missing = next((part for part in self.parameters if part not in there), None)
        if missing is not None:
            raise Error(f"parameter '{missing.name}' lives on the servers alone, by shard(), and is in no group of the optimizer: give the "
                        'optimizer all of model.named_parameters(), not only those that want gradients, or the rest of them by '
                        'add_param_group(); servers keep the value alone of one that is frozen, and no step changes it', 'BAD_SPEC')

    def follow(self, job: Job) -> None:
        """Takes up the session and members that the job has now."""
        if self._session is not job.session:
            index = {remote_of(member.parameter): i for i, member in enumerate(job.members)}
            self.tensors = {part: job.members[i].name for part, i in index.items() if part is not None}
            missing = next((part for part in self.parameters if part not in index), None)
            if missing is not None:
                raise Error(f"parameter '{missing.name}' lives on the servers alone, by shard(), and job '{job.options.job}' was made "
                            'without it: such a job has all parameters from the start; give the job of this model another name', 'BAD_SPEC')
            self.pulls.place({unit: [index[part] for part in unit.parts] for unit in self.units})
            self._session = job.session
            self._sessions += 1
        if self.pushes is not None:
            self.pushes.follow(job)

    def leave(self) -> None:
        """The session is over."""
        self.pulls.forget()
        if self.pushes is not None:
            self.pushes.leave()
        self._session = None

    @property
    def went(self) -> bool:
        """Gradients of the step to come have gone to the servers."""
        return self.pushes is not None and self.pushes.went

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuses a step with these gradients, by member, if they are not those that went to the servers."""
        if self.pushes is not None:
            self.pushes.check(gradients)

    def settle(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A step begins, and takes what went to the servers of these gradients, by member. COLLECTIVE."""
        if self.pushes is not None:
            self.pushes.settle(gradients)

    def discard(self) -> None:
        """No step will take what went. COLLECTIVE."""
        if self.pushes is not None:
            self.pushes.discard()

    def failed(self, attempt: int | None = None) -> None:
        """A step was not made, and what went to the servers for it counts no more. attempt: the session's, which it has still where it
        was not asked for the step, so that it is told now; None: it was told."""
        if self.pushes is not None:
            self.pushes.failed(attempt)

    def stepped(self) -> None:
        """A step was made."""
        if self.pushes is not None:
            self.pushes.stepped()
        if self._session is not None:
            self.pulls.stepped()

    def stats(self) -> dict[str, float]:
        """Pulls so far, their bytes on this rank, gathers whose pull was not ahead of them, and the seconds that gathers waited; bytes that
        this rank received from others in gathers and in reductions of 8 bits."""
        pulls = self.pulls
        return {**self.wire, 'unit_pulls': pulls.count, 'unit_pull_bytes': pulls.bytes, 'unit_pulls_late': pulls.waits,
                'unit_pull_wait_seconds': pulls.wait_seconds}


def adopt(job: Job, names: Sequence[str | None], parameters: Sequence[torch.Tensor]) -> None:
    """The optimizer of `job` has been given parameters, some of them sharded perhaps."""
    for name, parameter in zip(names, parameters):
        part = remote_of(parameter)
        if part is not None:
            part.unit.model.adopt(job, part.name if name is None else name)


def note(model: nn.Module, sharded: Sharded) -> None:
    """`model` is the one that shard() has taken."""
    for module in model.modules():
        _of[module] = weakref.ref(sharded)


def models_of(module: nn.Module) -> list[Sharded]:
    """The models that shard() has taken and that the module has a part of, or all; the same order on all ranks."""
    found = {_of[inner]() for inner in module.modules() if inner in _of}
    return sorted((sharded for sharded in found if sharded is not None), key=lambda sharded: sharded.number)
