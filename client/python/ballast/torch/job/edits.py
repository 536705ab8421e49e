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


def put(job: OpenJob, member: Member, values: torch.Tensor, written: Collection[str]) -> None:
    """values: this rank's. Where the master rounds to them it stays."""
    master = read_part(job.session, member, 'master')
    kept = same_bits(master.to(values.dtype), values)
    # All ranks write, or none: their parameters are the same, but one of them may have been moved. Where they hold the master's
    # values once more, another edit may have been written that no step has taken.
    if job.options.world_size > 1 or member.name in written or not bool(kept.all()):
        job.session.write(member.name, torch.where(kept, master, values.float()).reshape(-1))


def pending(job: OpenJob) -> int:
    """Where some parameter here holds values that no step has taken, and that the job's version is without: a digest of all parameters'
    values here, see digest(); else 0."""
    return digest(job) if any(marks.edited(job.members)) or job.session.written else 0


def digest(job: OpenJob) -> int:
    """Of the values of all parameters here; never 0."""
    said = [member.digest_now() for member in job.members if member.here is not None]
    return zlib.crc32(repr(said).encode()) or 1


def keep(job: OpenJob, exchange: Exchange) -> None:
    """Parameters are ahead of the job's version, where they differ from it. COLLECTIVE."""
    members = [member for member in job.members if member.here is not None]
    check_values(exchange, job.roster, job.members, members)
    take(job, members, exchange)


def commit_written(job: OpenJob, exchange: Exchange) -> None:
    """Commits edits that no step has taken, for it was skipped, say, or for one rank could not write what others have. COLLECTIVE."""
    written = set(job.session.written)
    _, said = everyone(exchange, lambda: [member.name in written for member in job.members], bytes)
    halfway = [member for member, places in zip(job.members, job.roster.holders) if len({said[rank][i] for rank, i in places}) > 1]
    if any(len({said[rank][i] for rank, i in places}) > 1 for _, places in job.roster.parts):
        check_values(exchange, job.roster, job.members, halfway)
        take(job, halfway, exchange)
    if any(map(any, said)):
        job.session.commit_values()


def edited(job: OpenJob, members: Sequence[Member]) -> list[bool]:
    """By member: whether it was edited since the last step. With several ranks also where an edit was written before: one of them may not
    have written it."""
    written = set(job.session.written) if job.options.world_size > 1 else ()
    return [is_edited or member.name in written for member, is_edited in zip(members, marks.edited(members))]
