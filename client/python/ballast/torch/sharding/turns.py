"""Refuses a forward pass in which ranks may call different experts: their gathers would wait for each other, or mix units."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.errors import Error
from ballast.torch.sharding.unit import Unit


class Turns:
    """Experts that several ranks gather together are called as a router has told, or all of a list, in order. Threads: the training
    loop's."""

    def __init__(self) -> None:
        self._left: list[Unit] = []  # which come next
        self._is_routed = False  # a router has told of them

    def begin(self) -> None:
        """A pass begins."""
        self._left, self._is_routed = [], False

    def route(self, experts: Sequence[Unit]) -> None:
        """A router tells which experts come next."""
        self.end()
        self._left, self._is_routed = list(experts), True

    def came(self, unit: Unit) -> None:
        """The pass calls the unit's module."""
        if not unit.is_expert and not self._is_routed:
            self.end()
        if not unit.alike or unit.ranks == 1:
            return
        if not self._left and unit is unit.alike[0]:
            self._left, self._is_routed = list(unit.alike), False
        if not self._left or self._left[0] is not unit:
            raise _refused(f"calls expert '{unit.name}' where {self._expected(unit)} comes next", unit)
        del self._left[0]

    def _expected(self, unit: Unit) -> str:
        first = next(iter(self._left), None if self._is_routed else unit.alike[0])
        return 'none' if first is None else f"'{first.name}'"

    def end(self) -> None:
        """The pass has called all experts that it will."""
        left, self._left = self._left, []
        if left and left[0].ranks > 1:
            raise _refused(f"leaves out expert '{left[0].name}'", left[0])


def _refused(what: str, unit: Unit) -> Error:
    return Error(f'a forward pass {what}. {unit.ranks} ranks gather each expert together, and tokens of other ranks may reach others: call '
                 'those, and only those, that ballast.torch.reached_experts(experts, tokens) returns, in its order; or all. '
                 'A model that only runs forward may gather them with their block instead: shard(units=[*model.layers])', 'RANKS_DIFFER')
