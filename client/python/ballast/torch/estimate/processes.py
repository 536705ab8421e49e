"""Bytes of each process of a job: of trainers and servers, in memory, on the card and on the disk."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple

from ballast import _native
from ballast.torch.estimate.model import Model, Unit
from ballast.torch.sharding.coded import BLOCK, BLOCK_BYTES
from ballast.torch.sharding.memory import held
from ballast.torch.steps.assisted import AHEAD_BYTES as _MOMENTA
from ballast.torch.steps.assisted import WAVE_BYTES as _WAVE_BYTES
from ballast.torch.steps.assisted import WIDTH as _WIDTH

_MIB = 1 << 20
# Bytes of pushes, and of pulls, that a trainer has on their way (client/session_types.h, inflight_bytes_max), and of the memory that it
# shares with each server of its host.
_IN_FLIGHT = 64 * _MIB
# What the programs take without a job, as measured: code of gRPC and RocksDB that runs, their heaps and threads.
_INSIDE, _CLIENT, _SERVER = 13 * _MIB, 16 * _MIB, 46 * _MIB
_CATALOG = 6 * _MIB + 200 * 1024  # RocksDB reserves 4 MiB for its manifest and 2.2 for its log
# Memory for slices comes in slabs (services/job_state/slice_memory.cc). Smaller slices lie apart from them.
_SLAB, _IN_SLABS = 256 * _MIB, 2 * _MIB
_VALUE_BYTES = 4  # a new job's values are float32 on their way
_VALUES = 16 * _MIB  # client/transfers/values.h: 4 slices of them, each of up to 4 MiB
_PLACE_BYTES = 64 * _MIB  # tensors/host_memory.py: smaller tensors share such places
_GATHERS = 'gathers and reductions'
_GRADIENTS = "gradients of Muon's matrices, until the step"
_ITERATION = 4  # matrices in bf16 that an iteration of Newton-Schulz has at once


class Row(NamedTuple):
    process: str  # 'trainer' or 'server'
    what: str
    place: str  # 'card', 'memory' or 'disk'
    size: int
    is_shared: bool = False  # counted for the trainers already


class Job(NamedTuple):
    ranks: int
    servers: int  # 0: inside the trainer, or beside the ranks of a host
    is_sharded: bool
    on_card: bool
    lends: bool  # the server works on the trainer's memory
    prefetch_bytes: int
    chunk_elements: int
    is_coded: bool  # servers send parameters in blocks of 8 bits

    @property
    def is_inside(self) -> bool:
        return self.servers == 0 and self.ranks == 1


class Slices(NamedTuple):
    """Memory that a server reserves for slices of a step, what pages of it a new job's values take, and what steps take."""
    reserved: int
    start: int
    steps: int


def rows(told: _native.EstimateReport, model: Model, job: Job) -> list[Row]:
    """Returns the bytes of one trainer and of the fullest server. Empty if the job does not fit."""
    if not told.fits:
        return []
    slices = _slices(told, model, job)
    own = Row('trainer', "the client's and the server's libraries" if job.is_inside else "the client's libraries", 'memory',
              _INSIDE if job.is_inside else _CLIENT)
    # The most is taken either while the first values go to the servers, or in a step.
    starting = [*_starting(model, job), own, *_server(told, job, slices, slices.start, _VALUES)]
    steps = [_sharded(model, job, assists) for assists in (False, True)] if job.is_sharded else [_whole(model, job)]
    stepping = [[*step, own, *_server(told, job, slices, slices.steps, _on_their_way(model, job))] for step in steps]
    found = []
    for process in ('trainer', 'server'):
        moments = [[row for row in rows if row.process == process and row.size > 0] for rows in (starting, *stepping)]
        found += max(moments, key=lambda rows: totals(rows, 'memory').get(process, 0))
    return found


def _on_their_way(model: Model, job: Job) -> int:
    """Returns how many bytes a rank sends and gets at one time, in a step."""
    if not job.is_sharded:
        return min(_IN_FLIGHT, model.elements * model.width // job.ranks)
    largest = max(unit.elements for unit in model.units) * model.width // job.ranks
    return min(_IN_FLIGHT, min(job.prefetch_bytes, 2 * model.elements * model.width // job.ranks) + largest)


def _chunks(model: Model, job: Job) -> list[int]:
    """Elements of the chunks that servers train."""
    chunks = []
    for elements in model.server_units.values():
        whole, rest = divmod(elements, job.chunk_elements)
        chunks += [job.chunk_elements] * whole + [rest] * (rest > 0)
    return chunks


def _slices(told: _native.EstimateReport, model: Model, job: Job) -> Slices:
    if job.lends:
        return Slices(0, 0, 0)
    reserved = max(_VALUE_BYTES, model.width + 2) * told.server_parameters
    other = next(other for tier, _, _, other in told.parts if tier == 'dram')
    if other < reserved:  # there is no room for them all: they are on the disk, and buffers in memory
        return Slices(other, other, other)
    large, small = _by_size(model, job, _VALUE_BYTES)
    slabs = min(reserved, -(-large // _SLAB) * _SLAB)
    start = min(reserved, slabs + small)
    # Gradients that lie apart from slabs, and find no room beside them, have the slabs' free pages given back.
    _, apart = _by_size(model, job, model.width)
    is_given_back = apart > 0 and slabs + apart > reserved
    return Slices(reserved, start, min(start, told.server_parameters * model.width) if is_given_back else start)


def _by_size(model: Model, job: Job, width: int) -> tuple[int, int]:
    """Returns the bytes of one server's slices that lie in slabs, and of those that lie apart."""
    sizes = [chunk * width for chunk in _chunks(model, job)]
    large = sum(size for size in sizes if size >= _IN_SLABS)
    servers = max(job.servers, 1)
    return large // servers, (sum(sizes) - large) // servers


def _server(told: _native.EstimateReport, job: Job, slices: Slices, now: int, on_their_way: int) -> Iterable[Row]:
    """now: bytes of slices. on_their_way: of each rank, in shared memory."""
    who = 'trainer' if job.is_inside else 'server'
    parts = {tier: (state, working, other) for tier, state, working, other in told.parts}
    state, working, other = parts['dram']
    yield Row(who, 'optimizer state and masters', 'memory', state)
    yield Row(who, 'working copies', 'memory', working)
    yield Row(who, 'slices of a step', 'memory', now)
    yield Row(who, 'staging and buffers', 'memory', max(0, other - slices.reserved))
    if not job.is_inside:
        yield Row(who, 'the program itself', 'memory', _SERVER)
        yield Row(who, 'memory shared with the trainers', 'memory', job.ranks * on_their_way // max(job.servers, 1), is_shared=True)
    state, working, other = parts['nvme']
    yield Row(who, 'optimizer state and masters', 'disk', state)
    yield Row(who, 'working copies', 'disk', working)
    yield Row(who, 'gradient log, and room for new versions', 'disk', other)
    if state + working + other > 0:
        yield Row(who, 'catalog', 'disk', _CATALOG)


def _pinned(sizes: Iterable[int]) -> int:
    """Returns the page-locked bytes that tensors take."""
    sizes = list(sizes)
    small = sum(size for size in sizes if size < _PLACE_BYTES)
    return sum(held(size, pinned=True) for size in sizes if size >= _PLACE_BYTES) + -(-small // _PLACE_BYTES) * _PLACE_BYTES


def _own(model: Model, job: Job) -> Iterable[Row]:
    """What a trainer has whole. The job opens at the first step, when there are gradients."""
    where = 'card' if job.on_card else 'memory'
    yield Row('trainer', 'parameters', where, model.elements * model.width)
    yield Row('trainer', 'gradients', where, model.trained * model.width)
    if job.on_card:
        sizes = [parameter.numel() * model.width for parameter in model.parameters if parameter.requires_grad]
        matrices = [elements * model.width for elements in model.assisted]  # whose gradients go beside their updates
        yield Row('trainer', 'page-locked parameters and gradients', 'memory', _pinned([*sizes, *sizes, *matrices]))


def _muons(model: Model, job: Job) -> Iterable[Row]:
    """What a trainer computes Muon's updates with, see steps/assisted.py."""
    where = 'card' if job.on_card else 'memory'
    found = assisting(model, job.ranks, job.is_sharded, job.is_inside)
    for what, size in found.items():
        yield Row('trainer', what, where, size)
    if job.on_card and job.is_sharded:
        parts = [-(-elements // job.ranks) * model.width for elements in model.assisted]
        yield Row('trainer', "page-locked gradients and updates of Muon's matrices", 'memory', _pinned([*parts, *parts]))
    if model.assisted:
        ahead = min(_MOMENTA, sum(model.assisted) * model.width // job.ranks)
        # Momenta are gone before there are updates.
        later = 0 if job.on_card else sum(found.values()) - _WIDTH * sum(model.assisted) // job.ranks - found.get(_GRADIENTS, 0)
        yield Row('trainer', 'momenta pulled ahead', 'memory', max(0, ahead - later))


def assisting(model: Model, ranks: int, is_sharded: bool, is_inside: bool) -> dict[str, int]:
    """Returns bytes where a rank computes Muon's updates, by what they are."""
    if not model.assisted:
        return {}
    total, largest = sum(model.assisted), max(model.assisted)
    # Elements of a wave's matrices: of them all, of those that the rank owns, and of its parts.
    counted = 2 / ranks if is_sharded else 1 + 1 / ranks
    wave = max(largest, min(total, int(_WAVE_BYTES / _WIDTH / counted)))
    owned = wave // ranks
    mine, share = (owned, total // ranks) if is_sharded else (wave, total)
    sent = 2 * (mine - mine // ranks) if is_sharded else mine - owned  # directions to owners, updates from them
    # Updates of earlier waves: all, if the server reads them where they are, or else of one.
    before = share - mine if is_inside else min(share - mine, mine)
    found = {"directions and updates of Muon's matrices": max(_WIDTH * (owned + sent), mine * model.width) + before * model.width,
             'the iteration on a matrix': _ITERATION * _WIDTH * largest}
    if is_sharded:
        found[_GRADIENTS] = share * model.width
    return found


def _whole(model: Model, job: Job) -> Iterable[Row]:
    """A trainer that has the parameters, in a step."""
    yield from _own(model, job)
    yield from _muons(model, job)
    if job.ranks > 1:
        largest = max(model.server_units.values()) * model.width
        pulled = min(max(_IN_FLIGHT, largest), model.elements * model.width)
        # Once the last matrix is computed.
        later = 0 if job.on_card or not model.assisted else _ITERATION * _WIDTH * max(model.assisted)
        yield Row('trainer', 'units pulled', 'memory', max(0, pulled - later))
    if not job.is_inside:
        yield from _shared(job)


def _shared(job: Job, on_their_way: int = _IN_FLIGHT) -> Iterable[Row]:
    yield Row('trainer', 'memory shared with servers of this host', 'memory', on_their_way * max(job.servers, 1))


def in_use(model: Model, ranks: int, is_coded: bool = False) -> dict[str, int]:
    """Returns bytes where a rank of shard() computes, by what they are."""
    root = Unit('', 0, 0, ())
    others = []
    for unit in model.units:
        if unit.name:
            others.append(unit)
        else:
            root = unit
    # Between ranks a gather and a reduction of each size, of which there may be one unit alone.
    flats = collections.Counter(unit.elements for unit in others if ranks > 1)
    gathers = (root.elements + sum(size * min(2, count) for size, count in flats.items())) * model.width
    if is_coded:  # gathers and reductions are of other sizes
        flat = root.elements + sum(flats)
        gathers = _coded(flat) + flat * model.width
    return {'the root, and its gradients': (root.elements + root.trained) * model.width,
            'a unit, and its gradients': max((unit.elements + unit.trained for unit in others), default=0) * model.width,
            _GATHERS: gathers}


def _coded(elements: int) -> int:
    """Returns the bytes of elements in blocks of 8 bits."""
    return -(-elements // BLOCK) * BLOCK_BYTES


def _sharded(model: Model, job: Job, assists: bool = True) -> Iterable[Row]:
    """A trainer of shard(), in a step. assists: while it computes Muon's updates; else in backward. A card's rows are of both: torch keeps
    what was free."""
    where = 'card' if job.on_card else 'memory'
    muons = list(_muons(model, job))
    both = job.on_card or not muons
    for what, size in in_use(model, job.ranks, job.is_coded).items():
        if both or not assists or what == _GATHERS:
            yield Row('trainer', what, where, size)
    yield from (row for row in muons if both or assists or row.what == _GRADIENTS)
    yield Row('trainer', 'parts of units, pulled ahead or pushed', 'memory', _parts(model, job))
    if not job.is_inside:
        yield from _shared(job)


def _starting(model: Model, job: Job) -> Iterable[Row]:
    """A trainer until the job is open."""
    if job.is_sharded:
        if model.needs_values:
            yield Row('trainer', "the model's values, until the job is open", 'memory', model.elements * model.width)
        if job.on_card:  # of later, since the card has its largest moment then
            yield from (row for row in _sharded(model, job) if row.place == 'card')
    else:
        yield from _own(model, job)
    if not job.lends:
        yield Row('trainer', 'first values on their way', 'memory', min(_VALUES, model.trained * _VALUE_BYTES))
    if not job.is_inside:
        yield from _shared(job, _VALUES)


def _parts(model: Model, job: Job) -> int:
    """Buffers for this rank's parts. A buffer serves parts of one size, so there are as many as were in use at one time."""
    gathers: collections.Counter[int] = collections.Counter()
    for unit in model.units:
        elements = -(-unit.elements // job.ranks)
        size = held(_coded(elements) if job.is_coded else elements * model.width, pinned=job.on_card)
        # The root stays from forward to backward. Experts are pulled ahead for backward alone.
        gathers[size] += 2 if unit.name and not unit.is_expert else 1
    return sum(size * min(job.prefetch_bytes // size + 1, count) for size, count in gathers.items())


def totals(found: Iterable[Row], place: str) -> dict[str, int]:
    """Returns bytes by process."""
    sums: dict[str, int] = {}
    for row in found:
        if row.place == place:
            sums[row.process] = sums.get(row.process, 0) + row.size
    return sums


def on_a_host(found: Iterable[Row], ranks: int) -> int:
    """Returns the memory of all processes, if they are on one host. Shared memory counts once."""
    own = [row for row in found if row.place == 'memory' and not row.is_shared]
    return sum(row.size * (ranks if row.process == 'trainer' else 1) for row in own)
