"""Hooks of parameters that tell when backward has added to a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ballast import _native
from ballast.torch.modes import plainly
from ballast.torch.tensors.members import Member


class Told(Protocol):
    def accumulated(self, i: int) -> None:
        """Backward has added to the gradient of a member, by index. Runs without gradients of its own, on a thread of autograd's."""


class Hooked:
    """The members of a session, and hooks of their parameters. The hooks do not keep the object alive that they tell."""

    def __init__(self, told: Told) -> None:
        self._told = weakref.ref(told)
        self.members: list[Member] = []
        self.units: list[list[int]] = []  # members, by index
        self.unit_of: dict[int, int] = {}  # by member
        self.hooks: dict[int, Any] = {}  # by member

    def follow(self, session: _native.Session, members: Sequence[Member], wants: Callable[[Member], bool]) -> bool:
        """Takes up members that registered since. Hooks each that wants a gradient, if wants() agrees. Returns whether there are new
        ones."""
        is_longer = len(members) > len(self.members)
        if is_longer:
            self.members, self.units = list(members), session.units
            self.unit_of = {i: unit for unit, tensors in enumerate(self.units) for i in tensors}
        for i, member in enumerate(members):
            if i not in self.hooks and member.parameter.requires_grad and wants(member):
                self.hooks[i] = member.parameter.register_post_accumulate_grad_hook(_Hook(self._told, i))
        return is_longer

    def forget(self) -> None:
        """The session is over."""
        for hook in self.hooks.values():
            hook.remove()
        self.members, self.units, self.unit_of, self.hooks = [], [], {}, {}


class _Hook:
    def __init__(self, told: weakref.ref[Told], i: int) -> None:
        self._told, self._i = told, i

    @plainly
    def __call__(self, parameter: torch.Tensor) -> None:
        told = self._told()
        if told is not None:
            with torch.no_grad():
                told.accumulated(self._i)
