"""A model of shard(): its units, and the job that trains it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ballast import _native
from ballast.errors import Error
from ballast.torch import algorithms, arguments, options
from ballast.torch.agreement import gathers
from ballast.torch.agreement.gathers import Order
from ballast.torch.job.features import Feature
from ballast.torch.job.job import Job, made
from ballast.torch.job.naming import Group, Parameters
from ballast.torch.job.opened import OpenJob
from ballast.torch.ranks import groups
from ballast.torch.sharding.model import Model
from ballast.torch.sharding.passes import Passes
from ballast.torch.sharding.pulls import Pulls
from ballast.torch.sharding.pushes import Pushes
from ballast.torch.sharding.unit import Unit
from ballast.torch.tensors.kinds import is_sharded, local
from ballast.torch.tensors.remote import Part, part_of

if TYPE_CHECKING:
    from ballast.torch.sharding.wrapped import Wrapped

# The budget of a server that holds a model which nothing trains: bytes of a parameter, with room for padding, and the least.
_HELD_BYTES, _HELD_BYTES_MIN = 8, 256 << 20
_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Sharded]] = weakref.WeakKeyDictionary()
_of_part: weakref.WeakKeyDictionary[Part, weakref.ref[Sharded]] = weakref.WeakKeyDictionary()
_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]] = weakref.WeakKeyDictionary()  # by their modules


class Sharded(Model, Feature):
    """One rank's side. Threads: the training loop's and autograd's, one at a time."""

    def __init__(self, prefetch_bytes: int, backwards: int, push_early: bool, seed: int, frozen: str, working: str,
                 how: str) -> None:
        """Arguments of shard(). frozen: '' for 'state'. working: '' for None. how: those that ranks must have alike, as a text."""
        super().__init__(seed, frozen, working, how)
        self.units: list[Unit] = []
        self.tensors: dict[Part, str] = {}  # the job's names
        self._passes: Passes | None = None
        self.pulls = Pulls(self.open_job, prefetch_bytes, self.memory)
        self._pushes = Pushes(backwards, self.memory) if push_early else Feature()
        self._mixtures = 0  # so far: gathers of different units
        self._pushing = 0  # bytes of gradients of the step that has begun
        self._pushed = 0  # of all steps that were made
        self._job: weakref.ref[Job] | None = None
        self._holder: Job | None = None  # of a model that nothing trains
        self._session: _native.Session | None = None  # the one that parts are placed in
        self._sessions = 0  # so far

    def add(self, name: str, parameters: dict[Part, nn.Parameter], device: torch.device, modules: Sequence[Wrapped],
            known: Mapping[Part, Any], groups: Sequence[Any]) -> Unit:
        """Adds a unit. parameters: the unit's, by part. The rest: as for Unit."""
        self.units.append(Unit(name, list(parameters), device, self, self.pulls.take, modules, known, groups))
        self.parameters.update(parameters)
        _of_part.update(dict.fromkeys(parameters, weakref.ref(self)))
        _units.update(dict.fromkeys(modules, weakref.ref(self.units[-1])))
        return self.units[-1]

    def watch(self, model: nn.Module) -> None:
        """Hooks the passes of the model that shard() was given. All of its units are there."""
        self._passes = Passes(model, self, self.units, self.open, self._pushes.discard)

    @property
    def passes(self) -> Passes:
        if self._passes is None:
            raise Error('shard() has not returned yet; use the model that it returns', 'BAD_REQUEST')
        return self._passes

    def now(self) -> tuple[int, int, int] | None:
        """Returns a name of the values that the job has now. None: no session is open."""
        return None if self._session is None else (self._sessions, self._mixtures, self._session.version)

    def differed(self) -> None:
        """Nothing that was gathered counts, since ranks may have mixed units."""
        self._mixtures += 1

    @property
    def holders(self) -> set[int]:
        """The ranks that have parts of the model, by number in the default group."""
        return set().union(*(part.ranks for part in self.parameters))

    @property
    def group(self) -> groups.Group:
        """The ranks that train the job."""
        job = None if self._job is None else self._job()
        return groups.world() if job is None else job.group

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""
        job = None if self._job is None else self._job()
        return job.options.step_timeout if job is not None else 0.0

    def adopt(self, job: Job, name: str) -> None:
        """Takes the job of an optimizer that was given a parameter of this name."""
        known = None if self._job is None else self._job()
        if known is not None and known is not job and self._holder is not None and known is self._holder and not known.is_closed:
            raise Error(f"parameter '{name}' is of a model that was evaluated before it had an optimizer, while nothing in it wanted a "
                        'gradient, so its values are in a job of their own. Make the optimizer before the first forward pass',
                        'UNSUPPORTED')
        if known is not None and known is not job and not known.is_closed:
            raise Error(f"parameter '{name}' is of a model of shard() that another optimizer trains, and one job keeps all parameters of "
                        'such a model; close() that optimizer before another is made', 'UNSUPPORTED')
        if any(feature.lives_apart and feature is not self for feature in job.features):
            raise Error(f"parameter '{name}' is of one model of shard(), but the optimizer has parameters of another. Call shard() on one "
                        'module that holds both, or give each an optimizer', 'UNSUPPORTED')
        self._job = weakref.ref(job)
        if self not in job.features:
            job.features += [self._pushes, self]
        job.connection.lives_apart()
        job.buffers.of(self.passes.model)

    @property
    def job(self) -> Job | None:
        """The job, if it is open."""
        job = None if self._job is None else self._job()
        return None if job is None or job.opened is None or job.is_closed else job

    def open(self) -> Job:
        """Returns the job, which the first call opens. COLLECTIVE."""
        job = None if self._job is None else self._job()
        if job is None and not any(parameter.requires_grad for parameter in self.parameters.values()):
            job = self._hold()
        if job is None:
            name = self.units[0].parts[0].name
            raise Error(f"parameter '{name}' lives on Ballast's servers, but no optimizer has it. Make one before the first forward pass, "
                        'as ballast.torch.AdamW(model.named_parameters())', 'BAD_REQUEST')
        if job.opened is None:
            self._check_together()
            job.open()
        job.check_usable()
        return job

    def open_job(self) -> OpenJob:
        """Returns the open job. COLLECTIVE if it is not open yet."""
        job = self.open()
        return job.opened or job.open()

    def _hold(self) -> Job:
        """Makes a job for a model that nothing trains, such as a reference of DPO or a teacher. The job lasts as long as this object, and
        needs no optimizer."""
        needed = sum(part.shape.numel() for part in self.parameters) * _HELD_BYTES
        budgets = {} if arguments.addresses(None) else {'dram': max(_HELD_BYTES_MIN, needed)}
        first = next(iter(self.parameters.values()))
        mesh = first.device_mesh if is_sharded(first) else None
        group = mesh if mesh is not None and mesh.ndim == 1 and mesh.size() < groups.world().world_size else None
        given = options.complete('SGD', {**budgets, 'durability': 'none', 'group': group,
                                         'name': f'frozen-{groups.world().run()}-{min(self.holders)}-{self.number}'})
        param_groups: list[dict[str, Any]] = []
        self._holder = job = made(algorithms.SGD(momentum_buffer=False), given, lambda: param_groups)
        names, parameters = [part.name for part in self.parameters], list(self.parameters.values())
        param_groups.append(Group({'params': parameters, 'lr': 0.0, 'momentum': 0.0, 'dampening': 0.0, 'weight_decay': 0.0,
                                   'nesterov': False, 'maximize': False}, job.parameters.names))
        job.parameters.names.add(param_groups[0], names)
        adopt(job, names, parameters)
        return job

    def _check_together(self) -> None:
        """Refuses to open a job in a pass that other ranks do not make. They wait for the results of the pass, and this rank would wait for
        them."""
        here = self.holders
        elsewhere = sorted(self.group.numbers.keys() - here)
        if elsewhere:
            raise Error(f'parameters of this model are on ranks {sorted(here)}, and ranks {elsewhere} have others, as stages of a '
                        'pipeline do. First passes of stages do not begin together: call resume() of the optimizer on all ranks before '
                        'the first pass', 'BAD_REQUEST')

    # --- hooks of the job

    lives_apart = True

    def opening(self, parameters: Parameters, group: groups.Group) -> None:
        """Refuses an optimizer that lacks parameters of the model, before a job is made without them."""
        there = {part_of(parameter) for parameter in parameters.all()}
        missing = next((part for part in self.parameters if part not in there), None)
        if missing is not None:
            raise Error(f"parameter '{missing.name}' lives only on the servers, by shard(), but is in no group of the optimizer. Give the "
                        'optimizer all of model.named_parameters(), not only those that want gradients, or add the rest by '
                        'add_param_group(). Of a frozen parameter servers keep only the value, and no step changes it', 'BAD_SPEC')

    @property
    def origin(self) -> int:
        return 0 if self.values.streamed is None else self.values.streamed.origin

    def goes_on(self, job: OpenJob) -> str:
        """Tells that shard(weights=) is not read, and refuses another checkpoint than the job began with."""
        streamed, began = self.values.streamed, job.progress.origins
        if streamed is None:
            return ''
        path = streamed.checkpoint.path
        if began.isdisjoint((0, streamed.origin)):
            raise Error(f"job '{job.options.job}' exists and began with another checkpoint than shard(weights='{path}'): its digest is "
                        f"{min(began):08x}, this one's is {streamed.origin:08x}. A job that exists keeps its own values. Give weights= the "
                        'checkpoint that it began with, or leave weights= out, or give a new job another name', 'BAD_SPEC')
        return f"; it has its own values, and parameters were not read from weights='{path}'"

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """Takes up the job's current session and members."""
        if self._session is not job.session:
            self.values.forget()  # the servers have them
            index = {part_of(member.parameter): i for i, member in enumerate(job.members)}
            self.tensors = {part: job.members[i].name for part, i in index.items() if part is not None}
            missing = next((part for part in self.parameters if part not in index), None)
            if missing is not None:
                raise Error(f"parameter '{missing.name}' lives only on the servers, by shard(), but job '{job.options.job}' was made "
                            'without it, and such a job has all parameters from the start; give the job of this model another name',
                            'BAD_SPEC')
            self.pulls.place({unit: [index[part] for part in unit.parts] for unit in self.units})
            self._session = job.session
            self._sessions += 1

    def left(self) -> None:
        self.pulls.forget()
        self._session = None

    def before_step(self, parameters: Parameters) -> None:
        self.passes.check()

    def gathers(self, group: groups.Group) -> Mapping[tuple[int, ...], Order]:
        return gathers.take(group)

    def zero_grad(self) -> None:
        self.passes.forget()

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        job = self.open_job()
        remote = [(gradient, len(ranks)) for member, gradient, ranks in zip(job.members, gradients, job.roster.replicas)
                  if gradient is not None and part_of(member.parameter) is not None]
        self._pushing = sum(local(gradient).numel() * gradient.element_size() // ranks for gradient, ranks in remote)

    def stepped(self) -> None:
        self._pushed += self._pushing
        if self._session is not None:
            self.pulls.stepped()

    def stats(self) -> dict[str, float]:
        """Returns totals. unit_pulls and unit_pull_bytes: pulls and their bytes on this rank. unit_pulls_late: gathers whose pull had not
        begun. unit_pull_wait_seconds: how long gathers waited. unit_push_bytes: gradients of this rank in steps, which are of those
        parameters that servers update; replicas share them. weights_bytes: what this rank read for shard(weights=). gather_bytes,
        node_bytes, reduce_bytes: what this rank received from others in gathers, in gathers within the node, and in 8-bit reductions."""
        pulls = self.pulls
        return {**self.wire, 'unit_pulls': pulls.count, 'unit_pull_bytes': pulls.bytes, 'unit_pulls_late': pulls.waits,
                'unit_pull_wait_seconds': pulls.wait_seconds, 'unit_push_bytes': self._pushed,
                'weights_bytes': 0 if self.values.streamed is None else self.values.streamed.bytes}


def adopt(job: Job, names: Sequence[str | None], parameters: Sequence[torch.Tensor]) -> None:
    """The optimizer of `job` was given parameters, and some of them may be sharded."""
    for name, parameter in zip(names, parameters):
        part = part_of(parameter)
        sharded = None if part is None else _of_part[part]()
        if part is not None and sharded is not None:
            sharded.adopt(job, part.name if name is None else name)


def note(model: nn.Module, sharded: Sharded) -> None:
    """Notes which model shard() was given."""
    for module in model.modules():
        _of[module] = weakref.ref(sharded)


def models_of(module: nn.Module) -> list[Sharded]:
    """Returns the models of shard() that are in the module, or that it is a part of, in the same order on all ranks."""
    found = {_of[inner]() for inner in module.modules() if inner in _of}
    return sorted((sharded for sharded in found if sharded is not None), key=lambda sharded: sharded.number)


def model_of(module: nn.Module) -> Sharded | None:
    """Returns the model of shard() that the module is a part of."""
    return _of[module]() if module in _of else None


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that fully_shard has made of the module, in a model of shard()."""
    return _units[module]() if module in _units else None
