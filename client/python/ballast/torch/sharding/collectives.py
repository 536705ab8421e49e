"""How units go between ranks: gathers that name the ranks that do not come, and ZeRO++'s gathers and reductions in 8 bits and its second
partition of units within a node.

Source: Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training (2023): qwZ, qgZ, hpZ."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ballast.errors import Error
from ballast.torch.agreement import gathers
from ballast.torch.ranks import groups
from ballast.torch.sharding.unit import Unit

# How many elements share a scale: 4 bytes for this many bytes of values.
BLOCK = 64
_MOST = 127
# Their names since torch 2.13, and before.
_all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
# A rank that has waited this long in a gather tells the others.
_SAY_SECONDS = 2.0
# The smallest scale of a block. Elements below it may be off by half of it.
_TINY = torch.finfo(torch.float32).tiny


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 [blocks, BLOCK] and scales f32 [blocks, 1] for values [n], padded with zeros. An element comes back with an error of at
    most 1/254 of its block's largest magnitude, or 6e-39. A block with an element that is not finite gets the scale NaN, and comes back as
    NaN."""
    blocks = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / _MOST).clamp_min(_TINY)
    finite = scales.isfinite()
    whole = torch.where(finite, blocks / scales, 0.0).round_().clamp_(-_MOST, _MOST).to(torch.int8)
    return whole, torch.where(finite, scales, float('nan'))


def restored(whole: torch.Tensor, scales: torch.Tensor, length: int) -> torch.Tensor:
    """Returns f32 [length]: the values that quantized() was given, with its error."""
    most = torch.finfo(torch.float32).max  # which rounding of a scale may pass
    return (whole * scales).clamp_(-most, most).view(-1)[:length]


class _Wire:
    """Counts the bytes that this rank has received."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates FSDP2's buffers for the unit's collectives. A rank's part of the reduced gradients stays in one until it is pushed."""
        if torch.device(device).type != 'cpu':
            try:
                return torch.empty(*size, dtype=dtype, device=device)
            except torch.cuda.OutOfMemoryError as error:
                raise Error(f"a gather or reduction of unit '{self._unit.name}' needs {math.prod(size) * dtype.itemsize >> 20} MiB on "
                            f'{device}, which are not free. Use smaller units: ballast.torch.TiledLinear for a layer that is large by '
                            f'itself, shard(model, units=[...]) for others. {error}', 'BUDGET') from error
        with torch.inference_mode(False):
            return self._unit.model.memory.take(math.prod(size), dtype).view(*size)

    def _count(self, way: str, group: Any, *sent: torch.Tensor) -> None:
        """sent: what each rank sends to each other rank."""
        self._unit.model.wire[way] += (group.size() - 1) * sum(tensor.numel() * tensor.element_size() for tensor in sent)

    def _check(self, tensor: torch.Tensor) -> None:
        if not tensor.dtype.is_floating_point:
            raise Error(f"unit '{self._unit.name}' has parameters of several dtypes, which FSDP2 gathers as bytes. For 8 bits all need "
                        'one dtype: use a MixedPrecisionPolicy that gives them one', 'UNSUPPORTED')


class Gather(_Wire):
    """A unit's all-gather. Threads and streams: those of FSDP2's call; the result is there, in the stream, as the call returns.

    Errors: RANK_MISSING, with the ranks' numbers, if ranks do not come within the job's step_timeout, on CPUs. NCCL has its own
    watchdog."""

    def __init__(self, unit: Unit, is_quantized: bool = False, node: Any = None) -> None:
        """node: the group of ranks that keep a second partition together. None: there is no second partition."""
        super().__init__(unit)
        self._is_quantized, self._node = is_quantized, node
        self._second: torch.Tensor | None = None  # this rank's part of the whole unit, as it was gathered
        self._at: object = None  # Sharded.now() of that

    @property
    def has_second(self) -> bool:
        """The next gather is within the node and needs nothing from the servers, since the job's version has not changed since the last
        one."""
        return self._second is not None and self._at == self._unit.model.now()

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> None:
        gathers.note(f'model {self._unit.model.number}: {self._unit.name}', group)
        if self.has_second and self._second is not None:
            self._gather_within(output_tensor, self._second)
            return
        self._second = None
        self._gather(output_tensor, input_tensor, group)
        if self._node is not None:
            self._second, self._at = self._mine(output_tensor).clone(), self._unit.model.now()

    def _gather(self, output: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        brought = self._unit.brought
        if brought is not None:
            self._gather_coded(output, mine, brought, group)
            return
        if not self._is_quantized:
            self._together('values', output, mine, group)
            self._count('gather_bytes', group, mine)
            return
        self._check(mine)
        sent = quantized(mine)
        whole, scales = (tensor.new_empty(group.size() * len(tensor), *tensor.shape[1:]) for tensor in sent)
        for way, to, tensor in zip(('values', 'scales'), (whole, scales), sent):
            self._together(way, to, tensor, group)
        self._count('gather_bytes', group, *sent)
        ranks = output.view(group.size(), -1)
        for rank, blocks, its in zip(ranks, whole.chunk(group.size()), scales.chunk(group.size())):
            rank.copy_(restored(blocks, its, rank.numel()))

    def _gather_coded(self, output: torch.Tensor, mine: torch.Tensor, brought: torch.Tensor, group: Any) -> None:
        """Blocks go between ranks as they came from the servers. brought: this rank's. mine: nothing that counts."""
        self._check(mine)
        if brought.device.type != 'cpu':
            brought.record_stream(torch.cuda.current_stream())  # it came on another stream
        came = brought.new_empty(group.size() * len(brought))
        self._together('values', came, brought, group)
        self._count('gather_bytes', group, brought)
        self._unit.decode(came.view(group.size(), -1), output.view(group.size(), -1))

    def _together(self, what: str, to: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        if mine.device.type != 'cpu':
            _all_gather(to, mine, group=group)
            return
        work, said = _all_gather(to, mine, group=group, async_op=True), False
        until = time.monotonic() + self._unit.model.timeout
        while True:
            left = until - time.monotonic()
            try:
                work.wait(datetime.timedelta(seconds=max(0.001, min(left, _SAY_SECONDS))))
                return
            except RuntimeError as error:
                if work.is_completed():  # by now, perhaps
                    try:
                        work.wait()
                        return
                    except RuntimeError as broken:
                        raise self._missing(what, group, broken) from broken
                if left <= 0:
                    raise self._missing(what, group, error) from error
            if not said:
                self._store(what).set(str(groups.world().rank), b'')
                said = True

    def _store(self, what: str) -> groups.Store:
        return self._unit.model.group.store(f'gather/{self._unit.model.number}/{self._unit.name}/{self._unit.gathers}/{what}')

    def _missing(self, what: str, group: Any, error: RuntimeError) -> Error:
        """Returns the error that names the missing ranks. Ranks that came have said so, or will soon: a connection may have broken before
        its rank waited."""
        store = self._store(what)
        store.set(str(groups.world().rank), b'')
        missing, until = [], time.monotonic() + 2 * _SAY_SECONDS
        for rank in dist.get_process_group_ranks(group):
            try:
                store.get(str(rank), max(0.01, until - time.monotonic()))
            except RuntimeError:  # dist.DistStoreError
                missing.append(rank)
        who = f'ranks {missing} did not come to it' if missing else 'all ranks came to it'
        return Error(f"a gather of unit '{self._unit.name}' ended on rank {groups.world().rank} by a broken connection or after "
                     f'{self._unit.model.timeout:g} s (step_timeout), and {who}. All ranks must run the same passes over the same units. '
                     f'Start all ranks again ({str(error).splitlines()[0]})', 'RANK_MISSING')

    def _share(self, output: torch.Tensor) -> int:
        return -(-output.numel() // int(self._node.size()))

    def _mine(self, output: torch.Tensor) -> torch.Tensor:
        share = self._share(output)
        begin = min(output.numel(), share * self._node.rank())
        mine = output[begin:begin + share]
        return torch.nn.functional.pad(mine, (0, share - mine.numel()))

    def _gather_within(self, output: torch.Tensor, second: torch.Tensor) -> None:
        whole = output.new_empty(self._share(output) * self._node.size())
        self._together('node', whole, second, self._node)
        self._count('node_bytes', self._node, second)
        output.copy_(whole[:output.numel()])


class Reduce(_Wire):
    """A unit's reduce-scatter. Threads: as Gather."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class QuantizedReduce(_Wire):
    """A unit's reduce-scatter. Gradients go once, in 8 bits, and are summed in float32. The error of each rank's part is at most the sum
    over ranks of 1/254 of their blocks' largest magnitudes; for a mean, divided by the number of ranks. Threads: as Gather."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Error(f"shard(reduce='q8'): unit '{self._unit.name}' reduces by {op}; expected a sum or a mean. Leave out "
                        "set_gradient_divide_factor(), or reduce='q8'", 'UNSUPPORTED')
        self._check(input_tensor)
        ranks, length = group.size(), output_tensor.numel()
        parts = [quantized(part) for part in input_tensor.view(ranks, length)]
        sent = [torch.cat(tensors) for tensors in zip(*parts)]
        came = [torch.empty_like(tensor) for tensor in sent]
        for to, tensor in zip(came, sent):
            dist.all_to_all_single(to, tensor, group=group)
        self._count('reduce_bytes', group, *parts[0])
        total = torch.zeros(length, dtype=torch.float32, device=input_tensor.device)
        for whole, scales in zip(*(tensor.chunk(ranks) for tensor in came)):
            total += restored(whole, scales, length)
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)
