"""Marks of Ballast's last write to a parameter: they tell whether somebody else has written to it since."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ballast import _native
from ballast.errors import warn

if TYPE_CHECKING:
    from ballast.torch.stepping.members import Member

# On a GPU, as _native.samples() on the host: every element of a small tensor, else one of so many; a prime number, so that a column of a
# matrix meets some.
_WHOLE_BYTES = 16 << 10
_PERIOD = 401
_turns = itertools.count()


class Mark(NamedTuple):
    """versions tell of torch's operations. A sample tells of writes that these do not show: by .data, numpy or DLPack."""
    versions: tuple[int, int, int]
    turn: int  # which part is the sample: another one each time
    sample: int | torch.Tensor  # of a tensor on a GPU a tensor there, so that nothing waits for it


def in_order(memory: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order of its memory: a copy where they do not lie together."""
    if memory.is_contiguous():
        return memory
    return memory.permute(sorted(range(memory.dim()), key=lambda dim: -memory.stride(dim))).contiguous()


def _on_device(memory: torch.Tensor, turn: int) -> torch.Tensor:
    elements = memory.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[memory.element_size()])
    if elements.numel() * elements.element_size() > _WHOLE_BYTES:
        elements = elements[turn % _PERIOD::_PERIOD]
    places = torch.arange(1, elements.numel() + 1, dtype=torch.int64, device=elements.device)
    return (elements * places).sum()


def _samples(memory: Sequence[torch.Tensor], turns: Sequence[int]) -> list[int | torch.Tensor]:
    memory = [in_order(each) for each in memory]
    here = [i for i, each in enumerate(memory) if each.device.type == 'cpu']
    of_host = dict(zip(here, _native.samples([memory[i] for i in here], [turns[i] for i in here])))
    return [of_host[i] if i in of_host else _on_device(memory[i], turns[i]) for i in range(len(memory))]


def _differ(noted: Sequence[int | torch.Tensor], samples: Sequence[int | torch.Tensor]) -> list[bool]:
    differ = [isinstance(sample, int) and sample != was for was, sample in zip(noted, samples)]
    on_device = [i for i, sample in enumerate(samples) if isinstance(sample, torch.Tensor)]
    for device in {samples[i].device for i in on_device}:
        there = [i for i in on_device if samples[i].device == device]
        for i, differs in zip(there, (torch.stack([noted[i] for i in there]) != torch.stack([samples[i] for i in there])).tolist()):
            differ[i] = differs
    return differ


def note(members: Iterable[Member]) -> None:
    """Parameters are as Ballast wrote them, or took them over."""
    members = [member for member in members if member.here is not None]
    turn = next(_turns)
    sampled = [member for member in members if not member.is_master]
    samples = dict(zip(map(id, sampled), _samples([member.here for member in sampled], [turn] * len(sampled))))
    for member in members:
        member.mark = Mark(member.versions, turn, samples.get(id(member), 0))
        member.digest = member.digest_now() if member.debug and not member.is_master else None


def edited(members: Sequence[Member]) -> list[bool]:
    """By member: whether somebody else has written to the parameter since note(), and its master is elsewhere."""
    for member in members:
        member.check_shape()
    there = [i for i, member in enumerate(members) if member.here is not None and not member.is_master]
    found = [False] * len(members)
    for i in there:
        found[i] = members[i].mark.versions != members[i].versions
    unsure = [i for i in there if not found[i]]
    samples = _samples([members[i].here for i in unsure], [members[i].mark.turn for i in unsure])
    for i, differs in zip(unsure, _differ([members[i].mark.sample for i in unsure], samples)):
        found[i] = differs or (members[i].debug and _edited_unseen(members[i]))
    return found


def _edited_unseen(member: Member) -> bool:
    if member.digest == member.digest_now():
        return False
    warn(f"parameter '{member.name}' was written to by .data, numpy or DLPack, in so few elements that without debug the next step may "
         'undo it: call sync_from_params() after such a write')
    return True
