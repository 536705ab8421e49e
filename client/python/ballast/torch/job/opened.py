"""A job that is open: the session with the servers, and the parameters that are registered in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.agreement.agree import check_values
from ballast.torch.agreement.roster import Roster
from ballast.torch.job import moments
from ballast.torch.job.naming import Parameters
from ballast.torch.ranks import groups
from ballast.torch.ranks.together import together
from ballast.torch.tensors.host_memory import HostMemory
from ballast.torch.tensors.members import Member, wrote
from ballast.torch.tensors.memory import Memory, give_values

if TYPE_CHECKING:
    from ballast.torch.job.connection import Connection
    from ballast.torch.job.progress import Progress


class OpenJob:
    """One rank's side. It ends with its session; a job that opens again gets another. Threads: the training loop's."""

    def __init__(self, session: _native.Session, members: list[Member], roster: Roster, group: groups.Group, *,
                 options: _native.OpenOptions, parameters: Parameters, connection: Connection, progress: Progress) -> None:
        """members: registered, in the session's order. roster: what all ranks have. group: the ranks that train the job."""
        self.session, self.members, self.roster, self.group = session, members, roster, group
        self.options, self.parameters, self.connection = options, parameters, connection
        self.progress = progress
        self.host = HostMemory()
        self.unpulled = False  # parameters may not hold the job's version yet
        self.found: int | None = None  # the version that the job was found at; None: the job was new
        self._by_parameter: dict[int, Member] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.parameters.groups

    @property
    def lends_masters(self) -> bool:
        """Parameters are their own masters. The server has only their moments, and every write to a parameter counts."""
        return bool(self.options.optimizer.master == 'lent')

    def exchange(self, call: str) -> groups.Within:
        """The exchange of ranks that make this call."""
        return groups.Within(call, self.session.exchange, self.options.rank)

    def member_of(self, parameter: torch.Tensor) -> Member | None:
        """Returns None if the parameter is not registered."""
        if len(self._by_parameter) < len(self.members):
            self._by_parameter = {id(member.parameter): member for member in self.members}
        return self._by_parameter.get(id(parameter))

    def let_go(self) -> None:
        """Drops the parameters and their memory. A step on another thread keeps what it needs."""
        self.members, self._by_parameter, self.host = [], {}, HostMemory()

    # --- what the servers have

    def take_blob(self) -> None:
        """Takes the loop's position from the version that was found or restored."""
        self.progress.take(self.session.blobs, self.options.rank)

    def give_values(self, exchange: groups.Exchange) -> None:
        """Gives tensors without values on the servers the values of their parameters: all tensors of a new job, and those of a registration
        that was cut off, for example when the process ended. Other tensors keep their values. COLLECTIVE."""
        if not self.session.needs_values:
            return
        check_values(exchange, self.roster, self.members, together(exchange, self._without_values))
        blob = self.progress.pack(0) if self.session.version < 0 and self.progress.origin else b''
        give_values(self.session, self.members, together(exchange, lambda: Memory(self.members, self.host).wait()), blob)

    def _without_values(self) -> list[Member]:
        """Returns members that may have no values on the servers. All others have values."""
        if self.session.version < 0 or self.options.world_size == 1:
            return self.members
        return [member for member in self.members if self.session.tensor_steps(member.name) == 0
                and not bool(moments.read_part(self.session, member).any())]

    def pull(self) -> None:
        """Brings the job's version to all parameters."""
        memory = Memory(self.members, self.host).wait()
        self.session.pull(memory.parameters)
        if self.lends_masters:
            self._take_masters()
        else:
            for i in range(len(self.members)):
                memory.write_back(i)
        wrote(self.members)
        self.unpulled = False

    # --- masters that the trainer lends

    @torch.no_grad()
    def _take_masters(self) -> None:
        """Takes masters from the optimizer of this process that had the job before, since the server has only moments."""
        holder = self.connection.masters_holder
        if holder is not None:
            with contextlib.suppress(Error):  # it is the holder's to tell; a step under way brings its values to the parameters
                holder.wait()
        held = {member.name: member.parameter for member in ([] if holder is None else holder.members)}
        gone = [member.name for member in self.members if member.name not in held]
        if gone:
            raise Error(f"job '{self.options.job}' has no values of parameter '{gone[0]}': with durability='none' they were in the "
                        'optimizer that made the job, and that optimizer is gone. Load a state, or make a job with another name',
                        'STATE_LOST')
        for member in self.members:
            if held[member.name] is not member.parameter:
                member.parameter.copy_(held[member.name])
        self.connection.hold_masters()

    # --- gradients that went before the step

    def drop_to(self, attempt: int) -> None:
        """Takes back what went to the session before a step, until this rank has reached this attempt. COLLECTIVE without a message."""
        while self.session.attempt < attempt:
            self.session.drop()
