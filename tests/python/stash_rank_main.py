"""One rank of test_stash_ranks.py: training under FSDP2, and under tensor parallelism, with and without a stash."""
import contextlib
import copy
import sys
import time

import torch
import torch.distributed as dist
from blocks import Stack, batch_of, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import ballast.torch as bt

WIDTH = 128
torch.set_num_threads(1)
dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (dist.get_world_size(),))
x = batch_of(WIDTH, seed=dist.get_rank())


def same(mine, theirs):
    assert mine[0] == theirs[0], (mine, theirs)
    for a, b in zip(mine[1], theirs[1]):
        assert torch.equal(local(a), local(b))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded(recompute):
    torch.manual_seed(0)
    model = Stack(WIDTH, depth=4, recompute=recompute)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def moved_by(kept):
    for _ in range(12000):
        stats = kept.stats()
        if stats['nvme'] == 0:  # a part on its way to the disk goes when it is there
            return stats['moved'], stats['weights']
        time.sleep(0.005)
    raise AssertionError(stats)


for recompute in (None, False, True):
    inputs = x.clone().requires_grad_(recompute is True)
    expected = train(sharded(recompute), inputs, contextlib.nullcontext())
    model = sharded(recompute)
    kept = bt.stash(model, nvme='1GiB', directory=sys.argv[1])
    same(train(model, inputs, kept), expected)
    whole = bt.stash(nvme='1GiB', directory=sys.argv[1])
    torch.manual_seed(0)
    train(Stack(WIDTH, depth=4, recompute=recompute), inputs, whole)
    # Parameters that were gathered stay: as many bytes go as without FSDP2.
    assert moved_by(kept) == moved_by(whole), (recompute, kept.stats(), whole.stats())
    assert recompute is not None or kept.stats()['weights'] > 3 * 4 * 4 * WIDTH * 3 * WIDTH * 4


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def parallel():
    """Activations are DTensors here."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Pair() for _ in range(3)))
    for pair in model:
        parallelize_module(pair, mesh, {
            'norm': SequenceParallel(), 'up': ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            'down': RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=False)})
    return model


def loss_and_gradients(around):
    model = parallel()
    whole = DTensor.from_local(batch_of(WIDTH), mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
    with around:
        loss = model(whole).square().mean()
    loss.backward()
    return [local(loss).detach()], [local(p.grad) for p in model.parameters()]


expected = loss_and_gradients(contextlib.nullcontext())
kept = bt.stash(nvme='1GiB', directory=sys.argv[1])
same(loss_and_gradients(kept), copy.copy(expected))
assert moved_by(kept)[0] > 3 * 4 * 8 * 64 * WIDTH * 4 // 2
print('same bits')
dist.destroy_process_group()
