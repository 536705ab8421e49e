"""DistributedDataParallel's join(), for ranks with unlike numbers of batches. A rank within it that has run out of batches answers the
wrapper's collectives, and makes no step: others would wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from ballast.errors import warn
from ballast.torch.job.modules import ddp_wrappers


class Joins:
    """The wrappers of a job's parameters. Threads: the training loop's."""

    def __init__(self) -> None:
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None  # None: not looked for yet
        self._warned = False

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warns at the first step that ranks may leave one by one. parameters: the job's."""
        if self._warned:
            return
        if self._wrappers is None or any(there() is None for there in self._wrappers):
            self._wrappers = [weakref.ref(wrapper) for wrapper in ddp_wrappers(parameters)]
        for there in self._wrappers:
            config = getattr(there(), '_join_config', None)
            if config is not None and config.enable and not config.throw_on_early_termination:
                self._warned = True
                warn('this loop runs, or an earlier one ran, within join() of DistributedDataParallel. There a rank that runs out of '
                     'batches makes no step(), and the others get RANK_MISSING after step_timeout. Give all ranks the same number of '
                     'batches, or use join(throw_on_early_termination=True), which ends the loop on all ranks at once')
                return
