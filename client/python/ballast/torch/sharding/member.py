"""Parameters that are registered with a job and live on its servers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ballast.torch.sharding.remote import Part, remote_of
from ballast.torch.stepping.members import Member

if TYPE_CHECKING:
    from ballast.torch.group.roster import Line


class RemoteMember(Member):
    """Nothing writes to the parameter but the servers, so nothing marks edits."""

    moved = False
    here = None

    @property
    def part(self) -> Part:
        return remote_of(self.parameter)

    def initial(self) -> torch.Tensor:
        return self.part.unit.model.values.of(self.part)

    def check_shape(self) -> None:
        pass


def member_of(line: Line, group: int, parameter: torch.Tensor, debug: bool) -> Member:
    """line: what the ranks are told of the parameter."""
    kind = Member if remote_of(parameter) is None else RemoteMember
    return kind(line, group, parameter, debug)
