"""What a job may do besides opening, stepping and closing. The job tells each such feature of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from ballast.torch.agreement.gathers import Order
    from ballast.torch.agreement.roster import Roster
    from ballast.torch.job.naming import Parameters
    from ballast.torch.job.opened import OpenJob
    from ballast.torch.ranks.groups import Exchange, Group
    from ballast.torch.tensors.members import Member


class Gone(NamedTuple):
    """Gradients that were brought to the host's memory before the step that takes them."""
    members: frozenset[int]  # by index
    held: object  # has to stay until the step has ended


class Ready(NamedTuple):
    """A step that all ranks have agreed on."""
    roster: Roster  # of all ranks' parameters
    gradients: list[torch.Tensor | None]  # by member
    present: Sequence[bool]  # by member: some rank that has a part of it has a gradient
    scale: float  # gradients are multiplied by it
    max_norm: float  # then they are clipped to this global norm; 0 does not clip
    exchange: Exchange


class Feature:
    """Hooks, in the order in which a job calls them. The job calls each hook of all its features, in the order of its list. Threads: the
    training loop's."""

    lives_apart = False  # parameters are on the servers alone

    def entries(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Returns what all ranks must have alike, and its value, as texts. The opening of a job compares it. groups: the param_groups."""
        return []

    def opening(self, parameters: Parameters, group: Group) -> None:
        """The job is about to open. Raises an error if this rank must not open it."""

    @property
    def origin(self) -> int:
        """What a new job's first values come from, see progress.Progress. 0: nothing that has a digest."""
        return 0

    def goes_on(self, job: OpenJob) -> str:
        """The job was there before this optimizer opened it. May refuse it. Returns what to add to the line that tells so, or ''."""
        return ''

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """A call uses the open job, whose session and members may have changed since the last call. for_step: the call is a step."""

    def before_step(self, parameters: Parameters) -> None:
        """May refuse a step before anybody looks at gradients. The job may not be open yet."""

    def gathers(self, group: Group) -> Mapping[tuple[int, ...], Order]:
        """Returns what this rank has gathered since the last step. The step compares it between ranks."""
        return {}

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """May refuse a step with these gradients, by member."""

    def complete(self, members: Sequence[Member], gradients: list[torch.Tensor | None]) -> None:
        """May add gradients that follow from others. gradients: by member."""

    @property
    def went(self) -> bool:
        """Gradients of the next step have gone to the servers, and the other ranks must know."""
        return False

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        """All ranks are going to make the step, with these gradients, by member. registers: this rank has new parameters. COLLECTIVE."""

    def prepare(self, job: OpenJob, ready: Ready) -> None:
        """All members are registered, and the step is about to begin. May replace gradients, by member. COLLECTIVE."""

    def unprepare(self) -> None:
        """The step that prepare() was called for does not begin: what prepare() sent to the servers does not count. The other ranks follow
        at the next step."""

    def take(self) -> Gone | None:
        """The step begins. Returns the gradients that went before it."""
        return None

    def stepped(self) -> None:
        """The step was made."""

    def failed(self, attempt: int | None = None) -> None:
        """A step was not made, so what went to the servers for it no longer counts. attempt: the session's when the step began. If it is
        still the same, the session was never asked for the step, and has to be told now. None: it was told."""

    def differed(self) -> None:
        """The ranks differ, and may have mixed what they gathered. COLLECTIVE without a message."""

    def discard(self) -> None:
        """No step will take the gradients that went. COLLECTIVE."""

    def zero_grad(self) -> None:
        """The loop lets go of all gradients. COLLECTIVE."""

    def wait(self) -> None:
        """Returns when no step is under way beside the loop. Raises what that step raised."""

    def closing(self) -> object:
        """The job is about to end. Returns what must stay in memory until its session has ended."""
        return None

    def left(self) -> None:
        """The session is over."""

    def stats(self) -> Mapping[str, float]:
        return {}
