"""Ranks agree before they do something together: an error on one rank is an error on all ranks, in the same words, and whatever must
be the same on all ranks is compared."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ballast.errors import Error
from ballast.torch.job import ranks
from ballast.torch.job.ranks import Exchange, Within
from ballast.torch.stepping.members import Member, digest_of, is_sharded, local
from ballast.torch.stepping.sketch import is_finite, near, sketch

if TYPE_CHECKING:
    from ballast import _native
    from ballast.torch.job.registration import Fresh

Result = TypeVar('Result')

_WRONG, _FINE = b'!', b'.'
_TEXT_MAX = 4096
_HASH_BYTES = 32
# Of a message: entries of a model of many parameters take megabytes, which the store of torch.distributed would hold in one value.
_PART_BYTES = 1 << 16
# Each gradient is compared at its first step, and then in one step of so many.
_GRADIENT_STEPS = 64


class Collected(NamedTuple):
    """One rank's side of a step, nothing of it done yet."""
    fresh: list[Fresh]
    members: list[Member]  # those included
    gradients: list[torch.Tensor | None]  # of members.gradient_of, by member
    edited: list[bool]  # by member
    groups: list[_native.GroupHyper]
    checked: list[int]  # members, by index, whose gradients are compared

    @property
    def present(self) -> list[bool]:
        return [gradient is not None for gradient in self.gradients]

    def settle(self) -> None:
        """Brings gradients to where their parameters are. COLLECTIVE: all ranks have told that they have the same ones to bring."""
        for i, gradient in enumerate(self.gradients):
            if gradient is not None and is_sharded(gradient):
                placed = gradient.redistribute(placements=self.members[i].parameter.placements)
                self.gradients[i] = local(placed).detach().contiguous()


def checked(members: Sequence[Member], steps: int, debug: bool) -> list[int]:
    """Members, by index, whose gradients are compared in this step: tensors that all ranks hold whole."""
    return [i for i, member in enumerate(members) if not is_sharded(member.parameter)
            and (debug or not member.agreed or i % _GRADIENT_STEPS == steps % _GRADIENT_STEPS)]


# --- errors

def _describe(error: Exception) -> bytes:
    reason = error.reason if isinstance(error, Error) else ''
    text = str(error).removesuffix(f' [{reason}]')
    if not isinstance(error, Error):
        text = f'{type(error).__name__}: {text}'
    return _WRONG + json.dumps({'text': text[:_TEXT_MAX], 'reason': reason}).encode()


def everyone(exchange: Exchange, act: Callable[[], Result], say: Callable[[Result], bytes]) -> tuple[Result, list[bytes]]:
    """act() on every rank: returns its result here, and say(result) of all ranks. An error is that of the first rank that has one, on
    all."""
    result = wrong = None
    try:
        result = act()
        mine = _FINE + say(result)
    except Exception as error:
        wrong, mine = error, _describe(error)
    try:
        said = exchange(mine)
    except Error as error:
        if wrong is None or error.reason == 'RANKS_DIFFER':
            raise
        raise wrong from error  # a rank that does not come is the lesser news
    for rank, each in enumerate(said):
        if not each.startswith(_WRONG):
            continue
        if wrong is not None and each == mine:
            raise wrong
        there = json.loads(each[1:])
        raise Error(f"rank {rank}: {there['text']}", there['reason'])
    return result, [each[1:] for each in said]


def together(exchange: Exchange, act: Callable[[], Result]) -> Result:
    """act() on every rank: returns its result here. An error on one is an error on all."""
    return everyone(exchange, act, lambda _: b'')[0]


# --- what is the same on all ranks

def _hash(entries: Sequence[tuple[str, str]]) -> bytes:
    return hashlib.sha256(json.dumps(entries).encode()).digest()


def _other(said: Sequence[Any]) -> int | None:
    """The first rank that says something else than rank 0, or None."""
    return next((rank for rank, each in enumerate(said) if each != said[0]), None)


def _in_parts(exchange: Exchange, mine: bytes) -> list[bytes]:
    """All ranks' bytes, which may be many, in messages of a bounded length."""
    longest = max(int(each) for each in exchange(str(len(mine)).encode()))
    parts = [exchange(mine[begin:begin + _PART_BYTES]) for begin in range(0, longest, _PART_BYTES)]
    return [b''.join(of_rank) for of_rank in zip(*parts)]


def _refuse_other(exchange: Exchange, hashes: Sequence[bytes], entries: Sequence[tuple[str, str]]) -> None:
    """entries, (what, value) as texts, are the same on all ranks, each of which said a hash of them; else the first difference is told."""
    other = _other(hashes)
    if other is None:
        return
    mine = zlib.compress(json.dumps(entries).encode()) if ranks.rank() in (0, other) else b''
    said = _in_parts(Within('what differs', exchange), mine)
    first, second = (dict(json.loads(zlib.decompress(said[rank]))) for rank in (0, other))
    for there, has, not_there in ((0, first, second), (other, second, first)):
        lacking = [what for what in has if what not in not_there]
        if lacking:
            more = f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''
            raise Error(f'rank {there} has {lacking[0]}{more}, and rank {other - there} has not; expected one model on all ranks, whole '
                        'or in the rows of fully_shard, with gradients wanted of the same parameters: stages of a pipeline, and other '
                        'parts of a model that ranks keep for themselves, are not supported', 'RANKS_DIFFER')
    for what, value in first.items():
        if second[what] != value:
            raise Error(f'{what} is {value} on rank 0 and {second[what]} on rank {other}; expected the same on all ranks', 'RANKS_DIFFER')
    here, there = next((one, two) for one, two in zip(first, second) if one != two)
    raise Error(f'{here} comes where rank {other} has {there}; expected one order on all ranks', 'RANKS_DIFFER')


def alike(exchange: Exchange, act: Callable[[], Result], entries: Callable[[Result], Sequence[tuple[str, str]]]) -> Result:
    """act() on every rank; entries(result), (what, value) as texts, are the same on all."""
    result, said = everyone(exchange, act, lambda result: _hash(entries(result)))
    _refuse_other(exchange, said, entries(result))
    return result


def check_values(exchange: Exchange, members: Sequence[Member]) -> None:
    """Those that all ranks hold whole are the same on all."""
    members = [member for member in members if not is_sharded(member.parameter)]
    if ranks.world_size() == 1 or not members:
        return
    _, said = everyone(Within('values', exchange), lambda: _pack(digest_of(member.parameter) for member in members), bytes)
    _check_lengths(said, 4 * len(members))
    other = _other(said)
    if other is not None:
        member = members[_first(said[0], said[other])]
        raise Error(f"parameter '{member.name}' has other values on rank {other} than on rank 0, and is a plain tensor, which all ranks "
                    'hold alike: wrap the model in DistributedDataParallel, which makes them so, or shard it by fully_shard; ranks that '
                    'keep parts of a model for themselves (tensor, expert or pipeline parallel) are not supported', 'RANKS_DIFFER')


def _pack(digests: Iterable[int]) -> bytes:
    return b''.join(struct.pack('<I', digest) for digest in digests)


def _check_lengths(said: Sequence[bytes], expected: int) -> None:
    for rank, each in enumerate(said):
        if len(each) != expected:
            raise Error(f'rank {rank} compares {len(each)} bytes, and others {expected}; expected one model and one release of ballast on '
                        'all ranks', 'RANKS_DIFFER')


def _unpack(said: bytes) -> list[int]:
    return [digest for digest, in struct.iter_unpack('<I', said)]


def _first(one: bytes, two: bytes) -> int:
    """The index of the first digest that differs."""
    return next(i for i, (a, b) in enumerate(zip(_unpack(one), _unpack(two))) if a != b)


# --- a step

def _entries(collected: Collected) -> list[tuple[str, str]]:
    fresh = [(f"parameter '{member.name}'", 'new') for member, _, _ in collected.fresh]
    placed = [(f"the gradient of parameter '{member.name}'", str(gradient.placements))
              for member, gradient in zip(collected.members, collected.gradients) if gradient is not None and is_sharded(gradient)]
    return [*fresh, ("the number of the job's parameters", str(len(collected.members))), *placed]


def _say(collected: Collected) -> bytes:
    is_checked = set(collected.checked)
    return (_hash(_entries(collected)) + bytes(collected.edited) + bytes(collected.present)
            + bytes(i in is_checked for i in range(len(collected.members))) + _digests(collected))


def _digests(collected: Collected) -> bytes:
    return _pack(0 if collected.gradients[i] is None else digest_of(collected.gradients[i]) for i in collected.checked)


def agree(exchange: Exchange, collect: Callable[[], Collected]) -> tuple[Collected, list[bool], list[bool]]:
    """collect() on every rank. Returns (collected, edited, present): for each member, whether any rank has edited it, and whether any has
    a gradient of it. An error on one rank is an error on all, which would wait for it else."""
    collected, said = everyone(exchange, collect, _say)
    _refuse_other(exchange, [each[:_HASH_BYTES] for each in said], _entries(collected))
    count = len(collected.members)
    cuts = [_HASH_BYTES + i * count for i in range(4)] + [None]
    edited, present, compared, gradients = ([each[begin:end] for each in said] for begin, end in zip(cuts, cuts[1:]))
    _check_present(collected.members, present)
    if _other(compared) is not None:  # debug is set on some ranks alone
        collected = collected._replace(checked=[i for i, flags in enumerate(zip(*compared)) if any(flags)])
        _, gradients = everyone(Within('gradients', exchange), lambda: _digests(collected), bytes)
    _check_lengths(gradients, 4 * len(collected.checked))
    if _other(gradients) is not None:
        _check_gradients(exchange, collected, gradients)
    for i in collected.checked:
        collected.members[i].agreed |= bool(present[0][i])
    return (collected, *([any(bits) for bits in zip(*flags)] for flags in (edited, present)))


_REDUCE = ('ranks take a step with reduced gradients: wrap the model in DistributedDataParallel, shard it by fully_shard, or all-reduce '
           'the gradients before step(). With DDP, look for parameters that it was told to ignore, and for no_sync() around the last '
           'backward')


def _check_present(members: Sequence[Member], present: Sequence[bytes]) -> None:
    if _other(present) is None:
        return
    for member, *has in zip(members, *present):
        if len(set(has)) > 1 and not is_sharded(member.parameter):
            raise Error(f"parameter '{member.name}' has a gradient on rank {has.index(1)} and none on rank {has.index(0)}, and {_REDUCE}",
                        'RANKS_DIFFER')


def _check_gradients(exchange: Exchange, collected: Collected, said: Sequence[bytes]) -> None:
    """Compares numbers where bits differ: clipping on unlike machines leaves the last bit to each."""
    for i, *of_ranks in zip(collected.checked, *map(_unpack, said)):
        if len(set(of_ranks)) == 1:
            continue
        _, told = everyone(Within('sums of gradients', exchange), lambda i=i: json.dumps(sketch(collected.gradients[i])), str.encode)
        sketches = [json.loads(each) for each in told]
        other = next((rank for rank, each in enumerate(sketches) if not near(sketches[0], each)), None)
        if other is None:
            continue
        what = f'another gradient on rank {other} than on rank 0'
        if is_finite(sketches[0]) != is_finite(sketches[other]):
            where, finite = (other, 0) if is_finite(sketches[0]) else (0, other)
            what = f'an Inf or a NaN in its gradient on rank {where} and none on rank {finite}'
        raise Error(f"parameter '{collected.members[i].name}' has {what}, and {_REDUCE}", 'RANKS_DIFFER')
