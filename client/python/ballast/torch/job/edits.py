"""Edits: values that the user's code wrote to parameters, which become the values of their masters on the servers."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

import torch

from ballast.torch.agreement.agree import check_values
from ballast.torch.job.moments import read_part
from ballast.torch.job.opened import OpenJob
from ballast.torch.modes import same_bits
from ballast.torch.ranks.groups import Exchange
from ballast.torch.ranks.together import everyone, together
from ballast.torch.tensors import marks
from ballast.torch.tensors.kinds import on_host
from ballast.torch.tensors.members import Member


@torch.no_grad()
def take(job: OpenJob, members: Iterable[Member], exchange: Exchange) -> None:
    """Takes over the values of parameters. COLLECTIVE: all ranks that have a part of one give it."""
    members = list(members)

    def write() -> None:
        written = set(job.session.written)  # names of tensors whose edits no step has taken
        for member in members:
            put(job, member, on_host(member.parameter), written)
    together(exchange, write)
    marks.note(members)


def over(master: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the master that an edit to `values` leaves: an element whose master rounds to the value keeps its master."""
    return torch.where(_kept(master, values), master, values.float())


def _kept(master: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return same_bits(master.to(values.dtype), values)


def put(job: OpenJob, member: Member, values: torch.Tensor, written: Collection[str]) -> None:
    """Writes this rank's values to the master, as over() has it."""
    master = read_part(job.session, member)
    kept = _kept(master, values)
    # Either all ranks write, or no rank does. Their parameters are the same, but one of them may have been moved. If the parameter holds
    # the master's values again, an earlier edit may still be written that no step has taken.
    if job.options.world_size > 1 or member.name in written or not bool(kept.all()):
        job.session.write(member.name, torch.where(kept, master, values.float()).reshape(-1))


def pending(job: OpenJob) -> int:
    """Returns digest() of all parameters here if one of them holds values that no step has taken, so that the job's version lacks them;
    else 0."""
    return digest(job) if any(marks.edited(job.members)) or job.session.written else 0


def digest(job: OpenJob) -> int:
    """Returns a digest of the values of all parameters here, which is never 0."""
    said = [member.digest_now() for member in job.members if member.here is not None]
    return zlib.crc32(repr(said).encode()) or 1


def keep(job: OpenJob, exchange: Exchange) -> None:
    """Takes parameters as they are, as edits of the job's version. COLLECTIVE."""
    members = [member for member in job.members if member.here is not None]
    check_values(exchange, job.roster, job.members, members)
    take(job, members, exchange)


def commit_written(job: OpenJob, exchange: Exchange) -> None:
    """Commits edits that no step has taken: the step was skipped, for example, or one rank could not write what others had. COLLECTIVE."""
    written = set(job.session.written)
    _, said = everyone(exchange, lambda: [member.name in written for member in job.members], bytes)
    halfway = [member for member, places in zip(job.members, job.roster.holders) if len({said[rank][i] for rank, i in places}) > 1]
    if any(len({said[rank][i] for rank, i in places}) > 1 for _, places in job.roster.parts):
        check_values(exchange, job.roster, job.members, halfway)
        take(job, halfway, exchange)
    if any(map(any, said)):
        job.session.commit_values()


def edited(job: OpenJob, members: Sequence[Member]) -> list[bool]:
    """Returns by member whether it was edited since the last step. With several ranks, a member whose edit is already written counts too,
    because another rank may not have written it."""
    written = set(job.session.written) if job.options.world_size > 1 else ()
    return [is_edited or member.name in written for member, is_edited in zip(members, marks.edited(members))]
