"""The memory of members' parameters and gradients, where servers read it and write to it."""

from __future__ import annotations

import mmap
from collections.abc import Container, Sequence

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.tensors.host_memory import HostMemory, is_elsewhere
from ballast.torch.tensors.kinds import DTYPES, is_sharded, local
from ballast.torch.tensors.members import Member, StateMember
from ballast.torch.tensors.remote import gone_of


def gradient_of(member: Member) -> torch.Tensor | None:
    """Returns the memory of a member's gradient on this rank. None: it has no gradient. If it is placed in another way than its parameter,
    returns the DTensor."""
    parameter, gradient = member.parameter, member.parameter.grad
    if gradient is None:
        return None
    if is_sharded(gradient) != is_sharded(parameter):
        kinds = {False: 'a plain tensor', True: 'a DTensor'}
        raise Error(f"parameter '{member.name}' is {kinds[is_sharded(parameter)]}, but its gradient is {kinds[is_sharded(gradient)]}; "
                    'before step(), distribute the gradient as the parameter is, or take full_tensor() of it', 'BAD_SPEC')
    if gradient.layout != torch.strided:
        raise Error(f"parameter '{member.name}' has a sparse gradient; expected a dense one. Make its layer with sparse=False",
                    'UNSUPPORTED')
    if gradient.dtype not in DTYPES:
        raise Error(f"parameter '{member.name}' has a gradient of {gradient.dtype}; expected float32, bfloat16 or "
                    'float16', 'BAD_DTYPE')
    if is_sharded(gradient) and is_sharded(parameter):
        if gradient.device_mesh != parameter.device_mesh:
            raise Error(f"parameter '{member.name}' is over {parameter.device_mesh}, but its gradient is over {gradient.device_mesh}; "
                        'expected one mesh', 'BAD_SPEC')
        if gradient.placements != parameter.placements:
            return gradient
    if gone_of(gradient) is not None:
        return local(gradient)  # it went before the step
    if local(gradient).shape != local(parameter).shape:
        raise Error(f"parameter '{member.name}' has shape {list(local(parameter).shape)}, but its gradient has "
                    f'{list(local(gradient).shape)}: was .data set to another tensor after backward?', 'BAD_SPEC')
    return local(gradient).detach().contiguous()


def in_host(host: HostMemory, member: Member, what: str, tensor: torch.Tensor, read: bool = True) -> torch.Tensor:
    """Returns a contiguous tensor in the host's memory: the tensor itself, or its place in `host`. read: its values are on their way
    there."""
    if not is_elsewhere(tensor):
        return tensor.contiguous()
    place = host.place((member.name, what), tensor)
    if read:
        host.copy(place, tensor)
    return place


class Memory:
    """Members' parameters and gradients as contiguous tensors in the host's memory. They are the members' own memory, or copies on their
    way. write_back() brings to a parameter what was written."""

    def __init__(self, members: Sequence[Member], host: HostMemory, gradients: Sequence[torch.Tensor | None] | None = None,
                 there: Container[int] = frozenset(), reads: bool = False) -> None:
        """host: the job's. gradients: of gradient_of(), by member. None: no gradients. there: members, by index, whose gradients are in the
        host's memory already. reads: read parameters that have a gradient, too."""
        self._members, self._host = members, host
        self.parameters: list[torch.Tensor | None] = []  # None: it lives on the servers alone
        self.gradients: list[torch.Tensor | None] = []
        for i, (member, gradient) in enumerate(zip(members, gradients or [None] * len(members))):
            # With a gradient it will be written, and else it is read, unless it is its own master.
            here = member.here
            self.parameters.append(None if here is None else in_host(host, member, 'parameter', here, read=reads or gradient is None))
            gradient = None if gone_of(gradient) is not None else gradient
            self.gradients.append(None if gradient is None else in_host(host, member, 'gradient', gradient, read=i not in there))
        self._copied = host.enqueued()

    def wait(self) -> Memory:
        """Returns when the copies are there. Threads: any."""
        for event in self._copied:
            event.synchronize()
        return self

    @property
    def is_copied(self) -> bool:
        return any(here is not None and is_elsewhere(here) for here in (member.here for member in self._members))

    def write_back(self, i: int) -> None:
        parameter, written = self._members[i].here, self.parameters[i]
        if parameter is not None and written is not None and (is_elsewhere(parameter) or not parameter.is_contiguous()):
            self._host.copy(parameter, written)


def give_values(session: _native.Session, members: Sequence[Member], memory: Memory, blob: bytes = b'') -> None:
    """Gives tensors without values on the servers the values of their parameters. A parameter without memory gets those of
    Member.initial(), one after another. COLLECTIVE. memory: of the members. blob: the job's; b'': it stays as it is."""
    parameters = memory.parameters
    if not session.pushes_gradients:
        # The server reads values where they are if it has them all. Else it would need memory for them beside the state.
        parameters = [_zeros(member) if isinstance(member, StateMember) else here for member, here in zip(members, parameters)]
    failed: list[BaseException] = []

    def initial(i: int) -> torch.Tensor:
        try:
            return members[i].initial()
        except BaseException as error:
            failed.append(error)
            raise
    try:
        session.initialise(parameters, initial, blob)
    except BaseException:
        if failed:
            raise failed[0] from None
        raise


def _zeros(member: StateMember) -> torch.Tensor:
    """Returns a state's first values, which take no memory: pages that nobody writes to are the system's page of zeros."""
    state = member.parameter
    size = max(state.numel() * state.itemsize, 1)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:state.numel() * state.itemsize].view(state.dtype).view(member.shape)
