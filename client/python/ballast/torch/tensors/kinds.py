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
    """torch's module of DTensors, or None: as long as nobody has imported the module, no tensor is one. Importing it takes as long as a
    third of torch, which a trainer that comes back need not wait for."""
    # The latter: torch 2.4, which has the former without its contents. A module that is still being imported has made no tensor yet.
    names = ('torch.distributed.tensor', 'torch.distributed._tensor')
    return next((module for module in map(sys.modules.get, names) if hasattr(module, 'DTensor') and hasattr(module, 'Shard')), None)


def type_of_dtensors() -> type[DTensor]:
    """As soon as some tensor is one."""
    found: type[DTensor] = tensor_module().DTensor
    return found


def is_sharded(tensor: torch.Tensor | None) -> TypeIs[DTensor]:
    module = tensor_module()
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, contiguous, in the host's memory: a copy where they are not that."""
    return local(tensor).detach().cpu().contiguous()


def digest_of(tensor: torch.Tensor) -> int:
    """CRC-32C of this rank's elements."""
    return _native.crc32c(on_host(tensor).reshape(-1).view(torch.uint8))


def versions_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What any operation of torch's changes that writes to the tensor, but one by way of .data."""
    # An operation on a DTensor moves its own counter and not that of its local tensor.
    memory = local(tensor)
    return tensor._version, memory._version, memory.data_ptr()
