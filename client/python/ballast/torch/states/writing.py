"""Writes entries of a state into an open job, in several transactions."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ballast.errors import Error
from ballast.torch.agreement.agree import Collected, agree, check_loaded, check_values
from ballast.torch.job import edits, registration, spec
from ballast.torch.job.fit import lines
from ballast.torch.job.job import Job
from ballast.torch.job.moments import MASTER, Array, read_part
from ballast.torch.job.opened import OpenJob
from ballast.torch.modes import same_bits
from ballast.torch.ranks.together import everyone, together
from ballast.torch.states.entries import Saved
from ballast.torch.tensors import marks, placement
from ballast.torch.tensors.kinds import digest_of, is_sharded, local, on_host
from ballast.torch.tensors.members import Member

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ballast.torch.agreement.roster import Roster
    from ballast.torch.ranks.groups import Exchange

# How many bytes of fp32 parameters one transaction writes. Conversions take no more memory than this.
_BATCH_BYTES = 256 << 20


class Masters(enum.Enum):
    """Which master an element of a parameter has after a load."""
    OF_ENTRY = "the entry's if it rounds to the parameter, else the servers' if that does, else the parameter"
    OF_SERVERS = "the servers' if it rounds to the parameter, else the entry's if that does, else the parameter"
    FRESH = "the entry's if it rounds to the parameter, else the parameter; the servers' does not count"
    WIN = "the entry's, which each entry has; the parameter becomes what it rounds to"


def _own(value: torch.Tensor, member: Member, rank: int) -> torch.Tensor:
    """Returns this rank's part of `value`, as contiguous fp32 on the CPU. COLLECTIVE if `value` is sharded in another way than the
    parameter."""
    parameter = member.parameter
    if is_sharded(value):
        same = is_sharded(parameter) and value.placements == parameter.placements and value.device_mesh == parameter.device_mesh
        value = local(value) if same else _whole(member.name, value)
    if value.shape != member.shape:
        value = value[tuple(slice(begin, end) for begin, end in placement.box(member.line.key, tuple(parameter.shape), rank))]
    return value.to(device='cpu', dtype=torch.float32).contiguous()


def _whole(name: str, value: DTensor) -> torch.Tensor:
    """COLLECTIVE."""
    placement.check_torchs(name, value)
    moved = value.to(value.device_mesh.device_type)
    return moved.full_tensor() if is_sharded(moved) else moved


def _batches(exchange: Exchange, roster: Roster, members: Sequence[Member]) -> list[list[Member]]:
    """Returns batches of members, as many on all ranks. A parameter is in the same batch everywhere; some may be empty here. COLLECTIVE."""
    by_name = {member.name: member for member in members}
    _, said = everyone(exchange, lambda: by_name, lambda by_name: bytes(name in by_name for name, _ in roster.parts))
    batches: list[list[Member]] = []
    size = 0
    for (name, _), elements, *given in zip(roster.parts, roster.sizes, *said):
        if not any(given):
            continue
        if not batches or size + 4 * elements > _BATCH_BYTES:
            batches.append([])
            size = 0
        size += 4 * elements
        if name in by_name:
            batches[-1].append(by_name[name])
    return batches


def _collect(job: OpenJob, trained: Collection[str]) -> Collected:
    """Collects the parameters that register with the load, and those that were edited before."""
    fresh = registration.late_tensors(job, trained)
    spec.check_dtypes(job.options.optimizer, [member for member, _, _ in fresh], [None] * len(fresh))
    members = job.members + [member for member, _, _ in fresh]
    return Collected(fresh, members, [None] * len(members), edits.edited(job, members), [],
                     lambda: lines(job.parameters, members), steps=0, debug=False, orders={}, attempt=job.session.attempt, went=False,
                     tied={})


def _check_frozen(job: OpenJob, given: Mapping[int, Saved]) -> None:
    for member in job.members:
        entry = given.get(id(member.parameter))
        if member.is_frozen and entry is not None and entry.steps > 0:
            raise Error(f"the state has moments of parameter '{member.name}' after {entry.steps} steps, but the job was made with it "
                        'frozen, so its servers have only its value. Leave the parameter out of the state, or load it into a new job that '
                        'trains the parameter', 'BAD_SPEC')


@torch.no_grad()
def bring_in(job: Job, call: str, given: Mapping[int, Saved], masters: Masters, steps: int | None = None, blob: bytes = b'') -> None:
    """Writes entries in several transactions. Until the last one, the job's blob says that its state is not whole. call: the user's. given:
    by id of the parameter. steps, blob: of the loop. None: as many steps as the parameter with the most has made."""
    was_open, trained = job.opened is not None, _trained(job, given)
    opened = job.open(partly=True, trained=trained)
    exchange = job.exchange(call)
    job.discard(exchange)
    agreed = agree(exchange, opened.roster, lambda: _collect(opened, trained))
    registration.register(opened, agreed.collected.fresh, exchange, agreed.roster, agreed.registers)
    edits.commit_written(opened, exchange)
    together(exchange, lambda: _check_frozen(opened, given))
    load = _Load(job, opened, exchange, given, masters, steps, blob)
    writes = load.writes(agreed.edits)
    if masters is Masters.OF_ENTRY and not was_open and not opened.unpulled:
        load.masters = Masters.FRESH  # the job is new
    for write in writes:
        load.make(write, is_last=write is writes[-1])
    if masters is Masters.WIN:
        opened.pull()
    marks.note(load.members)


def _trained(job: Job, given: Mapping[int, Saved]) -> set[str]:
    """Returns names of parameters that the job trains, though they may be frozen here."""
    return {job.parameters.name_of(g, i, parameter) for g, i, parameter in job.parameters.placed()
            if id(parameter) in given and given[id(parameter)].steps > 0}


class _Write(NamedTuple):
    """One transaction."""
    array: Array
    moment: str | None  # torch's; None: the master
    batch: list[Member]  # none where only other ranks have something to write


class _Load:
    """Entries on their way into an open job."""

    def __init__(self, job: Job, opened: OpenJob, exchange: Exchange, given: Mapping[int, Saved], masters: Masters,
                 steps: int | None, blob: bytes) -> None:
        """given, steps, blob: as bring_in()'s."""
        self._job, self._opened, self._exchange, self._given = job, opened, exchange, given
        self.masters, self._blob = masters, blob
        # The model's state_dict() brings the values of those that are frozen, and they have nothing else.
        self.members = [member for member in opened.members if id(member.parameter) in given and not member.is_frozen]
        self._steps = max((self._entry(member).steps for member in self.members), default=0) if steps is None else steps

    def writes(self, edited: bool) -> list[_Write]:
        """Returns all transactions. COLLECTIVE. edited: some rank has edited a parameter."""
        of_groups = self._job.arrays()
        moments = {moment: array for of_group in of_groups for moment, array in of_group.items()}  # in one order on all ranks
        arrays: list[tuple[Array, str | None]] = [(MASTER, None)] if self._writes_masters(all(of_groups), edited) else []
        arrays += [(array, moment) for moment, array in moments.items()]
        found = []
        for array, moment in arrays:
            members = [member for member in self.members if moment is None or moment in of_groups[member.group]]
            found += [_Write(array, moment, batch) for batch in _batches(self._exchange, self._opened.roster, members)]
        return found

    def _writes_masters(self, has_moments: bool, edited: bool) -> bool:
        """Masters must be written if an entry has one, and if parameters may be ahead of them: edited, or never pulled. COLLECTIVE."""
        if self.masters is Masters.WIN:
            return True
        _, said = everyone(self._exchange, lambda: any(self._entry(member).master is not None for member in self.members),
                           lambda has_masters: b'%d' % has_masters)
        writes = (self.masters is Masters.FRESH or not has_moments or self._opened.unpulled or edited
                  or any(each != b'0' for each in said))
        if writes:
            check_values(self._exchange, self._opened.roster, self._opened.members, self.members, has_values=True)
        return writes

    def make(self, write: _Write, is_last: bool) -> None:
        """COLLECTIVE."""
        session = self._opened.session
        values = self._values(write)
        sealed = self._job.progress.pack(self._steps, self._blob) if is_last else self._job.progress.pack_under_way()
        before = session.version
        try:
            session.commit_state(write.array.name, [member.name + write.array.suffix for member in write.batch], values,
                                 [self._entry(member).steps for member in write.batch], sealed)
            if self.masters is Masters.WIN and write.moment is None and self._opened.lends_masters:
                for member, value in zip(write.batch, values):
                    member.parameter.copy_(value)
        finally:  # Ctrl-C may come when the servers have it
            if session.version > before:
                self._made(is_last)

    def _made(self, is_last: bool) -> None:
        self._job.progress.partly = not is_last
        if not is_last:
            return
        if self._opened.lends_masters:
            self._job.connection.hold_masters()
        self._opened.unpulled = self.masters is Masters.WIN
        self._job.progress.loaded(self._steps, self._blob)

    def _values(self, write: _Write) -> list[torch.Tensor]:
        """Returns what to write, by member of the batch. COLLECTIVE."""
        parts = [self._part(member, write.moment) for member in write.batch]
        values = together(self._exchange, lambda: [self._value(member, write.moment, part) for member, part in zip(write.batch, parts)])
        check_loaded(self._exchange, self._opened.roster, self._opened.members,
                     {id(member): digest_of(value) for member, value in zip(write.batch, values)}, write.moment or 'the master')
        return values

    def _entry(self, member: Member) -> Saved:
        return self._given[id(member.parameter)]

    def _part(self, member: Member, moment: str | None) -> torch.Tensor | None:
        """Returns this rank's part of an entry's moment, or of its master (moment None). COLLECTIVE, see _own()."""
        entry = self._entry(member)
        given = entry.master if moment is None else entry.moment(moment)
        return None if given is None else _own(given, member, self._opened.group.rank)

    def _value(self, member: Member, moment: str | None, part: torch.Tensor | None) -> torch.Tensor:
        """Returns what to write. part: of _part()."""
        if moment is None and part is not None and self.masters is Masters.WIN:
            return part
        if moment is None:
            return self._master(member, part)
        return torch.zeros(local(member.parameter).numel(), dtype=torch.float32, device='cpu') if part is None else part

    def _master(self, member: Member, known: torch.Tensor | None) -> torch.Tensor:
        """known: the entry's."""
        session = self._opened.session
        if member.here is None:
            return read_part(session, member) if known is None or self.masters is Masters.OF_SERVERS else known
        values = on_host(member.parameter)
        preferred = [] if known is None else [known]
        if self.masters is Masters.OF_SERVERS:
            preferred.insert(0, read_part(session, member))
        elif self.masters is not Masters.FRESH and (known is None or not bool(_rounds(known, values).all())):
            preferred.append(read_part(session, member))
        return fitting(values, preferred)


def fitting(values: torch.Tensor, masters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns by element the first of `masters` that rounds to the value, or else the value. In fp32."""
    found = values.float()
    for master in reversed(masters):
        found = torch.where(_rounds(master, values), master, found)
    return found.contiguous()


def _rounds(master: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns by element whether the master rounds to the value."""
    return same_bits(master.to(values.dtype), values)
