"""Copies of what servers hold: a write to a copy raises an error that tells how to write to the servers instead."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils import _pytree

from ballast.errors import Error
from ballast.torch.stepping.members import is_sharded, tensor_module

_HOW = ("optimizer.state[p] is a copy of what the servers hold, and writing to it changes nothing there; write optimizer.state[p] = "
        "{**optimizer.state[p], 'exp_avg': ...}, or {} for a state without steps, or optimizer.state.clear() for all parameters")


def _refuse() -> NoReturn:
    raise Error(_HOW, 'BAD_REQUEST')


class Copy(torch.Tensor):
    """A tensor whose in-place operations raise, those of its views too. Any other operation gives plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        copies = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [each._version for each in copies]
            result = func(*args, **kwargs)
            if before != [each._version for each in copies]:
                _refuse()
            memory = {each.untyped_storage().data_ptr() for each in copies if each.numel()}

            def kept(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.as_subclass(cls) if tensor.numel() and tensor.untyped_storage().data_ptr() in memory else tensor
            return _pytree.tree_map(lambda each: kept(each) if type(each) is torch.Tensor else each, result)

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


@functools.cache
def _sharded_copy() -> type[torch.Tensor]:
    """The class of a DTensor's copies: made once torch has DTensors, see tensor_module()."""

    class ShardedCopy(tensor_module().DTensor):
        """As Copy; the memory of this rank is a Copy."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, '__name__', '')
            if name.endswith('_') and not name.endswith('__'):
                _refuse()  # torch._foreach_* of DTensors move no version counter
            copies = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, cls)]
            with torch._C.DisableTorchFunctionSubclass():
                before = [each._version for each in copies]
                result = func(*args, **kwargs)
                if before != [each._version for each in copies]:
                    _refuse()
                memory = {each._local_tensor.untyped_storage().data_ptr() for each in copies if each._local_tensor.numel()}

                def kept(each: Any) -> Any:
                    here = each._local_tensor if type(each) is tensor_module().DTensor else None
                    if here is None or not here.numel() or here.untyped_storage().data_ptr() not in memory:
                        return each
                    return cls(here.as_subclass(Copy), each._spec, requires_grad=each.requires_grad)
                return _pytree.tree_map(kept, result)

        def _plain(self) -> torch.Tensor:
            return tensor_module().DTensor(self._local_tensor._plain(), self._spec, requires_grad=False)

        def __deepcopy__(self, memo: Any) -> torch.Tensor:
            return self._plain().clone()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._plain().__reduce_ex__(protocol)

    return ShardedCopy


def _copy(value: torch.Tensor) -> torch.Tensor:
    if is_sharded(value):
        return _sharded_copy()(value._local_tensor.as_subclass(Copy), value._spec, requires_grad=False)
    return value.as_subclass(Copy)


class Entry(dict):
    """One parameter's state. A pickle or copy of it is an OrderedDict of tensors like others."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__({key: _copy(value) for key, value in values.items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())

    def _no(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _no
