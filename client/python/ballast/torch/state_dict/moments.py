"""torch's names of an optimizer's moments, in the order of the servers' arrays; and copies of what the servers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ballast.torch.stepping.members import is_sharded, on_host, tensor_module

if TYPE_CHECKING:
    from ballast import _native
    from ballast.torch.stepping.members import Member

MOMENTS = {
    'adamw': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'adam': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'sgd': ('momentum_buffer',),
    'adagrad': ('sum',),
    'lion': ('exp_avg',),
}
KNOWN = {name for names in MOMENTS.values() for name in names}


def moment_names(kind: str, spec: _native.Optimizer) -> tuple[str, ...]:
    """spec: the job's."""
    names = MOMENTS[kind]
    if kind in ('adam', 'adamw') and not spec.amsgrad:
        names = names[:2]
    if kind == 'sgd' and not spec.momentum:
        names = ()
    return names


@torch.inference_mode(False)  # whose tensors do not tell whether they were written to
def read(session: _native.Session, member: Member, parameter: torch.Tensor, names: Sequence[str], start: float,
         whole: bool) -> dict[str, torch.Tensor]:
    """One parameter's entry, in the shape and with the names of torch.optim. start: what Adagrad's sum is before the first step. whole:
    whole tensors also of a DTensor; else as read_as_placed()."""
    reads = read_array if whole else read_as_placed
    steps = session.tensor_steps(member.name)
    entry = {'step': torch.tensor(float(steps), dtype=torch.float32, device='cpu')}
    for i, name in enumerate(names):
        entry[name] = reads(session, member, parameter, f'moment{i + 1}')
        if steps == 0:
            entry[name] += start
    if parameter.dtype != torch.float32:
        # torch's optimizers pass over it; without it a 16-bit parameter would go on from its rounded value.
        entry['master'] = reads(session, member, parameter, 'master')
    return entry


def read_part(session: _native.Session, member: Member, array: str) -> torch.Tensor:
    """This rank's elements."""
    if array == 'master' and session.lends_masters:
        return on_host(member.parameter).clone()
    values = torch.empty(member.shape, dtype=torch.float32, device='cpu')
    session.read_part(member.name, array, values.reshape(-1))
    return values


def read_array(session: _native.Session, member: Member, parameter: torch.Tensor, array: str) -> torch.Tensor:
    if array == 'master' and session.lends_masters:
        return read_part(session, member, array)
    values = torch.empty(parameter.numel(), dtype=torch.float32, device='cpu')
    session.read(member.name, array, values)
    return values.reshape(parameter.shape)


def read_as_placed(session: _native.Session, member: Member, parameter: torch.Tensor, array: str) -> torch.Tensor:
    """A DTensor's array as a DTensor of the same mesh and placements, of which this rank reads its own part into the host's memory,
    whatever device the mesh is of. A plain tensor's array is read whole."""
    if not is_sharded(parameter):
        return read_array(session, member, parameter, array)
    return as_placed(parameter, read_part(session, member, array))


def as_placed(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor placed as `parameter`. part: its memory on this rank."""
    # from_local() would bring the part to the mesh's device.
    spec = parameter._spec
    spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    return tensor_module().DTensor(part, spec, requires_grad=False)
