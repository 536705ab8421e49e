"""Modes of torch that would change what a method does. torch.compile traces what it calls. Nobody may later write to tensors made in
torch.inference_mode. With torch.set_flush_denormal all denormals equal zero."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from typing_extensions import ParamSpec
    Arguments = ParamSpec('Arguments')

Result = TypeVar('Result')
Class = TypeVar('Class', bound=type)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns by element whether two tensors of one dtype with 16 or 32 bits have the same bits."""
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return a.view(bits) == b.view(bits)


def plainly(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns `function` such that it runs unchanged, whatever mode its caller is in. In a compiled function it is a graph break, as are
    torch.optim's own methods around step()."""
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    untraced = _disable_dynamo(run)

    @functools.wraps(function)
    def plain(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (untraced if _may_be_traced() else run)(*args, **kwargs)
    return plain


def _may_be_traced() -> bool:
    """torch's compiler is imported. Hiding a function from the compiler imports it at the first call, which takes half as long as importing
    torch. A trainer that comes back after a crash should not wait for that."""
    return 'torch._dynamo' in sys.modules


def of_torch(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns the method beneath one that torch hides from its compiler, as long as the compiler is not imported. If others have replaced
    the method, returns theirs."""
    function = method.__func__ if isinstance(method, types.MethodType) else None
    if not isinstance(method, types.MethodType) or _may_be_traced() or _file_of(function) != _HIDES:
        return method
    beneath: Callable[Arguments, Result] = types.MethodType(vars(function)['__wrapped__'], method.__self__)
    return beneath


def _file_of(function: object) -> str | None:
    return function.__code__.co_filename if isinstance(function, types.FunctionType) else None


_HIDES = _file_of(_disable_dynamo(lambda: None))


def methods_plainly(*besides: str) -> Callable[[Class], Class]:
    """A class decorator. It runs the constructor, public methods and properties plainly, except `besides`."""
    def decorate(cls: Class) -> Class:
        for name, value in list(vars(cls).items()):
            if name in besides or (name.startswith('_') and name != '__init__'):
                continue
            if isinstance(value, types.FunctionType):
                setattr(cls, name, plainly(value))
            elif isinstance(value, property):
                setattr(cls, name, property(value.fget and plainly(value.fget), value.fset and plainly(value.fset), doc=value.__doc__))
        return cls
    return decorate
