"""Edits: values that the user's code wrote to parameters, which become the values of their masters on the servers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ballast.errors import Error
from ballast.torch.group.agreement import check_loaded, check_values
from ballast.torch.group.ranks import Exchange
from ballast.torch.group.together import everyone, together
from ballast.torch.modes import same_bits
from ballast.torch.state_dict.moments import read_part
from ballast.torch.stepping import marks
from ballast.torch.stepping.members import Member, digest_of, on_host

if TYPE_CHECKING:
    from ballast.torch.job.job import Job


def sync(job: Job) -> None:
    """Takes over the values of all parameters, whether their marks tell of edits or not. COLLECTIVE."""
    if job.session is None:
        job.open()
    if job.lends_masters:
        return
    exchange = job.exchange('sync_from_params()')
    together(exchange, job.open)
    job.give_values(exchange)
    check_values(exchange, job.roster, job.members, job.members)
    take(job, job.members, exchange)


@torch.no_grad()
def take(job: Job, members: Iterable[Member], exchange: Exchange) -> None:
    """Takes over the values of parameters. COLLECTIVE: all ranks that have a part of one give it."""
    members = list(members)

    def write() -> None:
        written = set(job.session.written)  # names of tensors whose edits no step has taken
        for member in members:
            _put(job, member, on_host(member.parameter), written)
    together(exchange, write)
    marks.note(members)


@torch.no_grad()
def give(job: Job, given: Mapping[int, torch.Tensor], check: Callable[[], None] = lambda: None) -> None:
    """Values for parameters that live on the servers alone, committed: this rank's parts in the host's memory, by id of the parameter.
    COLLECTIVE: all ranks that have a part of one give it, replicas the same. check(): raises what speaks against it on this rank; it is
    raised on all, and nothing is given."""
    exchange = job.exchange('load_state_dict() of a model')

    def look() -> None:
        check()
        job.open()
        for member in job.members:
            values = given.get(id(member.parameter))
            if values is not None and not bool(torch.isfinite(values).all()):
                raise Error(f"the values for parameter '{member.name}' are not all finite: servers refuse them. Nothing was taken",
                            'BAD_REQUEST')
    together(exchange, look)
    job.give_values(exchange)
    job.sharded.discard()
    members = [member for member in job.members if id(member.parameter) in given]
    check_loaded(exchange, job.roster, job.members, {id(member): digest_of(given[id(member.parameter)]) for member in members}, 'the value')
    together(exchange, lambda: [_put(job, member, given[id(member.parameter)], job.session.written) for member in members])
    commit_written(job, exchange)


def _put(job: Job, member: Member, values: torch.Tensor, written: Collection[str]) -> None:
    """values: this rank's. Where the master rounds to them it stays."""
    master = read_part(job.session, member, 'master')
    kept = same_bits(master.to(values.dtype), values)
    # All ranks write, or none: their parameters are the same, but one of them may have been moved. Where they hold the master's
    # values once more, another edit may have been written that no step has taken.
    if job.options.world_size > 1 or member.name in written or not bool(kept.all()):
        job.session.write(member.name, torch.where(kept, master, values.float()).reshape(-1))


def pending(job: Job) -> int:
    """Where some parameter here holds values that no step has taken, and that the job's version is without: a digest of all parameters'
    values here, see digest(); else 0."""
    return digest(job) if any(marks.edited(job.members)) or job.session.written else 0


def digest(job: Job) -> int:
    """Of the values of all parameters here; never 0."""
    said = [member.digest_now() for member in job.members if member.here is not None]
    return zlib.crc32(repr(said).encode()) or 1


def keep(job: Job, exchange: Exchange) -> None:
    """Parameters are ahead of the job's version, where they differ from it. COLLECTIVE."""
    members = [member for member in job.members if member.here is not None]
    check_values(exchange, job.roster, job.members, members)
    take(job, members, exchange)


def commit_written(job: Job, exchange: Exchange) -> None:
    """Commits edits that no step has taken, for it was skipped, say, or for one rank could not write what others have. COLLECTIVE."""
    written = set(job.session.written)
    _, said = everyone(exchange, lambda: [member.name in written for member in job.members], bytes)
    halfway = [member for member, places in zip(job.members, job.roster.holders) if len({said[rank][i] for rank, i in places}) > 1]
    if any(len({said[rank][i] for rank, i in places}) > 1 for _, places in job.roster.parts):
        check_values(exchange, job.roster, job.members, halfway)
        take(job, halfway, exchange)
    if any(map(any, said)):
        job.session.commit_values()


def edited(job: Job, members: Sequence[Member]) -> list[bool]:
    """By member: whether it was edited since the last step. With several ranks also where an edit was written before: one of them may not
    have written it."""
    written = set(job.session.written) if job.options.world_size > 1 else ()
    return [is_edited or member.name in written for member, is_edited in zip(members, marks.edited(members))]
