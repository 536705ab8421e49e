"""Parameters that register with a job that is open."""

from __future__ import annotations

from collections.abc import Collection

from ballast.errors import Error
from ballast.torch.agreement.agree import check_values
from ballast.torch.agreement.roster import Roster
from ballast.torch.job import edits
from ballast.torch.job.fit import new_tensors
from ballast.torch.job.opened import OpenJob
from ballast.torch.ranks.groups import Exchange
from ballast.torch.ranks.together import together
from ballast.torch.tensors.members import Fresh
from ballast.torch.tensors.memory import Memory, give_values


def late_tensors(job: OpenJob, trained: Collection[str] = ()) -> list[Fresh]:
    """new_tensors() of a job that is open."""
    fresh = new_tensors(job.parameters, job.group, trained, job.members, job.lends_masters)
    if fresh and job.options.durability == 'every-K':
        raise Error(f"parameter '{fresh[0].member.name}' came after the first step, but a job with durability='every-K' has all of its "
                    'parameters from the start, since its kept versions would have no state of a later one. Give the optimizer all '
                    'parameters before the first step', 'UNSUPPORTED')
    return fresh


def register(job: OpenJob, fresh: list[Fresh], exchange: Exchange, roster: Roster, registers: bool) -> None:
    """Adds parameters to an open job. COLLECTIVE. roster: of agree(), with the new ones. registers: some rank has new ones."""
    job.give_values(exchange)
    if not registers:
        return
    if roster.places and not job.options.placed:
        late = fresh[0].member.name if fresh else 'of another rank'
        raise Error(f"parameter '{late}' came after the first step, and unlike those before it is not whole on all ranks; give the "
                    'optimizer all parameters before the first step', 'UNSUPPORTED')
    new = [member for member, _, _ in fresh]
    check_values(exchange, roster, job.members + new, new)
    edits.commit_written(job, exchange)
    job.members.extend(new)
    registered = len(job.members)
    try:
        job.session.register([tensor for _, _, tensor in fresh])
    finally:  # Ctrl-C may come when the job has them
        del job.members[sum(map(len, job.session.units)):]
        if len(job.members) == registered:
            job.roster = roster
    give_values(job.session, job.members, together(exchange, lambda: Memory(job.members, job.host).wait()))
