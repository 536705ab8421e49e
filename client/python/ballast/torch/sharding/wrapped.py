"""Modules that fully_shard has wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import TypeIs

    class Wrapped(nn.Module, FSDPModule):
        """Its class at run time has both, and the module's own class, too."""


def is_wrapped(module: nn.Module) -> TypeIs[Wrapped]:
    from torch.distributed.fsdp import FSDPModule
    return isinstance(module, FSDPModule)


def outermost(module: nn.Module) -> list[Wrapped]:
    """The module, or those beneath it."""
    return [module] if is_wrapped(module) else [each for child in module.children() for each in outermost(child)]
