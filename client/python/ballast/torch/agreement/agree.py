"""What ranks agree on before a step: which parameters have gradients, which were edited, and that replicas are alike."""

from __future__ import annotations

import functools
import heapq
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
from ballast.torch.tensors.members import Fresh, Line, Member, StateMember
from ballast.torch.tensors.remote import gone_of
from ballast.torch.tensors.sketch import is_finite, near, sketch

if TYPE_CHECKING:
    import torch

    from ballast import _native

# A parameter in the message of a rank: flags, and a digest of its gradient if ranks compare it, or else of the placements that the gradient
# moves from.
_EDITED, _PRESENT, _COMPARED, _MOVES = 1, 2, 4, 8
_ENTRY = struct.Struct('<BI')
# In front of the entries: the number of new parameters, whether debug is set, the attempt, whether gradients went before the step, and the
# number of bytes of the digests of gathers, which follow.
_HEAD = struct.Struct('<I?I?I')
# Of the gradients that each step compares: how many, and elements of each. It costs a GPU as many small copies.
_SMALLEST, _SMALL = 4, 1 << 14


class Head(NamedTuple):
    fresh: int
    debug: bool
    attempt: int
    went: bool
    gathers: int  # bytes


class Said(NamedTuple):
    """What a rank tells the others before a step: its message, read."""
    head: Head
    orders: list[tuple[list[int], int, int]]  # ranks that gather together: count and digest of the units that this one gathered with them
    entries: list[tuple[int, int]]  # flags and code, by parameter

    @staticmethod
    def of(message: bytes) -> Said:
        head = Head(*_HEAD.unpack_from(message))
        begin, end = _HEAD.size, _HEAD.size + head.gathers
        return Said(head, json.loads(message[begin:end]), list(_ENTRY.iter_unpack(message[end:])))


class Collected(NamedTuple):
    """One rank's side of a step, before any of it is done."""
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
        """Brings gradients to where their parameters are, and sums those of tied parameters. COLLECTIVE: all ranks have said that they move
        the same ones."""
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
    """What a rank knows of a step once all ranks have said what they have."""
    collected: Collected
    roster: Roster  # new parameters included
    registers: bool  # some rank has new parameters
    edits: bool  # some rank has edited a parameter
    edited: list[bool]  # by member: some rank that has a part of it has edited it
    present: list[bool]  # ... has a gradient of it
    attempt: int  # the latest that a rank is at: the others follow
    torn: int | None  # a rank that follows, though gradients of its went before the step


def _compared(collected: Collected, roster: Roster | None, debug: bool) -> list[bool]:
    """Returns by member whether this step compares its gradient. roster: None until all ranks know the new parameters."""
    has_replicas = [True] * len(collected.members) if roster is None else [len(places) > 1 for places in roster.replicas]
    able = [has and gradient is not None and not is_sharded(gradient) and member.name not in collected.tied
            and not isinstance(member, StateMember)
            for has, member, gradient in zip(has_replicas, collected.members, collected.gradients)]
    small = _smallest(collected, able)
    return [can and (i in small or member.is_due(collected.steps, debug)) for i, (can, member) in enumerate(zip(able, collected.members))]


def _smallest(collected: Collected, able: Sequence[bool]) -> set[int]:
    """Returns a few small members, by index, whose gradients each step compares. So it finds at once that gradients were not reduced, as
    those of a pass within no_sync(), of one that goes round the wrapper, or of a local SGD."""
    sizes = [(gradient.numel(), member.name, i)
             for i, (can, member, gradient) in enumerate(zip(able, collected.members, collected.gradients))
             if can and gradient is not None and gradient.numel() <= _SMALL and gone_of(gradient) is None]
    return {i for _, _, i in heapq.nsmallest(_SMALLEST, sizes)}


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
    """Runs collect() on every rank. An error on one rank is an error on all, since the others would wait for it. roster: of the job's
    members."""
    collected, messages = everyone(exchange, collect, lambda collected: _say(collected, roster, collected.debug))
    said = [Said.of(each) for each in messages]
    _check_orders(exchange, collected, [each.orders for each in said])
    registers, (attempt, torn) = any(each.head.fresh for each in said), _latest([each.head for each in said])
    if registers:
        roster = rosters.gather(exchange, collected.lines(), roster.group)
    if len({each.head.debug for each in said}) > 1:
        _, messages = everyone(Within('gradients', exchange), lambda: _say(collected, roster, True), bytes)
        said = [Said.of(each) for each in messages]
    entries = [each.entries for each in said]
    roster.check_lengths([len(each) for each in entries])
    _check_present(roster, entries)
    _check_moves(roster, entries)
    _check_gradients(exchange, collected, roster, entries)
    of_members = [_flags(entries, places) for places in roster.holders]
    for member, each in zip(collected.members, of_members):
        member.agreed |= bool(each & _PRESENT)
    return Agreed(collected, roster, registers, any(flag & _EDITED for each in entries for flag, _ in each),
                  [bool(each & _EDITED) for each in of_members], [bool(each & _PRESENT) for each in of_members], attempt, torn)


def _latest(heads: Sequence[Head]) -> tuple[int, int | None]:
    """Returns Agreed's attempt and torn."""
    attempt = max(head.attempt for head in heads)
    return attempt, next((rank for rank, head in enumerate(heads) if head.went and head.attempt < attempt), None)


def _check_orders(exchange: Exchange, collected: Collected, told: Sequence[Sequence[tuple[Sequence[int], int, int]]]) -> None:
    """Refuses ranks that gathered different units. told: by rank, counts and digests of the units that it gathered with others."""
    of_rank = [{tuple(together): (count, digest) for together, count, digest in each} for each in told]
    together = _differing(of_rank)
    if together is None:
        return
    mine = collected.orders.get(together)
    _, said = everyone(Within('gathers that differ', exchange), lambda: mine, lambda order: json.dumps(order and order.first).encode())
    names = {rank: json.loads(said[rank]) or [] for rank in together}
    first = together[0]
    other = next((rank for rank in together if of_rank[rank].get(together) != of_rank[first].get(together)), first)
    pairs = itertools.zip_longest(names[first], names[other], fillvalue='none')
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ('a late one', 'another'))
    raise Error(f"ranks {list(together)} gathered different units since the last step: rank {first} gathered '{here}' where rank {other} "
                f"gathered '{there}', so they computed with a mixture of both. Run the same passes over the same units on all ranks. This "
                'step was not made; drop its gradients with zero_grad()', 'RANKS_DIFFER')


def _differing(of_rank: Sequence[Mapping[tuple[int, ...], tuple[int, int]]]) -> tuple[int, ...] | None:
    """Returns ranks that gather together, if two of them have gathered different units. of_rank: count and digest of units, by these
    ranks."""
    return next((ranks for each in of_rank for ranks in each if len({of_rank[rank].get(ranks) for rank in ranks}) > 1), None)


_REDUCE = ('Gradients must be reduced before step(): wrap the model in DistributedDataParallel, shard it with fully_shard, or all-reduce '
           'the gradients. With DDP, look for parameters that it was told to ignore, for no_sync() around the last forward or backward, '
           'for passes of model.module, and for a hook that does not reduce, such as post_localSGD_hook. If ranks have different '
           'parameters of this name, as pipeline stages that each number their layers from 0, give each a name of its own. If stages '
           'share one tensor, say so with tied=')

_Entries = Sequence[Sequence[tuple[int, int]]]  # flags and code, by rank and parameter


def _flags(entries: _Entries, places: Sequence[Place]) -> int:
    """Returns the flags that at least one of these ranks has."""
    together = 0
    for rank, index in places:
        together |= entries[rank][index][0]
    return together


def _check_present(roster: Roster, entries: _Entries) -> None:
    for name, places in roster.classes:
        has = [bool(entries[rank][index][0] & _PRESENT) for rank, index in places]
        if len(set(has)) > 1:
            raise Error(f"parameter '{name}' has a gradient on rank {places[has.index(True)].rank} and none on rank "
                        f'{places[has.index(False)].rank}. {_REDUCE}', 'RANKS_DIFFER')


def _check_moves(roster: Roster, entries: _Entries) -> None:
    """The ranks that have a part of a parameter move its gradient to the parameter's placements in a collective, so all must move it
    alike."""
    for name, places in roster.parts:
        moves = [(entries[rank][index][0] & _MOVES, entries[rank][index][1] if entries[rank][index][0] & _MOVES else 0)
                 for rank, index in places]
        if len(set(moves)) > 1:
            other = next(i for i, each in enumerate(moves) if each != moves[0])
            raise Error(f"the gradient of parameter '{name}' has different placements on rank {places[other].rank} and on rank "
                        f'{places[0].rank}; expected the same on all ranks that have the parameter', 'RANKS_DIFFER')


def _check_gradients(exchange: Exchange, collected: Collected, roster: Roster, entries: _Entries) -> None:
    """Compares numbers if bits differ, because clipping on unlike machines may differ in the last bit."""
    for name, places in roster.classes:
        told = [entries[rank][index] for rank, index in places if entries[rank][index][0] & _COMPARED]
        if len({code for _, code in told}) <= 1:
            continue
        _, said = everyone(Within('sums of gradients', exchange), functools.partial(_sketch, collected, name),
                           lambda sums: json.dumps(sums).encode())
        what = difference({rank: json.loads(said[rank]) for rank, _ in places})
        if what is not None:
            raise Error(f"parameter '{name}' has {what}. {_REDUCE}", 'RANKS_DIFFER')


def _sketch(collected: Collected, name: str) -> list[float] | None:
    """Returns the sketch of this rank's whole gradient. None: it has none."""
    gradient = next((gradient for member, gradient in zip(collected.members, collected.gradients) if member.name == name), None)
    if gradient is None or is_sharded(gradient):
        return None
    gone = gone_of(gradient)
    return sketch(gradient) if gone is None else gone.sketch


def difference(sketches: Mapping[int, Sequence[float]]) -> str | None:
    """Says how a gradient differs between ranks by more than rounding. None: it does not. sketches: by rank."""
    first = next(iter(sketches))
    other = next((rank for rank, each in sketches.items() if not near(sketches[first], each)), None)
    if other is None:
        return None
    if is_finite(sketches[first]) == is_finite(sketches[other]):
        return f'different gradients on rank {other} and on rank {first}'
    where, finite = (other, first) if is_finite(sketches[first]) else (first, other)
    return f'an Inf or a NaN in its gradient on rank {where} and none on rank {finite}'


def check_tied(exchange: Exchange, roster: Roster, collected: Collected) -> None:
    """Checks after settle() that the gradient of a tied parameter is the same on all ranks that have the same part. COLLECTIVE."""
    gradients = {id(member): gradient for member, gradient in zip(collected.members, collected.gradients) if member.name in collected.tied}

    def digest(member: Member) -> int | None:
        gradient = gradients.get(id(member))
        return None if gradient is None else digest_of(gradient)
    differs = _compare(exchange, roster, collected.members, digest)
    if differs is not None:
        name, first, other = differs
        raise Error(f"the gradient of tied parameter '{name}' differs between rank {other} and rank {first} after it was summed. On each "
                    'rank, give as tied= a process group with one rank of every stage that has the parameter', 'RANKS_DIFFER')


def check_values(exchange: Exchange, roster: Roster, all_members: Sequence[Member], members: Iterable[Member], has_values: bool = False,
                 ) -> None:
    """Checks that those of `members` that other ranks have too hold the same values there. COLLECTIVE. all_members: the roster's, on this
    rank. has_values: parameters that live only on the servers already have their values there."""
    checked = {id(member) for member in members if member.here is not None or not has_values}

    def digest(member: Member) -> int:
        return member.initial_digest()
    differs = _compare(exchange, roster, all_members, lambda member: digest(member) if id(member) in checked else None)
    if differs is not None:
        name, first, other = differs
        raise Error(f"parameter '{name}' has different values on rank {other} and on rank {first}, but ranks that hold the same part of a "
                    'parameter must hold the same values. Wrap the model in DistributedDataParallel, which makes them equal, or shard it '
                    'with fully_shard. If ranks have different parameters of this name, as pipeline stages that each number their layers '
                    'from 0, give each a name of its own', 'RANKS_DIFFER')


def check_loaded(exchange: Exchange, roster: Roster, all_members: Sequence[Member], loaded: Mapping[int, int], what: str) -> None:
    """Checks that replicas load the same. COLLECTIVE. loaded: digests, by id of the member. what: its name in messages."""
    differs = _compare(exchange, roster, all_members, lambda member: loaded.get(id(member)))
    if differs is not None:
        name, first, other = differs
        raise Error(f"{what} of parameter '{name}' differs between rank {other} and rank {first} in the states that they load, though "
                    'both have the same part of it; load the same state on all ranks', 'RANKS_DIFFER')


def _compare(exchange: Exchange, roster: Roster, all_members: Sequence[Member], digest: Callable[[Member], int | None],
             ) -> tuple[str, int, int] | None:
    """Returns the first parameter for which two ranks with the same part have different digests, and these ranks. digest() returns None for
    a member that is not compared."""
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
