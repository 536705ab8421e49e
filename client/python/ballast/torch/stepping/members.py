"""Parameters that are registered with a job, and their memory on this rank."""

from __future__ import annotations

import multiprocessing
import sys
import zlib
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch.sharding.remote import remote_of
from ballast.torch.stepping import marks
from ballast.torch.stepping.host_memory import HostMemory, is_elsewhere

if TYPE_CHECKING:
    from ballast.torch.group.ranks import Group
    from ballast.torch.group.roster import Line

_GRADIENT_STEPS = 64
DTYPES = {torch.float32: 'f32', torch.bfloat16: 'bf16', torch.float16: 'f16'}


def tensor_module() -> Any:
    """torch's module of DTensors, or None: as long as nobody has imported the module, no tensor is one. Importing it takes as long as a
    third of torch, which a trainer that comes back need not wait for."""
    # The latter: torch 2.4, which has the former without its contents. A module that is still being imported has made no tensor yet.
    names = ('torch.distributed.tensor', 'torch.distributed._tensor')
    return next((module for module in map(sys.modules.get, names) if hasattr(module, 'DTensor') and hasattr(module, 'Shard')), None)


def is_sharded(tensor: torch.Tensor) -> bool:
    module = tensor_module()
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, contiguous, in the host's memory: a copy where they are not that."""
    return local(tensor).detach().cpu().contiguous()


def digest_of(tensor: torch.Tensor) -> int:
    """CRC-32C of this rank's elements."""
    return _native.crc32c(on_host(tensor).reshape(-1).view(torch.uint8))


def versions_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What any operation of torch's changes that writes to the tensor, but one by way of .data."""
    # An operation on a DTensor moves its own counter and not that of its local tensor.
    memory = local(tensor)
    return tensor._version, memory._version, memory.data_ptr()


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
        return self.mark.versions[-1] != local(self.parameter).data_ptr()

    def check_shape(self) -> None:
        """Refuses a parameter that is not what was registered."""
        if self.moved and local(self.parameter).shape != self.shape:
            raise Error(f"parameter '{self.name}' has shape {list(local(self.parameter).shape)} on this rank, and registered with "
                        f'{list(self.shape)}; make a new optimizer for new parameters', 'BAD_SPEC')


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


def gradient_of(member: Member) -> torch.Tensor | None:
    """The memory of a member's gradient on this rank, None if it has none; a DTensor where it is not placed as its parameter is."""
    parameter, gradient = member.parameter, member.parameter.grad
    if gradient is None:
        return None
    if is_sharded(gradient) != is_sharded(parameter):
        kinds = {False: 'a plain tensor', True: 'a DTensor'}
        raise Error(f"parameter '{member.name}' is {kinds[is_sharded(parameter)]}, and its gradient is {kinds[is_sharded(gradient)]}; "
                    "expected a gradient like its parameter: distribute it, or take full_tensor() of it, before step()", 'BAD_SPEC')
    if gradient.layout != torch.strided:
        raise Error(f"parameter '{member.name}' has a sparse gradient; expected a dense one: make its layer with "
                    'sparse=False', 'UNSUPPORTED')
    if gradient.dtype not in DTYPES:
        raise Error(f"parameter '{member.name}' has a gradient of {gradient.dtype}; expected float32, bfloat16 or "
                    'float16', 'BAD_DTYPE')
    if is_sharded(gradient):
        if gradient.device_mesh != parameter.device_mesh:
            raise Error(f"parameter '{member.name}' is over {parameter.device_mesh}, and its gradient over {gradient.device_mesh}; "
                        'expected one mesh', 'BAD_SPEC')
        if gradient.placements != parameter.placements:
            return gradient
    if remote_of(gradient) is not None:
        return local(gradient)  # it went before the step
    if local(gradient).shape != local(parameter).shape:
        raise Error(f"parameter '{member.name}' has shape {list(local(parameter).shape)}, and its gradient {list(local(gradient).shape)}: "
                    'was .data set to another tensor after backward?', 'BAD_SPEC')
    return local(gradient).detach().contiguous()


def in_host(host: HostMemory, member: Member, what: str, tensor: torch.Tensor, read: bool = True) -> torch.Tensor:
    """A contiguous tensor in the host's memory: itself, or its place in `host`, to which its values are on their way if `read`."""
    if not is_elsewhere(tensor):
        return tensor.contiguous()
    place = host.place((member.name, what), tensor)
    if read:
        host.copy(place, tensor)
    return place


class Memory:
    """Members' parameters and gradients as contiguous tensors in the host's memory: their own, or copies on their way. write_back()
    brings to a parameter what was written."""

    def __init__(self, members: Sequence[Member], host: HostMemory, gradients: Sequence[torch.Tensor | None] | None = None,
                 there: Container[int] = frozenset(), reads: bool = False) -> None:
        """host: the job's. gradients: of gradient_of(), an entry per member; none of them without. there: members,
        by index, whose gradients have been brought to it before. reads: also parameters with a gradient are read."""
        self._members, self._host = members, host
        self.parameters: list[torch.Tensor | None] = []  # None: it lives on the servers alone
        self.gradients: list[torch.Tensor | None] = []
        for i, (member, gradient) in enumerate(zip(members, gradients or [None] * len(members))):
            # With a gradient it will be written, and else it is read, unless it is its own master.
            here = member.here
            self.parameters.append(None if here is None else in_host(host, member, 'parameter', here, read=reads or gradient is None))
            gone = gradient is None or remote_of(gradient) is not None
            self.gradients.append(None if gone else in_host(host, member, 'gradient', gradient, read=i not in there))
        self._copied = host.enqueued()

    def wait(self) -> Memory:
        """Returns when copies are there. Any thread."""
        for event in self._copied:
            event.synchronize()
        return self

    @property
    def is_copied(self) -> bool:
        return any(here is not None and is_elsewhere(here) for here in (member.here for member in self._members))

    def write_back(self, i: int) -> None:
        parameter = self._members[i].here
        if parameter is None:
            return
        if is_elsewhere(parameter) or not parameter.is_contiguous():
            self._host.copy(parameter, self.parameters[i])


def give_values(session: _native.Session, members: Sequence[Member], memory: Memory) -> None:
    """Tensors without values on the servers get those of their parameters, and those of Member.initial() where a parameter has no memory,
    one after another. COLLECTIVE. memory: of the members."""
    failed: list[BaseException] = []

    def initial(i: int) -> torch.Tensor:
        try:
            return members[i].initial()
        except BaseException as error:
            failed.append(error)
            raise
    try:
        session.initialise(memory.parameters, initial)
    except BaseException:
        if failed:
            raise failed[0] from None
        raise
