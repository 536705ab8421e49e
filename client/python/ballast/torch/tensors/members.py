"""Parameters that are registered with a job, and their memory on this rank."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch.ranks.groups import Group
from ballast.torch.tensors import marks
from ballast.torch.tensors.kinds import DTYPES, digest_of, is_sharded, local, versions_of
from ballast.torch.tensors.placement import Key
from ballast.torch.tensors.remote import Part, part_of

_GRADIENT_STEPS = 64


class Line(NamedTuple):
    """What a rank says of a parameter."""
    name: str
    what: str  # dtype, shape, group and unit: the same wherever the name is
    shape: tuple[int, ...]
    key: Key | None
    trained: bool  # False: it is in a group there, and wants no gradient
    tied: bool = False  # gradients of several stages are summed


class Member:
    """A parameter that is registered: its place in the job, and the mark of Ballast's last write to it; with debug also a digest."""

    def __init__(self, line: Line, group: int, parameter: torch.Tensor, debug: bool = False) -> None:
        self.line, self.name, self.group, self.parameter = line, line.name, group, parameter
        self.turn = zlib.crc32(line.name.encode())  # when its gradient is compared: the same on all ranks
        self.mark: marks.Mark | None = None
        self.digest: int | None = None
        self.debug = debug
        self.agreed = False  # ranks have compared a gradient
        self.is_frozen = False  # the servers have its value alone
        self.is_master = False  # the servers have its moments alone: whatever is written to it counts
        self.shape = local(parameter).shape
        marks.note([self])

    def is_due(self, steps: int, debug: bool) -> bool:
        """Replicas compare the gradient in this step: in the first, and then in one of _GRADIENT_STEPS; all with debug. steps: made."""
        return debug or not self.agreed or self.turn % _GRADIENT_STEPS == steps % _GRADIENT_STEPS

    @property
    def versions(self) -> tuple[int, int, int]:
        return versions_of(self.parameter)

    def digest_now(self) -> int:
        return digest_of(self.parameter)

    @property
    def here(self) -> torch.Tensor | None:
        """The parameter's memory on this rank; None where it lives on the servers alone."""
        return local(self.parameter).detach()

    def initial(self) -> torch.Tensor:
        """This rank's part of the values that a new job begins with, where the parameter has no memory."""
        raise NotImplementedError

    @property
    def moved(self) -> bool:
        """The parameter is in other memory now."""
        return self.mark is not None and self.mark.versions[-1] != local(self.parameter).data_ptr()

    def check_shape(self) -> None:
        """Refuses a parameter that is not what was registered."""
        if self.moved and local(self.parameter).shape != self.shape:
            raise Error(f"parameter '{self.name}' has shape {list(local(self.parameter).shape)} on this rank, and registered with "
                        f'{list(self.shape)}; make a new optimizer for new parameters', 'BAD_SPEC')


class RemoteMember(Member):
    """A parameter that lives on the servers alone. Nothing writes to it but the servers, so nothing marks edits."""

    def __init__(self, line: Line, group: int, parameter: torch.Tensor, part: Part, debug: bool = False) -> None:
        super().__init__(line, group, parameter, debug)
        self._part = part

    @property
    def moved(self) -> bool:
        return False

    @property
    def here(self) -> torch.Tensor | None:
        return None

    def initial(self) -> torch.Tensor:
        return self._part.home.initial(self._part)

    def check_shape(self) -> None:
        pass


def member_of(line: Line, group: int, parameter: torch.Tensor, debug: bool) -> Member:
    """line: what the ranks are told of the parameter."""
    part = part_of(parameter)
    return Member(line, group, parameter, debug) if part is None else RemoteMember(line, group, parameter, part, debug)


class Fresh(NamedTuple):
    """A parameter that is about to register."""
    member: Member
    parameter: torch.Tensor
    tensor: _native.Tensor


def frozen_as(parameter: torch.Tensor) -> str:
    """What the servers of a new job keep of a parameter: '' for its state, else _native.Tensor.frozen."""
    part = part_of(parameter)
    return '' if part is None or parameter.requires_grad else part.home.frozen


def check_frozen(members: Iterable[Member]) -> None:
    """Refuses to train what the servers have no state of."""
    for member in members:
        if member.is_frozen and member.parameter.requires_grad:
            raise Error(f"parameter '{member.name}' wants a gradient, and was frozen when the job was made: the servers have its value "
                        'alone, and nothing to train it with. Leave it frozen, or make a new job in which it is not, or of '
                        "shard(frozen='state')", 'UNSUPPORTED')


def wrote(members: Iterable[Member]) -> None:
    """Ballast has written to parameters: their counters move once, as by one of torch's in-place operations."""
    members = [member for member in members if member.here is not None]
    for member in members:
        torch.autograd.graph.increment_version(local(member.parameter))
    marks.note(members)


def _check_parallel(name: str, parameter: torch.Tensor, group: Group) -> None:
    """Refuses a parameter of which only a part is here, where nothing of torch's says which part."""
    if getattr(parameter, '_fsdp_flattened', False):
        raise Error(f"parameter '{name}' belongs to FullyShardedDataParallel (FSDP1), whose ranks keep parts of flat parameters; expected "
                    'torch.distributed.fsdp.fully_shard (FSDP2), or DistributedDataParallel', 'UNSUPPORTED')
    if group.several and getattr(parameter, 'tensor_model_parallel', False):
        raise Error(f"parameter '{name}' has Megatron's attribute tensor_model_parallel: ranks keep parts of it, which they call by one "
                    'name; expected whole parameters, or DTensors', 'UNSUPPORTED')
    if not is_sharded(parameter):
        if is_traceable_wrapper_subclass(parameter):
            raise Error(f"parameter '{name}' is a {type(parameter).__name__}, a wrapper of other tensors: no memory of its own holds its "
                        'values; train the tensors within, or plain parameters', 'UNSUPPORTED')


def check_parameter(name: str, parameter: torch.Tensor, group: Group) -> None:
    if parameter.dtype not in DTYPES:
        what = 'complex parameters are' if parameter.is_complex() else f'{parameter.dtype} is'
        raise Error(f"parameter '{name}': {what} not supported; expected float32, bfloat16 or float16",
                    'BAD_DTYPE')
    _check_parallel(name, parameter, group)
    if parameter.is_inference():
        raise Error(f"parameter '{name}' was made within torch.inference_mode(), where no version counter tells of edits; make the model "
                    'outside, or give a clone of it', 'UNSUPPORTED')
    if parameter.device.type not in ('cpu', 'cuda'):
        raise Error(f"parameter '{name}' is on {parameter.device}; expected the CPU, or a GPU that torch calls cuda", 'UNSUPPORTED')


def warn_of_others(members: Sequence[Member], group: Group) -> None:
    """Warns where other processes may write to parameters as well, as Hogwild's do: no version counter tells, and the next step undoes
    it."""
    shared = next((member.name for member in members
                   if member.here is not None and member.parameter.device.type == 'cpu' and local(member.parameter).is_shared()), None)
    if shared is not None and multiprocessing.parent_process() is not None and not group.several:
        warn(f"parameter '{shared}' lies in memory that is shared with other processes, and a step undoes what they write to it: where "
             'several train one model (Hogwild), use DistributedDataParallel; where this one alone does, nothing is wrong')
