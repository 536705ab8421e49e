"""torch's modes that would change what a method does: torch.compile, which traces what it calls; torch.inference_mode, whose tensors
nobody may write to afterwards; and torch.set_flush_denormal, by which all denormals are equal to zero."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar('Function', bound=Callable[..., Any])
Class = TypeVar('Class', bound=type)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """By element, whether two tensors of one dtype with 16 or 32 bits have the same bits."""
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return a.view(bits) == b.view(bits)


def plainly(function: Function) -> Function:
    """`function`, run as it is in whatever mode its caller is. Within a compiled function it is a graph break, as torch.optim's own
    methods around step() are."""
    @torch._disable_dynamo  # imports torch._dynamo at the first call, as torch.optim's constructor does
    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    return plain


def methods_plainly(*besides: str) -> Callable[[Class], Class]:
    """A class decorator: runs the constructor, public methods and properties plainly, but `besides`."""
    def decorate(cls: Class) -> Class:
        for name, value in list(vars(cls).items()):
            if name in besides or (name.startswith('_') and name != '__init__'):
                continue
            if isinstance(value, types.FunctionType):
                setattr(cls, name, plainly(value))
            elif isinstance(value, property):
                setattr(cls, name, property(plainly(value.fget), value.fset and plainly(value.fset), doc=value.__doc__))
        return cls
    return decorate
