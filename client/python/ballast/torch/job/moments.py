"""torch's names of an optimizer's moments, in the order of the servers' arrays; and copies of what the servers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ballast.torch.tensors.kinds import is_sharded, on_host, type_of_dtensors
from ballast.torch.tensors.members import STATE_SUFFIX

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ballast import _native
    from ballast.torch.algorithms import Algorithm
    from ballast.torch.tensors.members import Member

MOMENTS = {
    'adamw': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'adam': ('exp_avg', 'exp_avg_sq', 'max_exp_avg_sq'),
    'sgd': ('momentum_buffer',),
    'adagrad': ('sum',),
    'lion': ('exp_avg',),
    'ademamix': ('exp_avg_fast', 'exp_avg_sq', 'exp_avg_slow'),
    'adamw_schedule_free': ('z_minus_y', 'exp_avg_sq'),
    'muon': ('momentum_buffer',),
}
KNOWN = {name for names in MOMENTS.values() for name in names}
# Sums, means or maxima of squares.
SQUARES = {'exp_avg_sq', 'max_exp_avg_sq', 'sum'}
# Keys of an entry that servers hold. What others put beside them stays in the trainer.
OURS = KNOWN | {'step', 'master'}


class Array(NamedTuple):
    """Where servers have a key of a parameter's entry: this array, of the tensor with the parameter's name and a suffix."""
    name: str
    suffix: str = ''


MASTER = Array('master')


def arrays(algorithm: Algorithm, group: dict[str, Any], spec: _native.Optimizer) -> dict[str, Array]:
    """Returns by torch's name the moments that parameters of a param_group have. spec: the job's."""
    if algorithm.assists(group):
        return {algorithm.state_name: Array('master', STATE_SUFFIX)}
    return {name: Array(f'moment{k + 1}') for k, name in enumerate(_moment_names(algorithm.kind, spec))}


def _moment_names(kind: str, spec: _native.Optimizer) -> tuple[str, ...]:
    names = MOMENTS[kind]
    if kind in ('adam', 'adamw') and not spec.amsgrad:
        names = names[:2]
    if kind == 'sgd' and not spec.momentum:
        names = ()
    return names


def keys(parameter: torch.Tensor, names: Iterable[str]) -> tuple[str, ...]:
    """Those of one parameter's entry. names: of the moments."""
    # torch's optimizers pass over a master; without it a 16-bit parameter would go on from its rounded value.
    return ('step', *names) if parameter.dtype == torch.float32 else ('step', *names, 'master')


@torch.inference_mode(False)  # whose tensors do not tell whether they were written to
def read(session: _native.Session, member: Member, parameter: torch.Tensor, of: Mapping[str, Array], key: str, start: float,
         whole: bool) -> torch.Tensor:
    """One of keys(), in the shape of torch.optim. of: arrays() of the parameter. start: what Adagrad's sum is before the first step. whole:
    a whole tensor also of a DTensor; else as read_as_placed()."""
    suffix = next((array.suffix for array in of.values()), '')  # a load that leaves masters alone counts with the moments
    steps = session.tensor_steps(member.name + suffix)
    if key == 'step':
        return torch.tensor(float(steps), dtype=torch.float32, device='cpu')
    array = of.get(key, MASTER)
    value = (read_array if whole else read_as_placed)(session, member, parameter, array)
    if array != MASTER and steps == 0:
        value += start
    return value


def read_part(session: _native.Session, member: Member, array: Array = MASTER) -> torch.Tensor:
    """This rank's elements."""
    if array == MASTER and session.lends_masters:
        return on_host(member.parameter).clone()
    values = torch.empty(member.shape, dtype=torch.float32, device='cpu')
    session.read_part(member.name + array.suffix, array.name, values.reshape(-1))
    return values


def read_array(session: _native.Session, member: Member, parameter: torch.Tensor, array: Array = MASTER) -> torch.Tensor:
    if array == MASTER and session.lends_masters:
        return read_part(session, member, array)
    values = torch.empty(parameter.numel(), dtype=torch.float32, device='cpu')
    session.read(member.name + array.suffix, array.name, values)
    return values.reshape(parameter.shape)


def read_as_placed(session: _native.Session, member: Member, parameter: torch.Tensor, array: Array = MASTER) -> torch.Tensor:
    """A DTensor's array as a DTensor of the same mesh and placements, of which this rank reads its own part into the host's memory,
    whatever device the mesh is of. A plain tensor's array is read whole."""
    if not is_sharded(parameter):
        return read_array(session, member, parameter, array)
    return as_placed(parameter, read_part(session, member, array))


def as_placed(parameter: DTensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor placed as `parameter`. part: its memory on this rank."""
    # from_local() would bring the part to the mesh's device.
    spec = parameter._spec
    meta = spec.tensor_meta
    spec = dataclasses.replace(spec, tensor_meta=None if meta is None else meta._replace(dtype=part.dtype))
    return type_of_dtensors()(part, spec, requires_grad=False)
