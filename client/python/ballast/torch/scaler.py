"""Loss scaling for fp16 gradients, with the interface and defaults of torch.amp.GradScaler. Servers take the scale out in the update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ballast.errors import Error
from ballast.torch.modes import methods_plainly

if TYPE_CHECKING:
    from ballast.torch.optimizer import Optimizer


@methods_plainly('scale')
class LossScaler:
    """Scales losses so that small fp16 gradients do not vanish, and finds the largest scale that does not overflow.

    Servers multiply by 1 / scale in fp32 as they update, and check for Inf and NaN, so nobody unscales fp16 gradients in place. To clip
    them, give the optimizer max_norm=. Gradients of other types can be unscaled and clipped as with GradScaler."""

    def __init__(self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5, growth_interval: int = 2000,
                 enabled: bool = True) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(f'LossScaler: growth_factor={growth_factor}, backoff_factor={backoff_factor}: expected above 1, and '
                             'between 0 and 1')
        self._scale, self._growth_tracker = float(init_scale), 0
        self._growth_factor, self._backoff_factor, self._growth_interval = growth_factor, backoff_factor, growth_interval
        self._enabled = enabled
        # Since the last update(): optimizers with unscaled gradients; those that stepped, and whether the step was skipped.
        self._unscaled: set[int] = set()
        self._stepped: dict[int, bool] = {}

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    def scale(self, outputs: Any) -> Any:
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        return type(outputs)(self.scale(output) for output in outputs)

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides gradients by the scale, for clip_grad_norm_ or to look at them. As GradScaler, it refuses fp16 gradients."""
        if not self._enabled:
            return
        if id(optimizer) in self._unscaled:
            raise RuntimeError('unscale_() has already been called on this optimizer since the last update().')
        if id(optimizer) in self._stepped:
            raise RuntimeError('unscale_() is being called after step().')
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group['params'] if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise Error('LossScaler does not unscale fp16 gradients in place: small ones would vanish. To clip, make the optimizer '
                        'with max_norm=..., and leave unscale_ and clip_grad_norm_ out', 'UNSUPPORTED')
        for gradient in gradients:
            gradient.mul_(1.0 / self._scale)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Calls optimizer.step(), which skips the step if a gradient overflowed."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if 'closure' in kwargs or (args and args[0] is not None):
            raise RuntimeError('Closure use is not currently supported if LossScaler is enabled.')
        if id(optimizer) in self._stepped:
            raise RuntimeError('step() has already been called since the last update().')
        with optimizer.gradient_scale(1.0 if id(optimizer) in self._unscaled else 1.0 / self._scale):
            result = optimizer.step(*args, **kwargs)
        self._stepped[id(optimizer)] = optimizer.last_step_skipped
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._stepped:
            raise RuntimeError('call step() before LossScaler.update()')
        elif any(self._stepped.values()):
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._unscaled, self._stepped = set(), {}

    def state_dict(self) -> dict[str, Any]:
        if not self._enabled:
            return {}
        return {'scale': self._scale, 'growth_factor': self._growth_factor, 'backoff_factor': self._backoff_factor,
                'growth_interval': self._growth_interval, '_growth_tracker': self._growth_tracker}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError('The source state dict is empty, possibly because it was saved from a disabled instance of LossScaler.')
        self._scale, self._growth_tracker = float(state_dict['scale']), int(state_dict['_growth_tracker'])
        self._growth_factor, self._backoff_factor = state_dict['growth_factor'], state_dict['backoff_factor']
        self._growth_interval = state_dict['growth_interval']
