"""Modules that fully_shard has wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def fsdp_groups(module: Wrapped) -> list[Any]:
    """Returns FSDP2's own objects. Its public interface tells neither the offload policy, nor the collectives, nor the shape of a
    gather."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, '_fsdp_param_groups', None)
    if groups is None:  # earlier than torch 2.13
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return groups
