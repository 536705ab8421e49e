"""Steps beside the training loop."""

from __future__ import annotations

import atexit
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ballast.errors import Error
from ballast.torch.job.features import Feature
from ballast.torch.job.modules import ddp_wrappers
from ballast.torch.job.naming import Parameters, block_of
from ballast.torch.modes import plainly
from ballast.torch.steps.step import Step
from ballast.torch.tensors.kinds import is_sharded
from ballast.torch.tensors.members import Member, StateMember
from ballast.torch.tensors.remote import remote_of

_GRACE_SECONDS = 2.0


class _UnderWay(NamedTuple):
    """A step on its own thread."""
    step: Step
    future: concurrent.futures.Future[None]


class Overlap(Feature):
    """Runs steps on their own thread while the training loop goes on. Forward passes of `model` and its state_dict wait for the parameters
    that they read. Threads: the training loop's, except _ready()."""

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise Error(f'overlap={type(model).__name__}: expected the model whose forward passes wait for parameters', 'BAD_CONFIG')
        self._model = model
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: _UnderWay | None = None
        self._changed = threading.Condition()
        self._ready_members: set[int] = set()  # of the step under way, by index
        self._gradients: list[tuple[torch.Tensor, int] | None] = []  # with their version counters; by member, until it has landed
        self._needs: dict[torch.nn.Module, set[int]] = {}
        self._needs_of: list[Member] = []
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook()

    def _hook(self) -> None:
        fresh = [module for module in self._model.modules() if module not in self._hooked]
        for module in fresh:
            module.register_forward_pre_hook(_Hook(self, forward=True), prepend=True)
            module.register_state_dict_pre_hook(_Hook(self, forward=False))
        self._hooked.update(fresh)
        if fresh:
            torch.compiler.reset()  # functions that were compiled when these modules had no hooks would go on without

    def before_step(self, parameters: Parameters) -> None:
        """Refuses parameters and modules that the hooks of modules do not see."""
        for name, module in self._model.named_modules():
            if hasattr(module, '_orig_mod') or getattr(module, '_compiled_call_impl', None) is not None:
                raise Error(f"overlap: module '{name}' is compiled, so it runs without the hooks that wait for parameters; leave out "
                            'overlap or compile', 'UNSUPPORTED')
        self._hook()
        seen = {id(parameter) for parameter in self._model.parameters()}
        for g, i, parameter in parameters.placed():
            if is_sharded(parameter):
                raise Error("overlap: parameters are DTensors, which fully_shard gathers before Ballast's hooks run; leave overlap out",
                            'UNSUPPORTED')
            if id(parameter) not in seen:
                name = parameters.name_of(g, i, parameter)
                raise Error(f"overlap: parameter '{name}' is not one of the model, or no longer is, so nothing would wait for it. Give "
                            'overlap= the model that has it. If the model has another parameter in its place, make a new optimizer',
                            'BAD_CONFIG')

    def start(self, step: Step) -> None:
        """Begins a step. The caller has called before_step() and wait()."""
        if self._needs_of != step.members:
            together = _written_together(self._model, step.members)
            self._needs, self._needs_of = _needs(self._model, step.members, together), list(step.members)
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, 'ballast-step')
            atexit.register(_end_of_process, weakref.ref(self))
        # Outside of inference_mode torch itself refuses to write to what was made within.
        self._gradients = [None if gradient is None or gradient.is_inference() else (gradient, gradient._version)
                           for gradient in step.gradients]
        self._ready_members = set()
        try:
            future = self._pool.submit(step.run, self._ready)
        except BaseException:
            step.give_up()
            raise
        self._under_way = _UnderWay(step, future)
        future.add_done_callback(lambda _: self._ready(()))

    @property
    def is_under_way(self) -> bool:
        return self._under_way is not None

    def _ready(self, indices: Iterable[int]) -> None:
        with self._changed:
            self._ready_members.update(indices)
            self._changed.notify_all()

    def before_forward(self, module: torch.nn.Module) -> None:
        """Waits for the parameters that the module's forward pass may read."""
        under_way = self._under_way
        if under_way is None:
            return
        needed = self._needs.get(module, set())
        self._await(under_way, lambda: needed <= self._ready_members)
        if self._under_way is not under_way:
            return  # a signal's handler has waited
        if needed <= self._ready_members:
            self._land(under_way.step, needed)
        else:
            self.wait()

    def _await(self, under_way: _UnderWay, enough: Callable[[], bool]) -> None:
        """Waits until the step has ended, or enough() holds. As in a call of the session, Ctrl-C gives the step two seconds, then ends the
        session. If the server is in this process, the step goes on and the next wait is for it; a second Ctrl-C then ends the session."""
        def over() -> bool:
            return under_way.future.done() or enough()
        with self._changed:
            try:
                self._changed.wait_for(over)
            except BaseException:
                if not self._changed.wait_for(over, _GRACE_SECONDS):
                    under_way.step.interrupt()
                raise

    def _land(self, step: Step, indices: set[int]) -> None:
        step.land(indices)
        for i in indices:
            gradient, self._gradients[i] = self._gradients[i], None
            if gradient is not None and gradient[0]._version != gradient[1]:
                raise Error(f"the gradient of parameter '{self._needs_of[i].name}' was changed while the step read it, so the update may "
                            'be wrong. With overlap, set gradients to None (zero_grad() does), or call wait() first', 'BAD_REQUEST')

    def wait(self) -> None:
        """Returns when the step under way has ended. Raises what it raised."""
        under_way, ready = self._under_way, self._ready_members
        if under_way is None:
            return
        step, future = under_way
        self._await(under_way, lambda: False)
        if self._under_way is not under_way:
            return  # a signal's handler has waited
        try:
            self._land(step, set(ready))
        except Error as error:
            raise future.exception() or error  # noqa: B904 (the step's own comes first)
        finally:
            if self._under_way is under_way:  # else a signal's handler has waited, amid _land()
                self._under_way = None
                step.end()
        future.result()


class _Hook:
    """A hook of a module. Its copy, in a copy of the model, does nothing."""

    def __init__(self, overlap: Overlap | None = None, forward: bool = True) -> None:
        self._overlap, self._forward = None if overlap is None else weakref.ref(overlap), forward

    @plainly
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        overlap = None if self._overlap is None else self._overlap()
        if overlap is not None:
            if self._forward:
                overlap.before_forward(module)
            else:
                overlap.wait()

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


def _end_of_process(overlap: weakref.ref[Overlap]) -> None:
    there = overlap()
    if there is not None:
        there.wait()


def _needs(model: torch.nn.Module, members: Sequence[Member], together: Sequence[set[int]]) -> dict[torch.nn.Module, set[int]]:
    """Returns for each module the members that its forward may read, by index. A module within a unit may read all of the unit. Any other
    may read its own parameters, and those of children that have no forward. together: a module that has one member of such a set needs all
    of it, since the loop may call any module."""
    index = {id(member.parameter): i for i, member in enumerate(members)}
    units: dict[str, set[int]] = {}
    for i, member in enumerate(members):
        if not isinstance(member, StateMember):  # no forward reads it
            units.setdefault(block_of(member.name), set()).add(i)

    def own(module: torch.nn.Module) -> set[int]:
        found = {index[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in index}
        for child in module.children():
            if type(child).forward is torch.nn.Module.forward:
                found |= own(child)
        return found

    needs = {}
    for module in model.modules():
        everything = {index[id(parameter)] for parameter in module.parameters() if id(parameter) in index}
        within = {block_of(members[i].name) for i in everything}
        needs[module] = set(units[within.pop()]) if len(within) == 1 else own(module)
        needs[module].update(*(each for each in together if not each.isdisjoint(everything)))
    return needs


def _written_together(model: torch.nn.Module, members: Sequence[Member]) -> list[set[int]]:
    """Returns sets of members, by index. A backward pass of DDP may write to all gradients of a set, though no forward pass has waited for
    their parameters: the step under way would read what it writes."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    owners = [member.of.parameter if isinstance(member, StateMember) else member.parameter for member in members]
    unknown, found = set(range(len(members))), []
    for wrapper in ddp_wrappers(owners, model):
        wrapped = set(map(id, wrapper.parameters()))
        within = {i for i, owner in enumerate(owners) if id(owner) in wrapped}
        unknown -= within
        if wrapper.gradient_as_bucket_view and (wrapper.find_unused_parameters or wrapper.static_graph):
            found.append(within)
    # gc.freeze() hides wrappers. Gradients of theirs may lie in buckets, where most share their memory.
    if any(_is_in_larger_memory(owners[i].grad) for i in unknown):
        found.append(unknown)
    return found


def _is_in_larger_memory(gradient: torch.Tensor | None) -> bool:
    if gradient is None or remote_of(gradient) is not None:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()
