"""A rank of test_weights_ranks.py: weights_main.py SCRIPT,... FOLDER. Each script returns what the test compares. FOLDER/in is a checkpoint
of shard_main's model, FOLDER/other another one of it."""
import shard_main
import torch
import torch.distributed as dist
from shard_main import batches, loss_of, made, on_meta, ours, script, told, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ballast.torch as bt


@script
def shares():
    """Bytes that this rank read, and losses beside those of a model with the same values."""
    model, twin = bt.shard(on_meta(), weights='in'), bt.shard(made())
    optimizer, other = ours(model), ours(twin, name='twin')
    optimizer.resume()
    read = optimizer.stats()['weights_bytes']
    if dist.get_rank() == 0:
        bt.save_weights(model, 'saved')
    dist.barrier()
    losses = train(model, optimizer, 5)[0], train(twin, other, 5)[0]
    if dist.get_rank() == 0:
        bt.save_weights(model, 'trained', dtype=torch.float32)
    dist.barrier()
    with bt.gathered(model):
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    for each in (optimizer, other):
        each.close()
    return read, losses, whole


@script
def replicas():
    """Bytes that this rank read where both ranks have all parameters, and what is told if they read different checkpoints."""
    mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('replica', 'shard'))
    model = bt.shard(on_meta(), mesh, weights='in')
    optimizer = ours(model, name='replicas')
    optimizer.resume()
    read = optimizer.stats()['weights_bytes']
    loss_of(model, next(batches(1)))
    optimizer.close()
    differs = ours(bt.shard(on_meta(), mesh, weights=('in', 'other')[dist.get_rank()]), name='differs')
    said = told(differs.resume)
    differs.close()
    return read, said


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(x))


@script
def columns():
    """Parts of tensor parallelism, by rows and by columns."""
    mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('data', 'tensor'))
    with torch.device('meta'):
        model = Pair()
    parallelize_module(model, mesh['tensor'], {'up': ColwiseParallel(), 'down': RowwiseParallel()})
    bt.shard(model, mesh['data'], weights='pair.safetensors')
    optimizer = ours(model, name='columns')
    optimizer.resume()
    with bt.gathered(model):
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer.close()
    return whole


if __name__ == '__main__':
    shard_main.main()
