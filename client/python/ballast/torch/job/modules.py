"""The modules of this process. A parameter does not know its module, and an optimizer is often given parameters alone."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def all_modules() -> list[nn.Module]:
    """Returns those that are whole, without those that gc.freeze() has set aside. It looks through all objects, which takes some 0.1 s for
    a million of them: call it seldom."""
    # By type(): isinstance() would ask proxies what they stand for.
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [module for module in found if '_modules' in module.__dict__ and '_parameters' in module.__dict__]  # else it is being made


def ddp_wrappers(parameters: Iterable[torch.Tensor], model: nn.Module | None = None) -> list[DistributedDataParallel]:
    """Returns those that have one of these parameters. It finds those within `model` even after gc.freeze()."""
    wanted = set(map(id, parameters))
    found = {id(module): module for module in [*all_modules(), *([] if model is None else model.modules())]}
    return [module for module in found.values()
            if isinstance(module, DistributedDataParallel) and not wanted.isdisjoint(map(id, module.parameters()))]
