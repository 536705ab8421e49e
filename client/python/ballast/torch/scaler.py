"""Loss scaling for fp16 gradients: torch.amp.GradScaler's interface and defaults, the scale taken out within the update."""

import torch

from ballast.errors import Error


class LossScaler:
    """Scales losses so that small fp16 gradients do not vanish, and looks for the largest scale that does not overflow.

    The update multiplies by 1 / scale in fp32 and checks for Inf and NaN, so gradients are never unscaled in fp16. To clip, give
    the optimizer max_norm=: torch's clip_grad_norm_ would see scaled gradients."""

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError(f'LossScaler: growth_factor={growth_factor}, backoff_factor={backoff_factor}: expected above 1, and '
                             'between 0 and 1')
        self._scale, self._growth_tracker = float(init_scale), 0
        self._growth_factor, self._backoff_factor, self._growth_interval = growth_factor, backoff_factor, growth_interval
        self._enabled = enabled
        self._overflowed = None  # whether the step since the last update() was skipped; None: there was none

    def is_enabled(self):
        return self._enabled

    def get_scale(self):
        return self._scale if self._enabled else 1.0

    def scale(self, outputs):
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        return type(outputs)(self.scale(output) for output in outputs)

    def unscale_(self, optimizer):
        raise Error('LossScaler does not unscale gradients in place: in fp16 small ones would vanish. To clip, make the optimizer '
                    'with max_norm=..., and leave unscale_ and clip_grad_norm_ out', 'UNSUPPORTED')

    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(), skipped if a gradient overflowed."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        with optimizer.gradient_scale(1.0 / self._scale):
            result = optimizer.step(*args, **kwargs)
        self._overflowed = bool(self._overflowed) or optimizer.last_step_skipped
        return result

    def update(self, new_scale=None):
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif self._overflowed is None:
            raise RuntimeError('LossScaler.update() comes after step()')
        elif self._overflowed:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self._growth_interval:
                self._scale *= self._growth_factor
                self._growth_tracker = 0
        self._overflowed = None

    def state_dict(self):
        return {'scale': self._scale, 'growth_factor': self._growth_factor, 'backoff_factor': self._backoff_factor,
                'growth_interval': self._growth_interval, '_growth_tracker': self._growth_tracker}

    def load_state_dict(self, state_dict):
        self._scale, self._growth_tracker = float(state_dict['scale']), int(state_dict['_growth_tracker'])
        self._growth_factor, self._backoff_factor = state_dict['growth_factor'], state_dict['backoff_factor']
        self._growth_interval = state_dict['growth_interval']
