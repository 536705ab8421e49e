"""Parameters that are registered with a job and live on its servers alone."""

from __future__ import annotations

import torch

from ballast.torch.sharding.remote import Part, remote_of
from ballast.torch.stepping.members import Member


class RemoteMember(Member):
    """Nothing writes to the parameter but the servers, so nothing marks edits."""

    moved = False
    here = None

    @property
    def part(self) -> Part:
        return remote_of(self.parameter)

    def initial(self) -> torch.Tensor:
        return self.part.unit.model.values.of(self.part)

    def noted(self) -> None:
        pass

    def wrote(self) -> None:
        pass

    def edited(self) -> bool:
        return False

    def edited_unseen(self) -> bool:
        return False


def member_of(name: str, group: int, parameter: torch.Tensor, debug: bool) -> Member:
    kind = Member if remote_of(parameter) is None else RemoteMember
    return kind(name, group, parameter, debug)
