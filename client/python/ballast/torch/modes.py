"""torch's modes that would change what a method does: torch.compile, which traces what it calls; torch.inference_mode, whose tensors
nobody may write to afterwards; and torch.set_flush_denormal, by which all denormals are equal to zero."""

import functools
import types

import torch

# Not public, and reached where no public method was before: by step(), whose closure runs in the caller's modes, and by State.
_INNER = ('__init__', '_step', '_read_state', '_read_master')


def same_bits(a, b):
    """By element, of two tensors of one dtype with 16 or 32 bits."""
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return a.view(bits) == b.view(bits)


def plainly(function):
    """`function`, run as it is in whatever mode its caller is. Within a compiled function it is a graph break, as torch.optim's own
    methods around step() are."""
    @torch._disable_dynamo  # imports torch._dynamo at the first call, as torch.optim's constructor does
    @functools.wraps(function)
    def plain(*args, **kwargs):
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)
    return plain


def methods_plainly(*besides):
    """A class decorator: its public methods and properties, but `besides`."""
    def decorate(cls):
        for name, value in list(vars(cls).items()):
            if name in besides or (name.startswith('_') and name not in _INNER):
                continue
            if isinstance(value, types.FunctionType):
                setattr(cls, name, plainly(value))
            elif isinstance(value, property):
                setattr(cls, name, property(plainly(value.fget), value.fset and plainly(value.fset), doc=value.__doc__))
        return cls
    return decorate
