"""Parameters that are registered with a job, with their memory on this rank."""

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
# What the name of a StateMember has behind its parameter's.
STATE_SUFFIX = '#state'


class Line(NamedTuple):
    """What a rank tells about a parameter."""
    name: str
    what: str  # dtype, shape, group and unit: the same wherever the name is
    shape: tuple[int, ...]
    key: Key | None
    trained: bool  # False: it is in a group there, and wants no gradient
    tied: bool = False  # gradients of several stages are summed


class Member:
    """A registered parameter: its place in the job, and the mark of Ballast's last write to it. With debug it also has a digest."""

    def __init__(self, line: Line, group: int, parameter: torch.Tensor, debug: bool = False) -> None:
        self.line, self.name, self.group, self.parameter = line, line.name, group, parameter
        self.turn = zlib.crc32(line.name.encode())  # when its gradient is compared: the same on all ranks
        self.mark: marks.Mark | None = None
        self.digest: int | None = None
        self.debug = debug
        self.agreed = False  # ranks have compared a gradient
        self.is_frozen = False  # the servers have its value alone
        self.is_assisted = False  # the trainer computes its updates, from whole gradients
        self.is_master = False  # the servers have its moments alone: whatever is written to it counts
        self.shape = local(parameter).shape
        marks.note([self])

    def is_due(self, steps: int, debug: bool) -> bool:
        """Replicas compare the gradient in this step. They do so in the first step, and then in one of _GRADIENT_STEPS; with debug in every
        step. steps: made so far."""
        return debug or not self.agreed or self.turn % _GRADIENT_STEPS == steps % _GRADIENT_STEPS

    @property
    def versions(self) -> tuple[int, int, int]:
        return versions_of(self.parameter)

    def digest_now(self) -> int:
        return digest_of(self.parameter)

    @property
    def here(self) -> torch.Tensor | None:
        """The parameter's memory on this rank. None: it lives only on the servers."""
        return local(self.parameter).detach()

    def initial(self) -> torch.Tensor:
        """Returns this rank's part of the values that a new job begins with, if the parameter has no memory."""
        raise NotImplementedError

    def initial_digest(self) -> int:
        """Returns what the first values of all ranks that have the same part must have alike."""
        return self.digest_now()

    @property
    def moved(self) -> bool:
        """The parameter is in other memory now."""
        return self.mark is not None and self.mark.versions[-1] != local(self.parameter).data_ptr()

    def check_shape(self) -> None:
        """Refuses a parameter whose shape is not the registered one."""
        if self.moved and local(self.parameter).shape != self.shape:
            raise Error(f"parameter '{self.name}' has shape {list(local(self.parameter).shape)} on this rank, but registered with "
                        f'{list(self.shape)}; make a new optimizer for new parameters', 'BAD_SPEC')


class ApartMember(Member):
    """A tensor that lives only on the servers. Nobody else writes to it, so there are no edits to mark."""

    @property
    def moved(self) -> bool:
        return False

    @property
    def here(self) -> torch.Tensor | None:
        return None

    def check_shape(self) -> None:
        pass


class RemoteMember(ApartMember):
    """A parameter of shard()."""

    def __init__(self, line: Line, group: int, parameter: torch.Tensor, part: Part, debug: bool = False) -> None:
        super().__init__(line, group, parameter, debug)
        self._part = part

    def initial(self) -> torch.Tensor:
        return self._part.home.initial(self._part)

    def initial_digest(self) -> int:
        return self._part.home.initial_digest(self._part)


class StateMember(ApartMember):
    """State of an optimizer that the trainer assists, such as Muon's momentum, of the elements that this rank has of a parameter."""

    def __init__(self, of: Member) -> None:
        """of: the parameter's."""
        name = of.name + STATE_SUFFIX
        line = of.line._replace(name=name, what=f'the state of {of.line.what}', tied=False)
        super().__init__(line, of.group, torch.empty(of.shape, dtype=of.parameter.dtype, device='meta'))
        self.of = of

    def initial_digest(self) -> int:
        return 0

    def initial(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.parameter.dtype, device='cpu')


def member_of(line: Line, group: int, parameter: torch.Tensor, debug: bool) -> Member:
    """Returns the member for a parameter. line: what ranks are told about it."""
    part = part_of(parameter)
    return Member(line, group, parameter, debug) if part is None else RemoteMember(line, group, parameter, part, debug)


class Fresh(NamedTuple):
    """A parameter that is about to register."""
    member: Member
    parameter: torch.Tensor
    tensor: _native.Tensor


def frozen_as(parameter: torch.Tensor) -> str:
    """Returns what servers of a new job keep of a parameter: '' for its state, or else _native.Tensor.frozen."""
    part = part_of(parameter)
    return '' if part is None or parameter.requires_grad else part.home.frozen


def check_frozen(members: Iterable[Member]) -> None:
    """Refuses to train a parameter if the servers have no state of it."""
    for member in members:
        if member.is_frozen and member.parameter.requires_grad:
            raise Error(f"parameter '{member.name}' wants a gradient, but was frozen when the job was made, so the servers have only its "
                        'value and cannot train it. Leave it frozen, make a new job in which it is not, or make the job with '
                        "shard(frozen='state')", 'UNSUPPORTED')


def wrote(members: Iterable[Member]) -> None:
    """Notes that Ballast has written to parameters. Their version counters move once, as in an in-place operation of torch."""
    members = [member for member in members if member.here is not None]
    for member in members:
        torch.autograd.graph.increment_version(local(member.parameter))
    marks.note(members)


def _check_parallel(name: str, parameter: torch.Tensor, group: Group) -> None:
    """Refuses a parameter if only a part of it is here, and torch does not say which part."""
    if getattr(parameter, '_fsdp_flattened', False):
        raise Error(f"parameter '{name}' belongs to FullyShardedDataParallel (FSDP1), whose ranks keep parts of flat parameters; use "
                    'torch.distributed.fsdp.fully_shard (FSDP2) or DistributedDataParallel', 'UNSUPPORTED')
    if group.several and getattr(parameter, 'tensor_model_parallel', False):
        raise Error(f"parameter '{name}' has Megatron's attribute tensor_model_parallel: ranks keep different parts of it under one name; "
                    'expected whole parameters, or DTensors', 'UNSUPPORTED')
    if not is_sharded(parameter):
        if is_traceable_wrapper_subclass(parameter):
            raise Error(f"parameter '{name}' is a {type(parameter).__name__}, a wrapper of other tensors, whose values are in no memory "
                        'of its own; train the tensors within, or plain parameters', 'UNSUPPORTED')


def check_parameter(name: str, parameter: torch.Tensor, group: Group) -> None:
    if parameter.dtype not in DTYPES:
        what = 'complex parameters are' if parameter.is_complex() else f'{parameter.dtype} is'
        raise Error(f"parameter '{name}': {what} not supported; expected float32, bfloat16 or float16",
                    'BAD_DTYPE')
    _check_parallel(name, parameter, group)
    if parameter.is_inference():
        raise Error(f"parameter '{name}' was made within torch.inference_mode(), where no version counter tells of edits; make the model "
                    'outside, or give a clone of the parameter', 'UNSUPPORTED')
    if parameter.device.type not in ('cpu', 'cuda'):
        raise Error(f"parameter '{name}' is on {parameter.device}; expected the CPU, or a GPU that torch calls cuda." + (
            " On the meta device it has no values: ballast.torch.shard(model, weights='folder') streams them from a checkpoint to the "
            'servers, or give the model values before the optimizer' if parameter.is_meta else ''), 'UNSUPPORTED')


def warn_of_others(members: Sequence[Member], group: Group) -> None:
    """Warns if other processes may write to parameters too, as with Hogwild. No version counter shows that, and the next step overwrites
    it."""
    shared = next((member.name for member in members
                   if member.here is not None and member.parameter.device.type == 'cpu' and local(member.parameter).is_shared()), None)
    if shared is not None and multiprocessing.parent_process() is not None and not group.several:
        warn(f"parameter '{shared}' lies in memory that is shared with other processes, and each step overwrites what they write to it. "
             'If several processes train one model (Hogwild), use DistributedDataParallel. If only this one trains it, nothing is wrong')
