"""Brings values into a job: from parameters, or from the state_dict() of a model whose parameters live on the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ballast.errors import Error
from ballast.torch.agreement.agree import check_loaded, check_values
from ballast.torch.job import edits
from ballast.torch.job.job import Job
from ballast.torch.job.opened import OpenJob
from ballast.torch.ranks.together import together
from ballast.torch.tensors.kinds import digest_of
from ballast.torch.tensors.members import StateMember


def sync(job: Job) -> None:
    """Takes over the values of all parameters, whether or not their marks show edits. COLLECTIVE."""
    there = job.opened or job.open()
    if there.lends_masters:
        return
    exchange = job.exchange('sync_from_params()')
    together(exchange, job.open)
    there.give_values(exchange)
    check_values(exchange, there.roster, there.members, there.members)
    edits.take(there, [member for member in there.members if not isinstance(member, StateMember)], exchange)


@torch.no_grad()
def give(job: Job, given: Mapping[int, torch.Tensor], check: Callable[[], None] = lambda: None) -> None:
    """Gives values to parameters that live only on the servers, and commits them. given: this rank's parts in the host's memory, by id of
    the parameter. COLLECTIVE: all ranks that have a part of a parameter give it, and replicas give the same. If check() raises on one
    rank, all raise, and nothing is given."""
    exchange = job.exchange('load_state_dict() of a model')

    def look() -> OpenJob:
        check()
        there = job.open()
        for member in there.members:
            values = given.get(id(member.parameter))
            if values is not None and not bool(torch.isfinite(values).all()):
                raise Error(f"the values for parameter '{member.name}' are not all finite, and servers refuse such values; nothing was "
                            'loaded', 'BAD_REQUEST')
        return there
    there = together(exchange, look)
    there.give_values(exchange)
    for feature in job.features:
        feature.discard()
    members = [member for member in there.members if id(member.parameter) in given]
    digests = {id(member): digest_of(given[id(member.parameter)]) for member in members}
    check_loaded(exchange, there.roster, there.members, digests, 'the value')

    def write() -> None:
        for member in members:
            edits.put(there, member, given[id(member.parameter)], there.session.written)
    together(exchange, write)
    edits.commit_written(there, exchange)
