"""Forward and backward passes of a model of shard(), and what they leave behind: units that FSDP2 keeps gathered, and FSDP2's state of a
pass that an exception has cut off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ballast.errors import Error, warn
from ballast.torch.sharding.model import Model
from ballast.torch.sharding.turns import Turns
from ballast.torch.sharding.unit import Unit
from ballast.torch.sharding.wrapped import is_wrapped, outermost

if TYPE_CHECKING:
    from ballast.torch.sharding.wrapped import Wrapped


class Passes:
    """Hooks of the modules that fully_shard has wrapped. Threads: the training loop's; hooks of recomputation run on autograd's."""

    def __init__(self, model: nn.Module, sharded: Model, units: Sequence[Unit], open_job: Callable[[], object],
                 drop_pushed: Callable[[], None]) -> None:
        """model: it has Remotes instead of parameters, and the units of `sharded` have all of them. open_job(): opens the job if it is not
        open. drop_pushed(): drops gradients that went, since no step will take them."""
        self.model, self._sharded, self._units = model, sharded, units
        self._open_job, self._drop_pushed = open_job, drop_pushed
        self._is_prepared = False  # FSDP2 has made its memory
        self._inside: set[nn.Module] = set()  # outermost modules whose forward pass has begun
        self._is_cut_off = False  # an exception has ended a forward pass
        self._had = False  # there were gradients before the last forward pass
        self.turns = Turns()
        self._spoilt = False  # a backward pass was cut off, and its gradients are among those that there are
        self._outermost = outermost(model)
        for unit in units:
            for module in unit.modules:
                # Ahead of FSDP2's own hooks.
                module.register_forward_pre_hook(functools.partial(self._before, unit), prepend=True)
                module.register_forward_hook(functools.partial(self._after, unit), always_call=True)
        for top in self._outermost:
            top.register_forward_pre_hook(self._begin, prepend=True)
            top.register_forward_hook(self._end)
            top.register_forward_hook(self._left, always_call=True)

    # --- hooks

    def _begin(self, module: nn.Module, _: Any) -> None:
        if _in_backward():
            return
        if module in self._inside:  # as Ctrl-C leaves it
            self._left(module)
        self.recover()
        if not self._sharded.copies:
            with torch.inference_mode(False), torch.no_grad():
                self._open_job()  # what it refuses has not begun a pass, which FSDP2 would have to forget
        self._inside.add(module)
        self.turns.begin()
        if self._sharded.copies:
            return
        if torch.is_inference_mode_enabled() and not self._is_prepared:
            self.prepare()
            self._make_memory(module)
        self._is_prepared = True
        if torch.is_grad_enabled():
            self._had = any(unit.has_gradients for unit in self._units)
            if not self._had:
                self._spoilt = False  # recover() has dropped them

    def prepare(self) -> None:
        """Lets FSDP2 look over the parameters, as it does in its first forward pass. They must be in their places."""
        with torch.inference_mode(False), torch.no_grad():
            for module in self._outermost:
                module._get_fsdp_state()._lazy_init()

    def _make_memory(self, module: nn.Module) -> None:
        """Lets FSDP2 make its memory, which it does at the first gathers. Memory made in inference mode would be useless for training."""
        with torch.inference_mode(False), torch.no_grad():
            for inner in module.modules():
                if is_wrapped(inner):
                    inner.unshard()
                    inner.reshard()

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        if _in_backward():
            return
        self.turns.end()
        self._inside.discard(module)
        for unit in self._units:
            unit.hide()
        if torch.is_grad_enabled():
            hook = functools.partial(self._before_backward, self._sharded.now(), [])
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(hook)

    def _left(self, module: nn.Module, *_: Any) -> None:
        """Runs after _end(), or instead of it if the pass has raised an exception."""
        if module in self._inside and not _in_backward():
            self._inside.discard(module)
            self._is_cut_off = True

    def _before_backward(self, at: object, begun: list[bool], _: torch.Tensor) -> None:
        """at: Sharded.now() of the forward pass. begun: has an element for each output whose gradient has come. Recomputation runs modules
        again."""
        if at != self._sharded.now():
            raise Error(f"parameter '{self._units[0].parts[0].name}' and others changed after the forward pass of this backward pass, by "
                        'a step, a load or a rollback, so its gradients would mix two versions; run the forward pass again', 'BAD_REQUEST')
        for unit in self._units if not begun else ():
            unit.check()
            unit.show()
        begun.append(True)

    def _before(self, unit: Unit, module: Wrapped, _: Any) -> None:
        if unit.has_copies:
            unit.lend()
            return
        if not _in_backward():  # which repeats what forward called
            self.turns.came(unit)
        unit.check()
        if unit.is_stale:
            module.reshard()  # FSDP2 keeps units gathered after passes without a gradient, whatever becomes of the job meanwhile
        unit.show()

    def _after(self, unit: Unit, *_: Any) -> None:
        unit.take_back()
        unit.note()

    # --- between passes

    def recover(self) -> None:
        """If an exception has cut off a pass, makes FSDP2 forget that pass, which it would otherwise go on with. Gradients of a backward
        pass that was cut off no longer count."""
        states = [module._get_fsdp_state() for module in self._outermost]
        in_backward = any(state._state_ctx.post_backward_final_callback_queued for state in states)
        if _in_backward() or not (in_backward or self._is_cut_off):
            return
        if not hasattr(torch.distributed.fsdp.FSDPModule, 'reset_iter_state'):
            raise Error(f'an exception has cut off a pass of the model, and FSDP2 of torch {torch.__version__} cannot forget that pass. '
                        'Start all ranks again; with torch 2.13 or later a model can go on', 'UNSUPPORTED')
        kept = [(group, group._partial_reduce_output) for unit in self._units for group in unit.groups if not in_backward]
        for state in states:
            if state._is_root:
                state._reset_iter_state()
        for group, partial in kept:
            group._partial_reduce_output = partial  # of earlier backward passes
        self._is_cut_off = False
        if in_backward:
            self._spoil()

    def _spoil(self) -> None:
        self._spoilt = True
        for unit in self._units:
            unit.forget_whole_gradients()
        if self._had:
            return  # those of earlier passes are mixed with them: the step refuses, until zero_grad()
        self._drop_pushed()
        for parameter in self._sharded.parameters.values():
            parameter.grad = None
        warn('an exception has cut off a backward pass of a model of shard(), so no gradient of that pass counts')

    def settle(self) -> None:
        """Puts parameters in their places, and frees what is gathered. Errors: as Unit.check()."""
        self.recover()
        for unit in self._units:
            unit.check()
            unit.reshard()

    def check(self) -> None:
        """Refuses a step if somebody else has changed the model, or if gradients are from a pass that was cut off."""
        if self._sharded.copies:
            raise Error('step() within gathered() would leave the copies at the version before it; make the step outside', 'BAD_REQUEST')
        self.recover()
        if self._spoilt:
            raise Error('a backward pass was cut off by an exception, so the gradients since the last step are not whole. Call '
                        'zero_grad() of the optimizer, then run forward and backward again, on all ranks', 'BAD_REQUEST')
        inside = set(self.model.modules())
        for unit in self._units:
            unit.check(self.model, inside)

    def forget(self) -> None:
        """The gradients so far no longer count."""
        self.recover()
        self._spoilt = False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
