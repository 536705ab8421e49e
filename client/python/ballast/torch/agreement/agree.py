"""What ranks agree on before a step: which parameters have gradients, which were edited, and that replicas are alike."""

from __future__ import annotations

import functools
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ballast.errors import Error
from ballast.torch.agreement import roster as rosters
from ballast.torch.agreement.gathers import Order
from ballast.torch.agreement.roster import Place, Roster
from ballast.torch.ranks.groups import Exchange, Within
from ballast.torch.ranks.together import everyone
from ballast.torch.tensors.kinds import digest_of, is_sharded, local
from ballast.torch.tensors.members import Fresh, Line, Member
from ballast.torch.tensors.remote import gone_of
from ballast.torch.tensors.sketch import is_finite, near, sketch

if TYPE_CHECKING:
    import torch

    from ballast import _native

# A parameter in the message of a rank: flags, and a digest of its gradient if that is compared, else of the placements that it is to be
# brought from.
_EDITED, _PRESENT, _COMPARED, _MOVES = 1, 2, 4, 8
_ENTRY = struct.Struct('<BI')
# In front of the entries: new parameters, whether debug is set, the attempt, whether gradients went before the step, and bytes of the
# digests of gathers, which come next.
_HEAD = struct.Struct('<I?I?I')


class Head(NamedTuple):
    fresh: int
    debug: bool
    attempt: int
    went: bool
    gathers: int  # bytes


class Collected(NamedTuple):
    """One rank's side of a step, nothing of it done yet."""
    fresh: list[Fresh]
    members: list[Member]  # those included
    gradients: list[torch.Tensor | None]  # of members.gradient_of, by member
    edited: list[bool]  # by member
    groups: list[_native.GroupHyper]
    lines: Callable[[], list[Line]]  # what the rank says of the members
    steps: int  # that the job has made
    debug: bool
    orders: Mapping[tuple[int, ...], Order]  # of gathers since the last step, by the ranks that gathered together
    attempt: int  # of the step: what went in an earlier one does not count
    went: bool  # gradients have gone to the servers before the step
    tied: Mapping[str, dist.ProcessGroup]  # by name of the parameter, the group that its gradients are summed over

    @property
    def present(self) -> list[bool]:
        return [gradient is not None for gradient in self.gradients]

    def settle(self) -> None:
        """Brings gradients to where their parameters are, and sums those of tied ones. COLLECTIVE: all ranks have told that they have the
        same ones to bring."""
        for i, gradient in enumerate(self.gradients):
            parameter = self.members[i].parameter
            if is_sharded(gradient) and is_sharded(parameter):
                placed = gradient.redistribute(placements=parameter.placements)
                self.gradients[i] = local(placed).detach().contiguous()
        for i, (member, gradient) in enumerate(zip(self.members, list(self.gradients))):
            if member.name in self.tied and gradient is not None:
                self.gradients[i] = total = gradient.clone()  # the parameter's own stays: a step may be tried again
                dist.all_reduce(total, group=self.tied[member.name])


class Agreed(NamedTuple):
    """What a rank knows of a step once all have told what they have."""
    collected: Collected
    roster: Roster  # new parameters included
    registers: bool  # some rank has new parameters
    edits: bool  # some rank has edited a parameter
    edited: list[bool]  # by member: some rank that has a part of it has edited it
    present: list[bool]  # ... has a gradient of it
    attempt: int  # the latest that a rank is at: the others follow
    torn: int | None  # a rank that follows, though gradients of its went before the step


def _compared(collected: Collected, roster: Roster | None, debug: bool) -> list[bool]:
    """By member: whether its gradient is compared in this step. roster: none before new parameters are known to all."""
    has_replicas = [True] * len(collected.members) if roster is None else [len(places) > 1 for places in roster.replicas]
    return [has and gradient is not None and not is_sharded(gradient) and member.name not in collected.tied
            and member.is_due(collected.steps, debug)
            for has, member, gradient in zip(has_replicas, collected.members, collected.gradients)]


def _say(collected: Collected, roster: Roster | None, debug: bool) -> bytes:
    orders = json.dumps([[together, order.gathers, order.digest] for together, order in collected.orders.items()]).encode()
    said = [_HEAD.pack(len(collected.fresh), collected.debug, collected.attempt, collected.went, len(orders)), orders]
    compared = _compared(collected, None if collected.fresh else roster, debug)
    for gradient, edited, compares in zip(collected.gradients, collected.edited, compared):
        flags, code = edited * _EDITED, 0
        if gradient is not None:
            flags |= _PRESENT
            if is_sharded(gradient):
                flags, code = flags | _MOVES, zlib.crc32(str(gradient.placements).encode())
            elif compares:
                gone = gone_of(gradient)
                digest = digest_of(gradient) if gone is None else gone.digest
                if digest is not None:
                    flags, code = flags | _COMPARED, digest
        said.append(_ENTRY.pack(flags, code))
    return b''.join(said)


def agree(exchange: Exchange, roster: Roster, collect: Callable[[], Collected]) -> Agreed:
    """collect() on every rank. An error on one rank is an error on all, which would wait for it else. roster: of the job's members."""
    collected, said = everyone(exchange, collect, lambda collected: _say(collected, roster, collected.debug))
    heads = [Head(*_HEAD.unpack_from(each)) for each in said]
    registers = any(head.fresh for head in heads)
    _check_orders(exchange, collected, [json.loads(each[_HEAD.size:_HEAD.size + head.gathers]) for each, head in zip(said, heads)])
    attempt = max(head.attempt for head in heads)
    torn = next((rank for rank, head in enumerate(heads) if head.went and head.attempt < attempt), None)
    if registers:
        roster = rosters.gather(exchange, collected.lines(), roster.group)
    if len({head.debug for head in heads}) > 1:
        _, said = everyone(Within('gradients', exchange), lambda: _say(collected, roster, True), bytes)
    entries = [list(_ENTRY.iter_unpack(each[_HEAD.size + head.gathers:])) for each, head in zip(said, heads)]
    roster.check_lengths([len(each) for each in entries])

    def flags(places: Sequence[Place]) -> int:
        together = 0
        for rank, index in places:
            together |= entries[rank][index][0]
        return together
    _check_present(roster, entries)
    _check_moves(roster, entries)
    _check_gradients(exchange, collected, roster, entries)
    of_members = [flags(places) for places in roster.holders]
    for member, each in zip(collected.members, of_members):
        member.agreed |= bool(each & _PRESENT)
    return Agreed(collected, roster, registers, any(flag & _EDITED for each in entries for flag, _ in each),
                  [bool(each & _EDITED) for each in of_members], [bool(each & _PRESENT) for each in of_members], attempt, torn)


def _check_orders(exchange: Exchange, collected: Collected, told: Sequence[Sequence[tuple[Sequence[int], int, int]]]) -> None:
    """told: by rank, counts and digests of the units that it gathered with others."""
    of_rank = [{tuple(together): (count, digest) for together, count, digest in each} for each in told]
    together = next((ranks for each in of_rank for ranks in each if len({of_rank[rank].get(ranks) for rank in ranks}) > 1), None)
    if together is None:
        return
    mine = collected.orders.get(together)
    _, said = everyone(Within('gathers that differ', exchange), lambda: mine, lambda order: json.dumps(order and order.first).encode())
    names = {rank: json.loads(said[rank]) or [] for rank in together}
    first = together[0]
    other = next((rank for rank in together if of_rank[rank].get(together) != of_rank[first].get(together)), first)
    pairs = itertools.zip_longest(names[first], names[other], fillvalue='none')
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ('a late one', 'another'))
    raise Error(f"ranks {list(together)} gathered different units together since the last step: '{here}' on rank {first} where '{there}' "
                f'on rank {other}, and computed with a mixture of both; expected the same passes over the same units on all ranks. The '
                'step was not made: take the gradients back by zero_grad()', 'RANKS_DIFFER')


_REDUCE = ('ranks take a step with reduced gradients: wrap the model in DistributedDataParallel, shard it by fully_shard, or all-reduce '
           'the gradients before step(). With DDP, look for parameters that it was told to ignore, and for no_sync() around the last '
           'backward. Ranks that have another parameter of this name, as stages of a pipeline that number their layers anew, give it a '
           'name of its own; stages that share one tensor say so by tied=')

_Entries = Sequence[Sequence[tuple[int, int]]]  # flags and code, by rank and parameter


def _check_present(roster: Roster, entries: _Entries) -> None:
    for name, places in roster.classes:
        has = [bool(entries[rank][index][0] & _PRESENT) for rank, index in places]
        if len(set(has)) > 1:
            raise Error(f"parameter '{name}' has a gradient on rank {places[has.index(True)].rank} and none on rank "
                        f'{places[has.index(False)].rank}, and {_REDUCE}', 'RANKS_DIFFER')


def _check_moves(roster: Roster, entries: _Entries) -> None:
    """Gradients are brought to their parameters' placements by a collective of the ranks that have a part."""
    for name, places in roster.parts:
        moves = [(entries[rank][index][0] & _MOVES, entries[rank][index][1] if entries[rank][index][0] & _MOVES else 0)
                 for rank, index in places]
        if len(set(moves)) > 1:
            other = next(i for i, each in enumerate(moves) if each != moves[0])
            raise Error(f"the gradient of parameter '{name}' is placed otherwise on rank {places[other].rank} than on rank "
                        f'{places[0].rank}; expected the same on all ranks that have it', 'RANKS_DIFFER')


def _check_gradients(exchange: Exchange, collected: Collected, roster: Roster, entries: _Entries) -> None:
    """Compares numbers where bits differ: clipping on unlike machines leaves the last bit to each."""
    for name, places in roster.classes:
        told = [entries[rank][index] for rank, index in places if entries[rank][index][0] & _COMPARED]
        if len({code for _, code in told}) <= 1:
            continue
        own = next((i for i, member in enumerate(collected.members) if member.name == name), None)
        gradient = None if own is None or is_sharded(collected.gradients[own]) else collected.gradients[own]
        _, said = everyone(Within('sums of gradients', exchange), functools.partial(_sketch, gradient),
                           lambda sums: json.dumps(sums).encode())
        sketches = {rank: json.loads(said[rank]) for rank, _ in places}
        first = places[0].rank
        other = next((rank for rank, each in sketches.items() if not near(sketches[first], each)), None)
        if other is None:
            continue
        what = f'another gradient on rank {other} than on rank {first}'
        if is_finite(sketches[first]) != is_finite(sketches[other]):
            where, finite = (other, first) if is_finite(sketches[first]) else (first, other)
            what = f'an Inf or a NaN in its gradient on rank {where} and none on rank {finite}'
        raise Error(f"parameter '{name}' has {what}, and {_REDUCE}", 'RANKS_DIFFER')


def _sketch(gradient: torch.Tensor | None) -> list[float] | None:
    gone = gone_of(gradient)
    return gone.sketch if gone is not None else None if gradient is None else sketch(gradient)


def check_tied(exchange: Exchange, roster: Roster, collected: Collected) -> None:
    """After settle(): gradients of tied parameters are the same on all that have the same part. COLLECTIVE."""
    gradients = {id(member): gradient for member, gradient in zip(collected.members, collected.gradients) if member.name in collected.tied}

    def digest(member: Member) -> int | None:
        gradient = gradients.get(id(member))
        return None if gradient is None else digest_of(gradient)
    differs = _compare(exchange, roster, collected.members, digest)
    if differs is not None:
        name, first, other = differs
        raise Error(f"the gradients of tied parameter '{name}' have another sum on rank {other} than on rank {first}; expected as tied= on "
                    'each rank a group of one rank of every stage that has the parameter', 'RANKS_DIFFER')


def check_values(exchange: Exchange, roster: Roster, all_members: Sequence[Member], members: Iterable[Member], has_values: bool = False,
                 ) -> None:
    """Those of `members` that other ranks have as well are alike there. COLLECTIVE. all_members: the roster's, on this rank. has_values:
    parameters that live on the servers alone have their values there."""
    checked = {id(member) for member in members if member.here is not None or not has_values}

    def digest(member: Member) -> int:
        return digest_of(member.initial() if member.here is None else member.parameter)
    differs = _compare(exchange, roster, all_members, lambda member: digest(member) if id(member) in checked else None)
    if differs is not None:
        name, first, other = differs
        raise Error(f"parameter '{name}' has other values on rank {other} than on rank {first}, and is a plain tensor or a replica, "
                    'which all ranks that have it hold alike: wrap the model in DistributedDataParallel, which makes them so, or shard it '
                    'by fully_shard; ranks that keep other parts of a model under one name (stages that number their layers anew, say) '
                    'give each a name of its own', 'RANKS_DIFFER')


def check_loaded(exchange: Exchange, roster: Roster, all_members: Sequence[Member], loaded: Mapping[int, int], what: str) -> None:
    """Replicas load the same. COLLECTIVE. loaded: digests, by id of the member. what: is loaded."""
    differs = _compare(exchange, roster, all_members, lambda member: loaded.get(id(member)))
    if differs is not None:
        name, first, other = differs
        raise Error(f"{what} of parameter '{name}' that is loaded on rank {other} is another than on rank {first}, which has the same part "
                    'of it: load the same state on all ranks', 'RANKS_DIFFER')


def _compare(exchange: Exchange, roster: Roster, all_members: Sequence[Member], digest: Callable[[Member], int | None],
             ) -> tuple[str, int, int] | None:
    """The first parameter of which two ranks with the same part say another digest, and these ranks. digest(): None says nothing."""
    if not roster.classes:
        return None  # the same on all ranks

    def entry(member: Member, places: Sequence[Place]) -> bytes:
        said = None if len(places) == 1 else digest(member)
        return _ENTRY.pack(0, 0) if said is None else _ENTRY.pack(_COMPARED, said)
    _, said = everyone(Within('values', exchange), lambda: b''.join(map(entry, all_members, roster.replicas)), bytes)
    entries = [list(_ENTRY.iter_unpack(each)) for each in said]
    roster.check_lengths([len(each) for each in entries])
    for name, places in roster.classes:
        told = [(rank, entries[rank][index][1]) for rank, index in places if entries[rank][index][0]]
        other = next((rank for rank, digest in told if digest != told[0][1]), None)
        if other is not None:
            return name, told[0][0], other
    return None
