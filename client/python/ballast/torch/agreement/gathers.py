"""Which units ranks have gathered together. A gather cannot say which unit it is for, so ranks that gather different units of one size mix
them silently. Each rank therefore notes the units that it gathers with other ranks, for all models, and the next step compares the
notes."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch.distributed as dist

from ballast.torch.ranks import groups

# How many units ranks tell each other if their gathers differ.
_ORDER_TOLD = 4096


class Order(NamedTuple):
    """Gathers that came one after another."""
    gathers: int
    digest: int  # CRC-32 of all names
    first: list[str]  # names of the first _ORDER_TOLD


def note(name: str, group: Any) -> None:
    """Notes that this rank gathers the unit of this name with the ranks of a process group. Notes belong to the default group. A new
    default group starts without notes, since other processes may be in it."""
    orders, together = groups.world().gathers, tuple(dist.get_process_group_ranks(group))
    order = orders.get(together, Order(0, 0, []))
    if len(order.first) < _ORDER_TOLD:
        order.first.append(name)
    orders[together] = Order(order.gathers + 1, zlib.crc32(name.encode(), order.digest), order.first)


def take(group: groups.Group) -> dict[tuple[int, ...], Order]:
    """Returns what was noted since the last step, by the ranks that gather together, for those that are all in the group. Ranks have their
    numbers in the group."""
    orders, numbers = groups.world().gathers, group.numbers
    taken = {together: orders.pop(together) for together in list(orders) if numbers.keys() >= set(together)}
    return {tuple(numbers[rank] for rank in together): order for together, order in taken.items()}
