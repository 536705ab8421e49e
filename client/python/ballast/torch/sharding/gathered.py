"""Whole parameters of a model that shard() has taken, for export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.sharding.remote import Part, remote_of


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """Within it, `module` (a model that shard() has taken, or a part of one) has whole parameters at the job's version, on the host, in
    their own dtype, and in memory for all of them: to save state_dict(), say. They are copies, which nothing takes over: write by
    model.load_state_dict() outside. Forward passes need no gathered(): FSDP2 gathers for them. Any one rank may enter, if the job is
    open; the first use of a job is of all ranks.

    Errors: an Error if no parameter of the module was sharded, and at the end if one of the copies was written to."""
    from torch.distributed.fsdp import FSDPModule
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()  # after a pass without a gradient FSDP2 keeps whole parameters in the place of ours
    whole: dict[Part, nn.Parameter] = {}
    kept = []
    for inner in module.modules():
        for leaf, parameter in inner._parameters.items():
            part = remote_of(parameter)
            if part is not None:
                kept.append((inner, leaf, part, parameter))
    if not kept:
        raise Error('gathered(module): no parameter of it lives on the servers; was shard() called, does no forward pass run, and is the '
                    'module the model, or one that fully_shard has wrapped?', 'BAD_REQUEST')
    try:
        for inner, leaf, part, parameter in kept:
            if part not in whole:
                values = torch.empty(part.shape.numel(), dtype=torch.float32, device='cpu')
                model = part.unit.model
                model.open().session.read(model.tensors[part], 'master', values)
                whole[part] = nn.Parameter(values.to(parameter.dtype).view(part.shape), requires_grad=False)
            inner._parameters[leaf] = whole[part]
        yield module
        written = next((part for part, copy in whole.items() if not copy.is_inference() and copy._version > 0), None)
        if written is not None:
            raise Error(f"parameter '{written.name}' was written to within gathered(): that was a copy, and the servers have their own "
                        "values still; load a state_dict() that has the new ones by the model's load_state_dict(), outside gathered()",
                        'UNSUPPORTED')
    finally:
        for inner, leaf, _, parameter in kept:
            inner._parameters[leaf] = parameter
