"""Steps that the trainer assists. An elementwise optimizer runs on the servers alone; one that needs whole matrices, such as Muon, cannot.

Servers keep two tensors of an assisted parameter: its master, and a state of the same shape. A step pulls the state (state out), computes
the update here, and pushes it in place of the parameter's gradient (update in). The gradient itself goes to the state. Both are plain SGD
on the servers: of the update, which no norm or clip factor touches, and of the gradient. So the step is one transaction like any other. The
log has both, and a replay needs neither a GPU nor a trainer.

Ranks have parts of a matrix, or all of it. One rank, the owner, computes the update of a matrix: the others send it their parts of the
direction, and get back their parts of the update. Owners have about equally many elements.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ballast.errors import Error
from ballast.torch.job.features import Feature, Gone
from ballast.torch.job.moments import read_part
from ballast.torch.ranks.groups import Within
from ballast.torch.ranks.together import alike, everyone, together
from ballast.torch.tensors import placement
from ballast.torch.tensors.kinds import DTYPES, local
from ballast.torch.tensors.members import STATE_SUFFIX, Member, StateMember
from ballast.torch.tensors.memory import in_host
from ballast.torch.tensors.remote import GoneGradient, Remote, gone_of

if TYPE_CHECKING:
    from ballast import _native
    from ballast.torch.agreement.roster import Place, Roster
    from ballast.torch.job.features import Ready
    from ballast.torch.job.opened import OpenJob
    from ballast.torch.ranks.groups import Group

# States on their way at once, in bytes; at least one.
AHEAD_BYTES = 64 << 20
# Directions and updates that a rank has at once, in bytes; at least those of one matrix. Less would leave ranks without a matrix of theirs
# in a wave.
WAVE_BYTES = 512 << 20
WIDTH = 2  # of a direction's element, and of an update's

Box = tuple[tuple[int, int], ...]


class Rule(Protocol):
    """What the trainer computes of an assisted optimizer. Its one state is of the matrix's shape: the running mean of gradients, by the
    group's momentum, which servers compute. Ranks compare the group's options ns_... and adjust_..., nesterov, momentum and eps."""

    def direction(self, group: Mapping[str, Any], gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Elementwise, of any part of a matrix: what update() needs, in bfloat16. gradient: scaled and clipped. state: as before this step;
        may be written to."""

    def update(self, group: Mapping[str, Any], direction: torch.Tensor) -> torch.Tensor:
        """Of a whole matrix: the update, in bfloat16 as the direction."""

    def scale(self, group: Mapping[str, Any], shape: Sequence[int]) -> float:
        """What servers multiply the update by, beside lr, before they subtract it from a matrix of this shape."""


class _Matrix(NamedTuple):
    """An assisted parameter with a gradient in this step."""
    at: int  # of its member
    member: Member
    state: int  # of its state's member
    owner: int  # rank
    parts: dict[Box, list[int]]  # the ranks that have a part of it, by part
    box: Box  # this rank's part

    @property
    def shape(self) -> tuple[int, ...]:
        return self.member.line.shape

    def sender(self, box: Box) -> int:
        """The rank that tells the owner of this part: itself, if it has the part too."""
        ranks = self.parts[box]
        return self.owner if self.owner in ranks else ranks[0]


class _Wave(NamedTuple):
    """Matrices whose updates are computed together. Ranks have as many waves, though not all have matrices in each."""
    matrices: list[_Matrix]
    units: list[int]  # of the session: their last assisted tensor is in this wave


class Assisted(Feature):
    """Threads: the training loop's."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._waves: tuple[Roster | None, list[_Wave]] = None, []
        self._session: _native.Session | None = None
        self._went: set[int] = set()  # members, by index, that went to the servers amid prepare()

    def entries(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """What the update of a matrix depends on, and servers do not compare."""
        return [(f"{key} of param_groups[{g}], which Muon updates,", repr(_plain(group[key])))
                for g, group in enumerate(groups) if group.get('use_muon')
                for key in sorted(group) if key.startswith(('ns_', 'adjust_')) or key in ('nesterov', 'momentum', 'eps')]

    def complete(self, members: Sequence[Member], gradients: list[torch.Tensor | None]) -> None:
        """A state's gradient is its parameter's."""
        place = {id(member): i for i, member in enumerate(members)}
        for i, member in enumerate(members):
            if isinstance(member, StateMember):
                gradients[i] = gradients[place[id(member.of)]]

    def left(self) -> None:
        self._waves = None, []
        self._session, self._went = None, set()

    def take(self) -> Gone:
        went, self._went = self._went, set()
        return Gone(frozenset(went), None)

    def unprepare(self) -> None:
        if self._went and self._session is not None:
            with contextlib.suppress(Error):  # the session is over
                self._session.drop()
        self._went = set()

    @torch.no_grad()
    def prepare(self, job: OpenJob, ready: Ready) -> None:
        """Replaces gradients of assisted parameters by updates, wave by wave. The updates of a wave go to the servers as the next wave
        begins, so that the trainer has those of two waves at most. COLLECTIVE."""
        if self._waves[0] is None:
            _meet(job.group, ready.gradients)
        self._session = job.session
        factor = ready.scale * _clip(job, ready)
        done: list[int] = []
        for wave in self._all(job, ready.roster):
            self._compute(job, ready, [matrix for matrix in wave.matrices if ready.present[matrix.at]], factor, done)
            done = wave.units

    def _compute(self, job: OpenJob, ready: Ready, matrices: Sequence[_Matrix], factor: float, done: Sequence[int]) -> None:
        """matrices: of one wave. factor: of gradients. done: units to push."""
        gradients = {matrix.at: _gradient(matrix, ready.gradients[matrix.at]) for matrix in matrices}
        directions, updates = _Parts(job.group, matrices), _Parts(job.group, matrices)

        def direct() -> None:
            self._push(job, ready, done)
            for matrix, state in _states(job, [matrix for matrix in matrices if matrix.sender(matrix.box) == job.group.rank]):
                gradient = gradients[matrix.at]
                scaled = gradient if factor == 1 else gradient.float() * factor
                directions.have(matrix, self._rule.direction(_group_of(job, matrix), scaled, state.to(gradient.device)))

        def update() -> None:
            for matrix in matrices:
                if matrix.owner == job.group.rank:
                    updates.own(matrix, self._rule.update(_group_of(job, matrix), directions.whole(matrix)))
        # An error on one rank is one on all: nobody waits for a part that does not come.
        alike(Within('directions', ready.exchange), direct, lambda _: self.entries(job.param_groups))
        directions.gather()
        together(Within('updates', ready.exchange), update)
        updates.scatter()
        for matrix in matrices:
            gradient = ready.gradients[matrix.state] = gradients[matrix.at]
            scale = self._rule.scale(_group_of(job, matrix), matrix.shape)
            ready.gradients[matrix.at] = updates.mine(matrix).to(gradient).mul_(scale)

    def _push(self, job: OpenJob, ready: Ready, units: Sequence[int]) -> None:
        """Pushes units ahead of the step, and lets go of their updates."""
        if not job.session.pushes_gradients:
            return  # the server reads them where they are
        tensors_of = job.session.units
        for unit in units:
            given = {i: gradient for i in tensors_of[unit] if (gradient := ready.gradients[i]) is not None}
            memory = {i: in_host(job.host, job.members[i], 'gradient', gradient) for i, gradient in given.items()}
            for event in job.host.enqueued():
                event.synchronize()
            self._went.update(given)
            job.session.push_early(unit, [memory.get(i) for i in tensors_of[unit]], let_go=True)
            for i, gradient in given.items():
                if job.members[i].is_assisted:
                    gone = GoneGradient(job.members[i].name, None, None)
                    ready.gradients[i] = Remote(gone, gradient.shape, gradient.dtype, gradient.device)

    def _all(self, job: OpenJob, roster: Roster) -> list[_Wave]:
        """Returns waves of this rank's assisted parameters, in an order that is the same on all ranks."""
        known, found = self._waves
        if known is not roster:
            found = _waves(job, roster)
            self._waves = roster, found
        return found


def _plain(value: Any) -> Any:
    """An option's value. Ranks may have it as a list or a tuple, and as an integer, a float or a tensor."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in value)
    value = value.item() if isinstance(value, torch.Tensor) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _meet(group: Group, gradients: Sequence[torch.Tensor | None]) -> None:
    """NCCL wants all ranks of a group in its first operation, and not all ranks have parts to send."""
    if group.several:
        here = next((gradient.device for gradient in gradients if gradient is not None), torch.device('cpu'))
        dist.all_reduce(torch.zeros(1, device=here), group=group.process_group)


def _gradient(matrix: _Matrix, gradient: torch.Tensor | None) -> torch.Tensor:
    """A part without a gradient counts as zeros if other parts have one, as with every optimizer."""
    return torch.zeros_like(local(matrix.member.parameter)) if gradient is None else gradient


def _group_of(job: OpenJob, matrix: _Matrix) -> dict[str, Any]:
    return job.param_groups[matrix.member.group]


def _clip(job: OpenJob, ready: Ready) -> float:
    """Returns the factor that clips this step's gradients. It may differ from the servers' in its last bits: the update, which it goes
    into, is logged as it is. COLLECTIVE."""
    if ready.max_norm <= 0:
        return 1.0
    _, said = everyone(Within('the norm of gradients', ready.exchange), lambda: _squares(job, ready),
                       lambda squares: squares.hex().encode())
    norm = abs(ready.scale) * math.sqrt(sum(float.fromhex(each.decode()) for each in said))
    return min(1.0, ready.max_norm / (norm + 1e-6)) if math.isfinite(norm) else math.nan


def _squares(job: OpenJob, ready: Ready) -> float:
    """Returns the sum of squares of this rank's gradients. The first of several replicas counts them."""
    mine = 0.0
    for member, gradient, replicas in zip(job.members, ready.gradients, ready.roster.replicas):
        if gradient is None or isinstance(member, StateMember):
            continue
        if gone_of(gradient) is not None:
            raise Error(f"the gradient of parameter '{member.name}' went to the servers in backward, so the norm is not known before "
                        'matrices are orthogonalised; make the model with shard(push_early=False)', 'UNSUPPORTED')
        if replicas[0].rank == job.group.rank:
            mine += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
    return mine


def _waves(job: OpenJob, roster: Roster) -> list[_Wave]:
    at = {member.name: i for i, member in enumerate(job.members)}
    names = {name for name, _ in roster.parts}
    assisted = [(name, places, elements) for (name, places), elements in zip(roster.parts, roster.sizes) if name + STATE_SUFFIX in names]
    owners = _owners(assisted)
    waves = [_Wave([], [])]
    taken: collections.Counter[int] = collections.Counter()  # bytes of the wave, by rank
    wave_of: dict[int, int] = {}  # by member
    for name, places, elements in assisted:
        takes = collections.Counter({place.rank: WIDTH * elements // roster.divided(places) for place in places})
        takes[owners[name]] += WIDTH * elements
        if taken and max((taken + takes).values()) > WAVE_BYTES:
            waves.append(_Wave([], []))
            taken.clear()
        taken += takes
        if name in at:
            member = job.members[at[name]]
            parts = _by_box(member, places)
            box = next(box for box, ranks in parts.items() if job.group.rank in ranks)
            waves[-1].matrices.append(_Matrix(at[name], member, at[name + STATE_SUFFIX], owners[name], parts, box))
            wave_of[at[name]] = wave_of[at[name + STATE_SUFFIX]] = len(waves) - 1
    for unit, tensors in enumerate(job.session.units):
        its = [wave_of[i] for i in tensors if i in wave_of]
        if its:
            waves[max(its)].units.append(unit)
    return waves


def _owners(assisted: Sequence[tuple[str, Sequence[Place], int]]) -> dict[str, int]:
    """assisted: names, ranks and elements."""
    load: collections.Counter[int] = collections.Counter()
    owners = {}
    # The largest first: so the loads differ by little.
    for name, places, elements in sorted(assisted, key=lambda each: -each[2]):
        owners[name] = min((place.rank for place in places), key=lambda rank: (load[rank], rank))
        load[owners[name]] += elements
    return owners


def _by_box(member: Member, places: Sequence[Place]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for place in places:
        key, shape = member.line.key, member.line.shape
        box = tuple((0, extent) for extent in shape) if key is None else placement.box(key, shape, place.rank)
        found.setdefault(box, []).append(place.rank)
    return found


def _states(job: OpenJob, matrices: Sequence[_Matrix]) -> Iterator[tuple[_Matrix, torch.Tensor]]:
    """Pulls this rank's parts of states, a few ahead of their use."""
    if job.options.optimizer.working not in DTYPES.values():  # 8 bits are too few for them
        yield from ((matrix, read_part(job.session, job.members[matrix.state])) for matrix in matrices)
        return
    waiting, under_way, ahead = collections.deque(matrices), collections.deque[tuple[_Matrix, torch.Tensor, int]](), 0
    try:
        while waiting or under_way:
            while waiting and (not under_way or ahead < AHEAD_BYTES):
                matrix = waiting.popleft()
                state = torch.empty(job.members[matrix.state].shape, dtype=_working(job), device='cpu')
                under_way.append((matrix, state, job.session.start_pull([matrix.state], [state.view(-1)])))
                ahead += state.nbytes
            matrix, state, pull = under_way.popleft()
            job.session.await_pull(pull)
            ahead -= state.nbytes
            # In fp16 a mean of small gradients would vanish.
            yield matrix, read_part(job.session, job.members[matrix.state]) if state.dtype == torch.float16 else state
    finally:
        for _, _, pull in under_way:
            with contextlib.suppress(Error):
                job.session.await_pull(pull)


def _working(job: OpenJob) -> torch.dtype:
    return next(dtype for dtype, name in DTYPES.items() if name == job.options.optimizer.working)


class _Parts:
    """Parts of matrices on their way to their owners, or from them. Both ends know what comes, so no message says it."""

    def __init__(self, group: Group, matrices: Sequence[_Matrix]) -> None:
        self._group, self._matrices = group, matrices
        self._there: dict[tuple[int, Box], torch.Tensor] = {}  # by the matrix's member and part

    def have(self, matrix: _Matrix, part: torch.Tensor) -> None:
        """This rank's part."""
        self._there[matrix.at, matrix.box] = part.bfloat16().contiguous()

    def own(self, matrix: _Matrix, whole: torch.Tensor) -> None:
        for box in matrix.parts:
            self._there[matrix.at, box] = whole[tuple(slice(begin, end) for begin, end in box)].bfloat16().contiguous()

    def mine(self, matrix: _Matrix) -> torch.Tensor:
        return self._there.pop((matrix.at, matrix.box))

    def whole(self, matrix: _Matrix) -> torch.Tensor:
        """Owner: the matrix, whose parts are forgotten."""
        if len(matrix.parts) == 1:
            return self._there.pop((matrix.at, matrix.box))
        parts = {box: self._there.pop((matrix.at, box)) for box in matrix.parts}
        whole = next(iter(parts.values())).new_empty(matrix.shape)
        for box, part in parts.items():
            whole[tuple(slice(begin, end) for begin, end in box)] = part
        return whole

    def gather(self) -> None:
        """Sends this rank's parts to the owners. COLLECTIVE."""
        self._move([(matrix, box, matrix.sender(box), matrix.owner) for matrix in self._matrices for box in matrix.parts])

    def scatter(self) -> None:
        """Sends the owners' parts to the ranks. COLLECTIVE."""
        self._move([(matrix, box, matrix.owner, rank)
                    for matrix in self._matrices for box, ranks in matrix.parts.items() for rank in ranks])

    def _move(self, moves: Sequence[tuple[_Matrix, Box, int, int]]) -> None:
        """moves: matrix, part, from and to which rank, in an order that is the same on all ranks."""
        rank, operations = self._group.rank, []
        for matrix, box, sender, receiver in moves:
            if rank not in (sender, receiver) or sender == receiver:
                continue
            if rank == receiver:
                self._there[matrix.at, box] = self._empty(matrix, box)
            part = self._there[matrix.at, box]
            if part.numel() > 0:  # torch sends no tensor without elements
                sends = rank == sender
                operations.append(dist.P2POp(dist.isend if sends else dist.irecv, part, self._number(receiver if sends else sender),
                                             self._group.process_group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _empty(self, matrix: _Matrix, box: Box) -> torch.Tensor:
        return torch.empty([end - begin for begin, end in box], dtype=torch.bfloat16, device=local(matrix.member.parameter).device)

    def _number(self, rank: int) -> int:
        """torch's number of a rank of the group."""
        return next(number for number, each in self._group.numbers.items() if each == rank)
