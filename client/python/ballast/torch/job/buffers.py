"""Buffers of the models that a job trains: statistics of BatchNorm, counters. They are the trainer's, and no server keeps them."""

from __future__ import annotations

import weakref

from torch import nn

from ballast.errors import warn
from ballast.torch.job.naming import unwrapped

# Names that a warning has.
_TOLD = 3


class Buffers:
    """Those that a state_dict() of a model has, and that a resume leaves as the new process made them."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []

    def of(self, model: nn.Module) -> None:
        """The job trains this model too."""
        if all(there() is not model for there in self._models):
            self._models.append(weakref.ref(model))

    @property
    def names(self) -> list[str]:
        found = []
        for model in filter(None, (there() for there in self._models)):
            for path, module in model.named_modules():
                found += [unwrapped(f'{path}.{leaf}' if path else leaf) for leaf, buffer in module._buffers.items()
                          if buffer is not None and leaf not in module._non_persistent_buffers_set]
        return found

    def warn(self, job: str, steps: int) -> None:
        """The job goes on after so many steps."""
        names = self.names
        if not names:
            return
        more = f' and {len(names) - _TOLD} more' if len(names) > _TOLD else ''
        warn(f"job '{job}' goes on after {steps} steps, but no server keeps buffers of the model: {', '.join(names[:_TOLD])}{more} are as "
             "this process made or loaded them. Save them with each checkpoint: torch.save(dict(model.named_buffers()), 'buffers.pt'). "
             "Load them before resume(): model.load_state_dict(torch.load('buffers.pt'), strict=False)")
