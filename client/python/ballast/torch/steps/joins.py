"""DistributedDataParallel's join(), for ranks with unlike numbers of batches. A rank within it that has run out of batches answers the
wrapper's collectives, and makes no step: others would wait for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from ballast.errors import Error
from ballast.torch.job.modules import ddp_wrappers


class Joins:
    """The wrappers of a job's parameters. Threads: the training loop's."""

    def __init__(self) -> None:
        self._wrappers: list[weakref.ref[DistributedDataParallel]] | None = None  # None: not looked for yet

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuses a step, on each rank by itself. parameters: the job's."""
        if self._wrappers is None or any(there() is None for there in self._wrappers):
            self._wrappers = [weakref.ref(wrapper) for wrapper in ddp_wrappers(parameters)]
        for there in self._wrappers:
            config = getattr(there(), '_join_config', None)
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise Error("step() within join() of DistributedDataParallel: a rank that has run out of batches makes no step(), so the "
                            'others would wait for it in vain. Expected join(throw_on_early_termination=True), which ends the loop on all '
                            'ranks at once; or give all ranks the same number of batches, and leave join() out', 'UNSUPPORTED')
