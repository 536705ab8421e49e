"""What a job may do beside opening, stepping and closing: each such feature hears of these from the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from ballast.torch.agreement.gathers import Order
    from ballast.torch.job.naming import Parameters
    from ballast.torch.job.opened import OpenJob
    from ballast.torch.ranks.groups import Group


class Gone(NamedTuple):
    """Gradients that were brought to the host's memory before the step that takes them."""
    members: frozenset[int]  # by index
    held: object  # has to stay until the step has ended


class Feature:
    """Hooks, in the order in which they come. A job calls those of all its features, in the order of its list. Threads: the training
    loop's."""

    lives_apart = False  # parameters are on the servers alone

    def opening(self, parameters: Parameters, group: Group) -> None:
        """The job is about to open. Raises what speaks against it on this rank."""

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """A call wants the open job: the session and the members may be others than before. for_step: the call is a step."""

    def before_step(self, parameters: Parameters) -> None:
        """Refuses a step before gradients are looked at. The job may not be open."""

    def gathers(self, group: Group) -> Mapping[tuple[int, ...], Order]:
        """What ranks have gathered since the last step, which the step compares."""
        return {}

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuses a step with these gradients, by member."""

    @property
    def went(self) -> bool:
        """Gradients of the step to come have gone to the servers, and the other ranks must know."""
        return False

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        """All ranks make the step, with these gradients, by member. registers: this rank has new parameters. COLLECTIVE."""

    def take(self) -> Gone | None:
        """The step begins, and takes what went."""
        return None

    def stepped(self) -> None:
        """The step was made."""

    def failed(self, attempt: int | None = None) -> None:
        """A step was not made, and what went to the servers for it counts no more. attempt: the session's, which it has still where it
        was not asked for the step, so that it is told now; None: it was told."""

    def differed(self) -> None:
        """Ranks were found to differ: they may have mixed what they gathered. COLLECTIVE without a message."""

    def discard(self) -> None:
        """No step will take gradients that went. COLLECTIVE."""

    def zero_grad(self) -> None:
        """The loop lets go of all gradients. COLLECTIVE."""

    def wait(self) -> None:
        """Returns when no step is under way beside the loop. Raises what that step raised."""

    def closing(self) -> object:
        """The job is about to end. Returns what has to stay until its session has."""
        return None

    def left(self) -> None:
        """The session is over."""

    def stats(self) -> Mapping[str, float]:
        return {}
