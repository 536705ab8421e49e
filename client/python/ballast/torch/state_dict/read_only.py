"""Copies of what servers hold: a write to a copy raises an error that tells how to write to the servers instead."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils import _pytree

from ballast.errors import Error

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


class Entry(dict):
    """One parameter's state. A pickle or copy of it is an OrderedDict of tensors like others."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__({key: value.as_subclass(Copy) for key, value in values.items()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())

    def _no(self, *_: Any, **__: Any) -> NoReturn:
        _refuse()

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _no
