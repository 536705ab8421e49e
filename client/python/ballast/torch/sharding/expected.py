"""Which gathers a rank expects next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ballast.torch.sharding.unit import Unit

# How many gathers of one step, or of passes without a step, are remembered.
_GATHERS_MAX = 1 << 16


class Expected:
    """The gathers of a step, in the order of the step before. If another gather comes, the order goes on from there. Experts are not among
    those of the step before, since other tokens reach others: in forward a router tells which ones come, and backward gathers those of
    forward in reverse. Threads: one at a time."""

    def __init__(self) -> None:
        self._order: list[Unit] = []  # those of the last step, and experts that are known by now
        self._is_step = False  # they end with a step
        self._at = 0  # place of the next gather in it
        self._made: list[Unit] = []  # gathers of this step so far, without experts
        self._within: dict[Unit, list[Unit]] = {}  # experts that forward gathered last behind a unit, before the next one
        self._last: Unit | None = None  # gathered, and no expert

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._order[self._at:])

    def took(self, unit: Unit) -> None:
        """The unit is gathered."""
        if unit.is_expert:
            self._took_expert(unit)
            return
        self._made.append(unit)
        self.route(())
        self._follow(unit)
        self._last = unit
        if _in_backward():
            self.route(self._within.get(unit, ())[::-1])
        else:
            self._within[unit] = []

    def route(self, experts: Sequence[Unit]) -> None:
        """These experts are gathered next, and no others, until another unit is."""
        end = self._at
        while end < len(self._order) and self._order[end].is_expert:
            end += 1
        self._order[self._at:end] = experts

    def stepped(self) -> None:
        """Another step begins."""
        if self._made:
            self._order, self._made, self._is_step = self._made, [], True
        self._at, self._within, self._last = 0, {}, None

    def forget(self) -> None:
        """The session is over, or another begins."""
        self._made, self._at, self._within, self._last = [], 0, {}, None
        self._order = [unit for unit in self._order if not unit.is_expert]

    def _took_expert(self, unit: Unit) -> None:
        if self._last is not None and not _in_backward():
            self._within[self._last].append(unit)
        at = self._at
        while at < len(self._order) and self._order[at].is_expert:
            at += 1
            if self._order[at - 1] is unit:
                self._at = at
                return

    def _follow(self, unit: Unit) -> None:
        """Goes on in the order after this gather, at the place of this unit that is nearest to the expected one."""
        is_over = self._at >= len(self._order)
        places = [i for i, each in enumerate(self._order) if each is unit]
        if places:
            self._at = min(places, key=lambda i: abs(i - self._at)) + 1
        if is_over or (self._at >= len(self._order) and not self._is_step):
            self._repeat()

    def _repeat(self) -> None:
        """No step came at the end of a step's order, as in passes without gradients. Expects what followed when the last two gathers came
        in this order before."""
        made = self._made = self._made[-_GATHERS_MAX:]
        again = next((i for i in range(len(made) - 2, 0, -1) if made[i - 1:i + 1] == made[-2:]), None)
        if again is not None:
            self._order, self._at, self._is_step = made[again:], 1, False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
