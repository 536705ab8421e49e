"""Edits: values that the user's code wrote to parameters, which become the values of their masters on the servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ballast.errors import warn
from ballast.torch.job.agreement import check_values, everyone, together
from ballast.torch.job.ranks import Exchange
from ballast.torch.modes import same_bits
from ballast.torch.stepping.members import Member, whole

if TYPE_CHECKING:
    from ballast.torch.job.job import Job


def sync(job: Job) -> None:
    """Takes over the values of all parameters, whether their version counters moved or not. COLLECTIVE."""
    if job.session is None:
        job.open()
    exchange = job.exchange('sync_from_params()')
    together(exchange, job.open)
    job.give_values(exchange)
    check_values(exchange, job.members)
    written = set(job.session.written)
    for member in job.members:
        take(job, member, exchange, written)


@torch.no_grad()
def take(job: Job, member: Member, exchange: Exchange, written: Collection[str]) -> None:
    """Takes over one parameter's values. written: names of tensors whose edits no step has taken. COLLECTIVE."""
    parameter = whole(member.parameter.detach())
    together(exchange, lambda: _write(job, member, parameter, written))
    member.noted()


def _write(job: Job, member: Member, parameter: torch.Tensor, written: Collection[str]) -> None:
    """parameter: all of it."""
    if member.edited_unseen():
        warn(f"parameter '{member.name}' was written through .data, which its version counter does not tell: taken over at step "
             f'{job.progress.steps}, as by sync_from_params(); without debug it would be lost')
    master = torch.empty(parameter.numel(), dtype=torch.float32, device='cpu')
    job.session.read(member.name, 'master', master)
    values = parameter.cpu().reshape(-1)
    kept = same_bits(master.to(values.dtype), values)
    # All ranks write, or none: their parameters are the same, but one of them may have been moved. Where they hold the master's
    # values once more, another edit may have been written that no step has taken.
    if job.options.world_size > 1 or member.name in written or not bool(kept.all()):
        job.session.write(member.name, torch.where(kept, master, values.float()))


def settle(job: Job) -> None:
    """Makes edits since the last step a part of the version that is about to be kept. For one rank."""
    written = set(job.session.written)
    for member in job.members:
        if member.edited():
            take(job, member, job.session.exchange, written)
    commit_written(job, job.session.exchange)


def commit_written(job: Job, exchange: Exchange) -> None:
    """Commits edits that no step has taken, for it was skipped, say, or for one rank could not write what others have. COLLECTIVE."""
    written = set(job.session.written)
    _, said = everyone(exchange, lambda: [member.name in written for member in job.members], bytes)
    halfway = [member for member, *has in zip(job.members, *said) if len(set(has)) > 1]
    check_values(exchange, halfway)
    for member in halfway:
        take(job, member, exchange, written)
    if any(map(any, said)):
        job.session.commit_values()


def edited(job: Job, members: Iterable[Member]) -> list[bool]:
    """By member: whether it was edited since the last step. With several ranks also where an edit was written before: one of them may not
    have written it."""
    written = set(job.session.written) if job.options.world_size > 1 else ()
    return [member.edited() or member.name in written for member in members]
