"""Copies of what servers hold. A write to a copy raises an error that says how to write to the servers instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree

from ballast.errors import Error
from ballast.torch.modes import same_bits
from ballast.torch.tensors.kinds import is_sharded, local, type_of_dtensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_HOW = ("optimizer.state[p] is a copy of what the servers hold, and writing to it changes nothing there. To write there, write "
        "optimizer.state[p] = {**optimizer.state[p], 'exp_avg': ...}. For a state without steps, write {}, or call optimizer.state.clear() "
        'for all parameters')

_SET_DATA = vars(torch._C.TensorBase)['data'].__set__
_TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)


def refuse() -> NoReturn:
    raise Error(_HOW, 'BAD_REQUEST')


def has_bits(copy: torch.Tensor, value: Any) -> bool:
    """`value` is the same tensor, or one with the same bits, for example on another device."""
    if not isinstance(value, torch.Tensor) or is_sharded(value) != is_sharded(copy):
        return False
    if is_sharded(copy) and is_sharded(value) and value.placements != copy.placements:
        return False
    mine, other = local(copy), local(value).detach()
    if other.dtype != mine.dtype or other.shape != mine.shape or other.is_meta:
        return False
    with torch._C.DisableTorchFunctionSubclass():  # also in inference mode, where copies have no version counters
        return bool(same_bits(mine, other.to(mine.device)).all())


def _set_data(copy: torch.Tensor, value: Any) -> None:
    """Carries out `copy.data = value`, which moves no version counter."""
    with torch._C.DisableTorchFunctionSubclass():
        if not has_bits(copy, value):
            refuse()


def _run(cls: type[torch.Tensor], func: Any, args: Any, kwargs: Any, plain: type[torch.Tensor],
         copied: Callable[[Any], torch.Tensor]) -> Any:
    """Runs an operation of torch, and refuses one that writes to a copy of this class. Results that share memory with a copy become copies:
    copied() makes one of a `plain` tensor."""
    copies = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, cls)]
    if func == _SET_DATA and isinstance(args[0], cls):
        return _set_data(args[0], args[1])
    with torch._C.DisableTorchFunctionSubclass():
        before = [each._version for each in copies]
        result = func(*args, **kwargs)
        if before != [each._version for each in copies]:
            refuse()
        if func in _TO_NUMPY:
            result.flags.writeable = False  # a write by numpy moves no version counter
        memory = set(filter(None, map(_address, copies)))
        return _pytree.tree_map(lambda each: copied(each) if type(each) is plain and _address(each) in memory else each, result)


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the memory that this rank has. 0: it has none."""
    here = local(tensor)
    return here.untyped_storage().data_ptr() if here.numel() else 0


class Copy(torch.Tensor):
    """A tensor whose in-place operations raise, as do those of its views. Other operations return plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(cls, func, args, kwargs or {}, torch.Tensor, lambda each: each.as_subclass(cls))

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


@functools.cache
def _sharded_copy() -> type[DTensor]:
    """Returns the class of copies of DTensors. It is made once torch has DTensors, see tensor_module()."""
    if TYPE_CHECKING:
        from torch.distributed.tensor import DTensor
    else:
        DTensor = type_of_dtensors()

    class ShardedCopy(DTensor):
        """As Copy; the memory of this rank is a Copy."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, '__name__', '')
            if name.endswith('_') and not name.endswith('__'):
                refuse()  # torch._foreach_* of DTensors move no version counter

            def copied(each: Any) -> torch.Tensor:
                return cls(each._local_tensor.as_subclass(Copy), each._spec, requires_grad=each.requires_grad)
            return _run(cls, func, args, kwargs or {}, DTensor, copied)

        def _plain(self) -> torch.Tensor:
            memory = self._local_tensor
            return DTensor(memory._plain() if isinstance(memory, Copy) else memory, self._spec, requires_grad=False)

        def __deepcopy__(self, memo: Any) -> torch.Tensor:
            return self._plain().clone()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._plain().__reduce_ex__(protocol)

    return ShardedCopy


def copy_of(value: torch.Tensor) -> torch.Tensor:
    if is_sharded(value):
        return _sharded_copy()(value._local_tensor.as_subclass(Copy), value._spec, requires_grad=False)
    return value.as_subclass(Copy)
