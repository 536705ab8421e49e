"""The part of a job that is fixed when it is made: optimizer, its options, dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.algorithms import Algorithm
from ballast.torch.job.naming import Parameters
from ballast.torch.tensors.kinds import DTYPES
from ballast.torch.tensors.members import Member, frozen_as
from ballast.torch.tensors.remote import is_coded, working_dtype


def of(algorithm: Algorithm, formats: Mapping[str, str], parameters: Parameters, may_lend: bool) -> _native.Optimizer:
    """Returns what the parameters and groups of a job that is not open ask for. formats: how servers keep moments and master. may_lend:
    parameters become their own masters if they can."""
    spec = _native.Optimizer()
    spec.kind, spec.moments, spec.master = algorithm.kind, formats['moments'], formats['master']
    for group in parameters.groups:
        for key, value in algorithm.spec(group).items():
            setattr(spec, key, value or getattr(spec, key))
    # Frozen ones too: they may want gradients later, unless the servers have values alone of them.
    spec.gradient = _only({parameter.dtype for parameter in parameters.all() if not frozen_as(parameter)}
                          or {parameter.dtype for parameter in parameters.all()})
    spec.working = _working(list(parameters.all()))
    if may_lend and own_masters(spec, parameters.all()):
        spec.master = 'lent'
    return spec


def own_masters(spec: _native.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Parameters can be their own masters: fp32 masters would be the same numbers, so a server in the same process keeps no copies. A
    parameter on a GPU cannot, since it would have to come to the host before each step; nor can one that holds a schedule-free optimizer's
    average at times."""
    return (spec.master == 'f32' and spec.kind != 'adamw_schedule_free'
            and all(parameter.dtype == torch.float32 and parameter.device.type in ('cpu', 'meta') for parameter in parameters))


def _working(parameters: Sequence[torch.Tensor]) -> str:
    if not any(map(is_coded, parameters)):
        return _only({working_dtype(parameter) for parameter in parameters})
    if not all(map(is_coded, parameters)):
        raise Error("shard(working='f8'): the optimizer has other parameters too, and a job has one working dtype, which only parameters "
                    "of that model decode. Give them an optimizer of their own, or leave out working='f8'", 'UNSUPPORTED')
    return 'f8'


def _only(dtypes: set[torch.dtype]) -> str:
    """Returns the dtype that all have, or one that holds them all."""
    return DTYPES.get(next(iter(dtypes)), 'f32') if len(dtypes) == 1 else 'f32'


def check(algorithm: Algorithm, groups: Sequence[dict[str, Any]], spec: _native.Optimizer) -> None:
    """Refuses a group that asks for what its job was not made for."""
    for g, group in enumerate(groups):
        for key, value in algorithm.spec(group).items():
            if value == getattr(spec, key) or (key == 'momentum' and not value):  # a group without leaves its buffer as it is
                continue
            if key == 'momentum':
                raise Error(f"group {g} has momentum={group['momentum']!r}, but the job was made without momentum buffers, since all "
                            'groups had momentum=0. If a schedule raises momentum, make the job with momentum_buffer=True', 'BAD_SPEC')
            raise Error(f'group {g} has {key}={value!r}, and the job was made with {key}={getattr(spec, key)!r}. A job has one {key} for '
                        'all groups, and keeps it', 'BAD_SPEC')


def check_dtypes(spec: _native.Optimizer, members: Sequence[Member], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuses a dtype that would be rounded, since a job keeps one dtype of parameters and one of gradients. gradients: by member."""
    for member, gradient in zip(members, gradients):
        dtype = working_dtype(member.parameter)
        if spec.master == 'lent' and dtype != torch.float32:
            raise Error(f"parameter '{member.name}' is {dtype}, and the job's are float32 and their own masters, so each step would round "
                        'it. Give all parameters to the optimizer before the first step, and change their dtype before it', 'BAD_DTYPE')
        if spec.working == 'f8' and not is_coded(member.parameter):
            raise Error(f"parameter '{member.name}' has memory here, and the job's working parameters are f8, which only parameters of "
                        "shard(working='f8') decode. Give it an optimizer of its own", 'UNSUPPORTED')
        if spec.working not in ('f32', 'f8', DTYPES.get(dtype)):
            raise Error(f"parameter '{member.name}' is {dtype}, the job's are {spec.working}, so it would be rounded. Give all parameters "
                        'to the optimizer before the first step, and change their dtype before it', 'BAD_DTYPE')
        if gradient is not None and spec.gradient not in ('f32', DTYPES.get(gradient.dtype)):
            raise Error(f"parameter '{member.name}' has a gradient of {gradient.dtype}, the job's are {spec.gradient}, so it would be "
                        'rounded. Leave grad_dtype as it is, or keep parameters in float32 and compute under autocast', 'BAD_DTYPE')
