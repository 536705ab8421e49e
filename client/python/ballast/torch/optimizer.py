"""The torch.optim.Optimizer behind all optimizers of ballast.torch: the interface that training loops see. A Job (job/) and its steps
(steps/) do the work.

Parameters stay in the trainer; master weights and moments live on state servers. Only step() orders a step: it reads gradients and
param_groups, and returns when every parameter holds the new version. With overlap (steps/overlap.py) it returns earlier.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import torch

from ballast.errors import Error
from ballast.torch import arguments, hooks
from ballast.torch.algorithms import Algorithm
from ballast.torch.job.job import made
from ballast.torch.job.naming import Group, split_named, unwrapped
from ballast.torch.modes import methods_plainly, of_torch
from ballast.torch.options import complete
from ballast.torch.sharding import sharded
from ballast.torch.states import checkpoint, loading, values
from ballast.torch.states.state import Looks, State
from ballast.torch.steps.assisted import Assisted, Rule
from ballast.torch.steps.early import Early
from ballast.torch.steps.overlap import Overlap
from ballast.torch.steps.stepper import Stepper

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT
    from typing_extensions import Unpack

    from ballast.torch.options import Arguments

Loss = TypeVar('Loss')


class Resumed(NamedTuple):
    """How far a job has come."""
    step: int  # calls of step() so far, skipped ones included
    blob: bytes  # what the last of them kept


@methods_plainly('step')
class Optimizer(torch.optim.Optimizer):
    """What all optimizers of ballast.torch share. options.Arguments lists their keyword arguments.

    grad_norm and last_step_skipped tell about the last step, and wait until it has ended. The attributes `job` and `looks` are Ballast's
    own.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, algorithm: Algorithm, rule: Rule | None = None,
                 **ballast: Unpack[Arguments]) -> None:
        """rule: what the trainer computes of groups that the algorithm assists."""
        given = complete(type(self).__name__, ballast)
        self.job = made(algorithm, given, _groups_of(self))
        self.looks = Looks(self.job)
        if rule is not None:
            self.job.features.append(Assisted(rule))
        overlap = given['overlap']
        beside = None if overlap is None else Overlap(overlap)
        if arguments.flag('push_early', given['push_early']):
            self.job.features.append(Early(self.job.parameters.debug, lambda: beside is not None and beside.is_under_way))
        if beside is not None:
            self.job.features.append(beside)
        self._stepper = Stepper(self.job, float(given['max_norm']), beside)
        super().__init__([{**group, 'param_names': names} for group, names in zip(*split_named(params))], defaults)
        if overlap is not None:
            self.attach(overlap)

    # torch's is a defaultdict, and whoever uses an optimizer uses a mapping of parameters.
    @property  # type: ignore[override]
    def state(self) -> State:
        return State(self)

    @state.setter
    def state(self, value: Mapping[torch.Tensor, Any]) -> None:
        if hasattr(self, 'param_groups'):  # else torch's constructor makes an empty one
            State(self).replace(value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in torch. Wrappers call it with a state or groups of their own."""
        rest = dict(state)
        entries = rest.pop('state', None)
        super().__setstate__(rest)
        if entries is not None:
            self.state = entries

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. If the job is open, the next step registers the parameters with it."""
        job = self.job
        if job.opened is not None and len(self.param_groups) == job.groups_max:
            raise Error(f'the job has room for {job.groups_max} parameter groups, and all are taken; make a new job with all '
                        'groups from the start', 'BAD_SPEC')
        groups, names = split_named([param_group])
        if len({id(parameter) for parameter in groups[0]['params']}) < len(groups[0]['params']):
            raise ValueError('some parameters appear more than once in a parameter group')
        groups[0] = Group(groups[0], job.parameters.names)
        of_torch(super().add_param_group)(groups[0])
        if job.opened is not None:
            try:
                job.check_groups(job.options.optimizer)
            except Error:
                self.param_groups.pop()
                raise
        job.parameters.names.add(groups[0], names[0])
        sharded.adopt(job, names[0], groups[0]['params'])

    def attach(self, model: torch.nn.Module) -> Optimizer:
        """Takes the names of parameters, and their division into blocks, from `model`. Call it before the first step. Returns self."""
        if self.job.opened is not None:
            raise Error('attach(model) must come before the first step: the job already has its names', 'BAD_REQUEST')
        self.job.buffers.of(model)
        known = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
        for group in self.param_groups:
            self.job.parameters.names.add(group, [known.get(parameter) for parameter in group['params']])
        return self

    def resume(self) -> Resumed:
        """Opens the job if no step has opened it yet, and returns how far it has come: Resumed(step=0, blob=b'') if it is new. If the job
        existed before, its parameters replace those of the model."""
        self.job.open()
        return Resumed(self.job.progress.steps, self.job.progress.blob)

    def sync_from_params(self) -> None:
        """Takes over what the loop wrote to parameters through `.data`, where torch counts no write. All ranks call it."""
        values.sync(self.job)

    # --- checkpoints

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error('an optimizer whose state is on servers cannot be copied or pickled. Copy or save its state_dict(), or its '
                    'full_state_dict() with the moments, or make a second optimizer with a name of its own', 'UNSUPPORTED')

    @hooks.around_state_dict
    def state_dict(self) -> dict[str, Any]:
        """Returns a state that names the job and its current version; the servers keep that version (see kept.Kept). One rank may call it,
        or all. Before the job is open, the state names no version.

        With states='full', and with durability='none', it returns torch.optim's format with the moments instead. The moments of a DTensor
        are a DTensor, and this rank reads only its own part."""
        if self.job.opened is None:
            return checkpoint.unopened(self.job)
        opened = self.job.open(alone=True)
        return checkpoint.full(self.job, whole=False) if self.job.gives_moments else checkpoint.keep(self.job, opened)

    def full_state_dict(self) -> dict[str, Any]:
        """Returns torch.optim's format with the moments, as whole tensors even for DTensors. One rank may call it, and needs memory for all
        of them."""
        self.job.open(alone=True)
        return checkpoint.full(self.job, whole=True)

    @hooks.around_load_state_dict
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; all ranks call it.

        A state that names a version takes the job back to that version, parameters included. A state in torch.optim's format replaces
        moments, step counts and param_groups; parameters stay as they are."""
        loading.load(self.job, state_dict)

    def versions(self) -> list[int]:
        """Returns the versions that all servers keep. rollback() can go back to any of them."""
        return checkpoint.versions(self.job)

    def rollback(self, version: int) -> None:
        """Takes parameters, moments, step counts and blob back to a version that state_dict() named. All ranks call it."""
        checkpoint.rollback(self.job, version)

    # --- a step

    @contextlib.contextmanager
    def gradient_scale(self, scale: float) -> Iterator[None]:
        """Within this context step() multiplies gradients by `scale`. It skips a step with a gradient that is not finite, without a
        warning."""
        self._stepper.results.scale = scale
        try:
            yield
        finally:
            self._stepper.results.scale = None

    def stats(self) -> dict[str, float]:
        """Returns how many steps were made, and how many seconds their parts took in total. push_seconds: servers took the gradients.
        seal_seconds: ranks waited for the decision. pull_seconds: servers computed the update, and parameters got the new version. shard()
        adds its own, see sharding.sharded.Sharded.stats()."""
        self.wait()
        seconds = {f'{key}_seconds': value for key, value in self._stepper.results.seconds.items()}
        for feature in self.job.features:
            seconds.update(feature.stats())
        return {'steps': self.job.progress.steps, **seconds}

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last step's gradients, as the servers took them. None: no step was made yet."""
        self.wait()
        return self._stepper.results.grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """The last step changed nothing, because a gradient was Inf or NaN."""
        self.wait()
        return self._stepper.results.skipped

    def wait(self) -> None:
        """With overlap, returns when the last step has ended and every parameter holds its version. Raises what that step raised."""
        self.job.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that have already gone to the servers are dropped there."""
        if not set_to_none:
            self.wait()  # the step reads them
        for feature in self.job.features:
            feature.zero_grad()
        of_torch(super().zero_grad)(set_to_none)

    @overload
    def step(self, closure: None = None, *, blob: bytes = b'') -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], *, blob: bytes = b'') -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None, *, blob: bytes = b'') -> Any:
        """Makes one step, as in torch.

        blob: bytes of the caller, such as a position in the data, that the servers keep with the step. resume() returns the last one. All
        ranks together have 64 KiB, and each blob takes 8 more bytes: at most 8184 bytes a rank with 8 ranks, 120 with 512."""
        if not isinstance(blob, bytes):
            raise TypeError(f'step(blob={type(blob).__name__}): expected bytes, such as json.dumps(...).encode()')
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._stepper.step(blob)
        return loss

    def close(self) -> None:
        """Ends the session with the servers. A durable job stays there. Of any other job, the embedded server frees the memory."""
        self.job.close()


def _groups_of(optimizer: Optimizer) -> Callable[[], list[dict[str, Any]]]:
    """Returns a function that gives the current param_groups, even after a caller has replaced the list. The job must not keep its
    optimizer alive."""
    there = weakref.ref(optimizer)

    def groups() -> list[dict[str, Any]]:
        found = there()
        return [] if found is None else found.param_groups
    return groups
