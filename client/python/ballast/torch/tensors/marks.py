"""Marks of Ballast's last write to a parameter. They show whether somebody else has written to it since."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from ballast import _native
from ballast.errors import warn

# A sample on a GPU works as _native.samples() does on the host. It takes every element of a small tensor, and else one of this many. The
# number is prime, so that each column of a matrix has some.
_WHOLE_BYTES = 16 << 10
_PERIOD = 401
# A sample of the host may miss a write of so many bytes in a row.
_MISSED_BYTES = 960
# A vector is one row of each element. A longer one, as of flattened parameters, is sampled.
_VECTOR_BYTES = 1 << 20
_turns = itertools.count()


class Mark(NamedTuple):
    """versions show torch's operations. The sample shows other writes: by .data, numpy or DLPack."""
    versions: tuple[int, int, int]
    turn: int  # which part is the sample: another one each time
    sample: int | torch.Tensor  # of a tensor on a GPU a tensor there, so that nothing waits for it


class Marked(Protocol):
    """What marks need of a parameter. See Member."""
    name: str
    mark: Mark | None
    digest: int | None
    debug: bool
    is_master: bool

    @property
    def here(self) -> torch.Tensor | None: ...
    @property
    def versions(self) -> tuple[int, int, int]: ...
    def digest_now(self) -> int: ...
    def check_shape(self) -> None: ...


def in_order(memory: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor in the order of its memory. It copies them only if they do not lie together."""
    if memory.is_contiguous():
        return memory
    strides = memory.stride()
    return memory.permute(sorted(range(memory.dim()), key=lambda dim: -strides[dim])).contiguous()


def _on_device(memory: torch.Tensor, turn: int) -> torch.Tensor:
    elements = memory.reshape(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32}[memory.element_size()])
    if elements.numel() * elements.element_size() > _WHOLE_BYTES:
        elements = elements[turn % _PERIOD::_PERIOD]
    places = torch.arange(1, elements.numel() + 1, dtype=torch.int64, device=elements.device)
    return (elements * places).sum()


def _turn_of(memory: torch.Tensor, turn: int) -> int:
    """A sample would miss a write to one short row, such as a token's, so it takes the whole of such a matrix."""
    if memory.dim() < 2:
        return _native.EVERY_LINE if memory.numel() * memory.element_size() <= _VECTOR_BYTES else turn
    row = memory.numel() // max(1, memory.shape[0]) * memory.element_size()
    return _native.EVERY_LINE if row <= _MISSED_BYTES else turn


def _samples(memory: Sequence[torch.Tensor], turns: Sequence[int]) -> list[int | torch.Tensor]:
    memory = [in_order(each) for each in memory]
    here = [i for i, each in enumerate(memory) if each.device.type == 'cpu']
    of_host = dict(zip(here, _native.samples([memory[i] for i in here], [_turn_of(memory[i], turns[i]) for i in here])))
    return [of_host[i] if i in of_host else _on_device(memory[i], turns[i]) for i in range(len(memory))]


def _differ(noted: Sequence[int | torch.Tensor], samples: Sequence[int | torch.Tensor]) -> list[bool]:
    differ = [isinstance(sample, int) and sample != was for was, sample in zip(noted, samples)]
    on_device = [(i, was, sample) for i, (was, sample) in enumerate(zip(noted, samples))
                 if isinstance(was, torch.Tensor) and isinstance(sample, torch.Tensor)]
    for device in {sample.device for _, _, sample in on_device}:
        there = [each for each in on_device if each[2].device == device]
        unlike = torch.stack([was for _, was, _ in there]) != torch.stack([sample for _, _, sample in there])
        for (i, _, _), differs in zip(there, unlike.tolist()):
            differ[i] = differs
    return differ


def note(members: Iterable[Marked]) -> None:
    """Notes that parameters are as Ballast wrote them, or took them over."""
    there = [(member, here) for member in members if (here := member.here) is not None]
    turn = next(_turns)
    sampled = [(member, here) for member, here in there if not member.is_master]
    samples = dict(zip((id(member) for member, _ in sampled), _samples([here for _, here in sampled], [turn] * len(sampled))))
    for member, _ in there:
        member.mark = Mark(member.versions, turn, samples.get(id(member), 0))
        member.digest = member.digest_now() if member.debug and not member.is_master else None


def edited(members: Sequence[Marked]) -> list[bool]:
    """Returns by member whether somebody else has written to the parameter since note(), though its master is elsewhere."""
    for member in members:
        member.check_shape()
    there = [(i, here, mark) for i, member in enumerate(members)
             if not member.is_master and (here := member.here) is not None and (mark := member.mark) is not None]
    found = [False] * len(members)
    for i, _, mark in there:
        found[i] = mark.versions != members[i].versions
    unsure = [each for each in there if not found[each[0]]]
    samples = _samples([here for _, here, _ in unsure], [mark.turn for _, _, mark in unsure])
    for (i, _, _), differs in zip(unsure, _differ([mark.sample for _, _, mark in unsure], samples)):
        found[i] = differs or (members[i].debug and _edited_unseen(members[i]))
    return found


def _edited_unseen(member: Marked) -> bool:
    if member.digest == member.digest_now():
        return False
    warn(f"parameter '{member.name}' was written to by .data, numpy or DLPack, in so few elements that without debug the next step may "
         'undo it; call sync_from_params() after such a write')
    return True
