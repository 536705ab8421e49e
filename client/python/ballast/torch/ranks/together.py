"""Ranks do one thing together. An error on one rank becomes an error on all ranks, in the same words. What must be the same on all ranks is
compared."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ballast.errors import Error
from ballast.torch.ranks.groups import Exchange, Within

Result = TypeVar('Result')

_WRONG, _FINE = b'!', b'.'
_TEXT_MAX = 4096
# Of a message: entries of a model of many parameters take megabytes, which the store of torch.distributed would hold in one value.
_PART_BYTES = 1 << 16


def _describe(error: Exception) -> bytes:
    reason = error.reason if isinstance(error, Error) else ''
    text = str(error).removesuffix(f' [{reason}]')
    if not isinstance(error, Error):
        text = f'{type(error).__name__}: {text}'
    return _WRONG + json.dumps({'text': text[:_TEXT_MAX], 'reason': reason}).encode()


def everyone(exchange: Exchange, act: Callable[[], Result], say: Callable[[Result], bytes]) -> tuple[Result, list[bytes]]:
    """Runs act() on every rank. Returns its result here, and say(result) of all ranks. If ranks raise, all raise the error of the first."""
    results: list[Result] = []  # act()'s, if it has not raised
    wrong: Exception | None = None
    try:
        results.append(act())
        mine = _FINE + say(results[0])
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
    return results[0], [each[1:] for each in said]


def together(exchange: Exchange, act: Callable[[], Result]) -> Result:
    """Runs act() on every rank, and returns its result here. An error on one rank is an error on all."""
    return everyone(exchange, act, lambda _: b'')[0]


def _hash(entries: Sequence[tuple[str, str]]) -> bytes:
    return hashlib.sha256(json.dumps(entries).encode()).digest()


def _other(said: Sequence[Any]) -> int | None:
    """Returns the first rank whose value differs from rank 0's, or None."""
    return next((rank for rank, each in enumerate(said) if each != said[0]), None)


def in_parts(exchange: Exchange, mine: bytes) -> list[bytes]:
    """Exchanges bytes, however many, in messages of bounded length. Returns all ranks' bytes."""
    longest = max(int(each) for each in exchange(str(len(mine)).encode()))
    parts = [exchange(mine[begin:begin + _PART_BYTES]) for begin in range(0, longest, _PART_BYTES)]
    return [b''.join(of_rank) for of_rank in zip(*parts)]


def _refuse_other(exchange: Within, hashes: Sequence[bytes], entries: Sequence[tuple[str, str]]) -> None:
    """Raises an error that names the first difference, unless all ranks have the same hash. entries: (what, value), as texts."""
    other = _other(hashes)
    if other is None:
        return
    mine = zlib.compress(json.dumps(entries).encode()) if exchange.rank in (0, other) else b''
    said = in_parts(Within('what differs', exchange), mine)
    first, second = (dict(json.loads(zlib.decompress(said[rank]))) for rank in (0, other))
    for there, has, not_there in ((0, first, second), (other, second, first)):
        lacking = [what for what in has if what not in not_there]
        if lacking:
            more = f' and {len(lacking) - 1} more' if len(lacking) > 1 else ''
            raise Error(f'rank {there} has {lacking[0]}{more}, but rank {other - there} has not; expected the same on all ranks',
                        'RANKS_DIFFER')
    for what, value in first.items():
        if second[what] != value:
            raise Error(f'{what} is {value} on rank 0 and {second[what]} on rank {other}; expected the same on all ranks', 'RANKS_DIFFER')
    here, there = next((one, two) for one, two in zip(first, second) if one != two)
    raise Error(f'rank 0 has {here} where rank {other} has {there}; expected the same order on all ranks', 'RANKS_DIFFER')


def alike(exchange: Within, act: Callable[[], Result], entries: Callable[[Result], Sequence[tuple[str, str]]]) -> Result:
    """Runs act() on every rank, and returns its result here. entries(result), pairs of (what, value) as texts, must be the same on all."""
    result, said = everyone(exchange, act, lambda result: _hash(entries(result)))
    _refuse_other(exchange, said, entries(result))
    return result
