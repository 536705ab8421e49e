"""What a tensor is: its dtype, whether it is a DTensor, and the memory that this rank has of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from ballast import _native

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

DTYPES = {torch.float32: 'f32', torch.bfloat16: 'bf16', torch.float16: 'f16'}


def tensor_module() -> Any:
    """Returns torch's module of DTensors, or None. Until somebody imports that module, no tensor is a DTensor. To import it takes a third
    as long as torch, and a trainer that comes back should not wait for that."""
    # The latter is for torch 2.4, which has the former without its contents. A module that is still being imported has made no tensor yet.
    names = ('torch.distributed.tensor', 'torch.distributed._tensor')
    return next((module for module in map(sys.modules.get, names) if hasattr(module, 'DTensor') and hasattr(module, 'Shard')), None)


def type_of_dtensors() -> type[DTensor]:
    """Returns the class of DTensors. Call it once some tensor is one."""
    found: type[DTensor] = tensor_module().DTensor
    return found


def is_sharded(tensor: torch.Tensor | None) -> TypeIs[DTensor]:
    module = tensor_module()
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor on this rank."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's elements, contiguous, in the host's memory. It copies them only if they are not so already."""
    return local(tensor).detach().cpu().contiguous()


def digest_of(tensor: torch.Tensor) -> int:
    """Returns the CRC-32C of this rank's elements."""
    return _native.crc32c(on_host(tensor).reshape(-1).view(torch.uint8))


def versions_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns what every torch operation that writes to the tensor changes, except through .data."""
    # An operation on a DTensor moves its own counter and not that of its local tensor.
    memory = local(tensor)
    return tensor._version, memory._version, memory.data_ptr()
