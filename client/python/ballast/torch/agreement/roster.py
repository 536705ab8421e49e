"""Which rank has which parameters of a job, and who has the same part."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ballast.errors import Error, warn
from ballast.torch.ranks.groups import Exchange, Group, Within
from ballast.torch.ranks.together import everyone, in_parts
from ballast.torch.tensors import placement
from ballast.torch.tensors.members import Line


class Place(NamedTuple):
    """A parameter in the list of a rank."""
    rank: int
    at: int


class Roster:
    """The lists of all ranks' parameters. Ranks may have different parameters, as stages of a pipeline or experts do."""

    def __init__(self, group: Group, lists: Sequence[Sequence[Line]], groups: Sequence[int]) -> None:
        """group: the job's ranks. lists: the distinct lists. groups: by rank, the number of its list."""
        self.group = group
        self._trained = [[line for line in lines if line.trained] for lines in lists]
        self._groups = groups
        self.is_alike = len(lists) == 1
        self.has_tied = any(line.tied for lines in self._trained for line in lines)
        parts = self._parts()
        self.parts = list(parts.items())  # by name of the parameter: all ranks that have a part of it
        # Several ranks that have the same part.
        self.classes = [(name, alike) for name, places in self.parts for alike in self._classes(places) if len(alike) > 1]
        shapes = {line.name: line.shape for lines in self._trained for line in lines}
        self.sizes = [math.prod(shapes[name]) for name in parts]  # elements of the whole parameter
        # Of this rank's parameters, in its order.
        own = [line.name for line in self._trained[groups[group.rank]]]
        self.holders = [parts[name] for name in own]
        self.replicas = self._replicas(own)

    def _parts(self) -> dict[str, list[Place]]:
        where = [{line.name: i for i, line in enumerate(lines)} for lines in self._trained]
        names = dict.fromkeys(name for of_list in where for name in of_list)
        return {name: [Place(rank, where[group][name]) for rank, group in enumerate(self._groups) if name in where[group]]
                for name in names}

    def _classes(self, places: list[Place]) -> list[list[Place]]:
        """places: of one parameter."""
        if len(places) == 1:
            return [places]
        by_box: dict[tuple[tuple[int, int], ...], list[Place]] = {}
        for place in places:
            by_box.setdefault(self._box(place), []).append(place)
        return list(by_box.values())

    def _replicas(self, own: Sequence[str]) -> list[list[Place]]:
        """By this rank's parameters: the ranks that have its part of it, itself among them."""
        mine = self.group.rank
        with_me = {name: alike for name, alike in self.classes if any(place.rank == mine for place in alike)}
        return [with_me.get(name, [Place(mine, i)]) for i, name in enumerate(own)]

    def _box(self, place: Place) -> tuple[tuple[int, int], ...]:
        line = self._trained[self._groups[place.rank]][place.at]
        if line.key is None or not line.shape:
            return tuple((0, extent) for extent in line.shape)
        box = placement.box(line.key, line.shape, place.rank)
        # A rank without an element has nothing to compare, so it shares a box with no other rank.
        return box if all(begin < end for begin, end in box) else ((-1, place.rank),)

    def divided(self, places: Sequence[Place]) -> int:
        """Returns how many different parts of a parameter these ranks have. places: all of the parameter's."""
        return len(self._classes(list(places)))

    @property
    def places(self) -> bool:
        """Ranks have parts of parameters, or different parameters. Otherwise each rank has all of them whole."""
        return not self.is_alike or any(line.key is not None for line in self._trained[0])

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Refuses a message whose number of parameters is not that of its rank."""
        for rank, length in enumerate(lengths):
            has = len(self._trained[self._groups[rank]])
            if length != has:
                raise Error(f'rank {rank} compares {length} parameters, but has {has}; run the same release of ballast on all ranks',
                            'RANKS_DIFFER')


def _bytes(lines: Sequence[Line]) -> bytes:
    return json.dumps(lines).encode()


def _lines(said: bytes) -> list[Line]:
    def key_of(key: Any) -> placement.Key | None:
        return None if key is None else (tuple(key[0]), tuple(key[1]), tuple((axis, dimension) for axis, dimension in key[2]))
    return [Line(name, what, tuple(shape), key_of(key), trained, tied) for name, what, shape, key, trained, tied in json.loads(said)]


def gather(exchange: Exchange, lines: Sequence[Line], group: Group) -> Roster:
    """Gathers all ranks' lists. COLLECTIVE. Refuses a name that means different tensors on two ranks, or that one rank trains and another
    freezes."""
    if not group.several:
        return Roster(group, [list(lines)], [0])
    _, hashes = everyone(Within('parameters', exchange), lambda: hashlib.sha256(_bytes(lines)).digest(), bytes)
    different = list(dict.fromkeys(hashes))
    groups = [different.index(each) for each in hashes]
    if len(different) == 1:
        roster = Roster(group, [list(lines)], groups)
    else:
        tells = groups.index(groups[group.rank]) == group.rank
        said = in_parts(Within('parameters that differ', exchange), zlib.compress(_bytes(lines)) if tells else b'')
        lists = [_lines(zlib.decompress(said[groups.index(each)])) for each in range(len(different))]
        _check(lists, groups)
        roster = Roster(group, lists, groups)
        if group.rank == 0:
            _warn(lists, groups)
    return roster


def _check(lists: Sequence[Sequence[Line]], groups: Sequence[int]) -> None:
    names = [{line.name for line in lines} for lines in lists]
    for line, key in ((line, line.key) for lines in lists for line in lines if line.key is not None):
        for rank in key[0]:
            has = all(begin < end for begin, end in placement.box(key, line.shape, rank))
            if has and line.name not in names[groups[rank]]:
                raise Error(f"parameter '{line.name}' is a DTensor over the ranks {list(key[0])}, but the optimizer on rank {rank} was "
                            'not given it; give it to the optimizer on every rank that has a part of it', 'RANKS_DIFFER')
    known: dict[str, tuple[int, Line]] = {}
    for group, lines in enumerate(lists):
        rank = groups.index(group)
        for line in lines:
            _check_same(*known.setdefault(line.name, (rank, line)), rank, line)


def _check_same(first: int, other: Line, rank: int, line: Line) -> None:
    """Checks that two ranks' lines of one name mean one tensor."""
    if other.trained != line.trained:
        trains, not_there = (first, rank) if other.trained else (rank, first)
        raise Error(f"rank {trains} trains parameter '{line.name}', but on rank {not_there} it wants no gradient; expected the same on "
                    'all ranks that have it', 'RANKS_DIFFER')
    if other.what != line.what:
        raise Error(f"parameter '{line.name}' is {other.what} on rank {first} and {line.what} on rank {rank}, but a name must mean one "
                    'tensor. Give the parameters of different stages or models different names', 'RANKS_DIFFER')
    if (other.key is None) != (line.key is None):
        kinds = {True: 'a plain tensor', False: 'a DTensor'}
        raise Error(f"parameter '{line.name}' is {kinds[other.key is None]} on rank {first} and {kinds[line.key is None]} on rank "
                    f'{rank}; expected the same on all ranks that have it', 'RANKS_DIFFER')


def _warn(lists: Sequence[Sequence[Line]], groups: Sequence[int]) -> None:
    """Warns of plain tensors that only some ranks have, while all share others: they are experts, or a mistake."""
    names = [{line.name for line in lines if line.trained} for lines in lists]
    if not set.intersection(*names):
        return
    for group, there in enumerate(names):
        lacking = sorted(set.union(*names) - there)
        plain = [name for name in lacking if any(line.name == name and line.key is None for lines in lists for line in lines)]
        if plain:
            more = f' and {len(plain) - 1} more' if len(plain) > 1 else ''
            warn(f"rank {groups.index(group)} has no parameter '{plain[0]}'{more}, which other ranks train. That is right for experts, "
                 'and for stages that ranks keep for themselves. It is wrong if all ranks train one model')
            return

