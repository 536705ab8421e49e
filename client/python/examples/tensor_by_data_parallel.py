"""Tensor parallelism by FSDP2, 2 x 2: within a pair of ranks each has half of every attention and MLP, whose rows the pairs share out.

Usage: torchrun --nproc-per-node 4 tensor_by_data_parallel.py [STEPS]. The same command goes on where it was; so does another division of
the ranks, since the job knows parameters by their names."""
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import batch, loss_of, on_meta

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (dist.get_world_size() // 2, 2), mesh_dim_names=('data', 'tensor'))
model = on_meta()
for block in model.blocks:
    columns = {name: ColwiseParallel() for name in ('query', 'key', 'value', 'mlp.up')}
    parallelize_module(block, mesh['tensor'], columns | {'out': RowwiseParallel(), 'mlp.down': RowwiseParallel()})
ballast.torch.shard(model, mesh['data'])
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='tensor_by_data_parallel_state', dram='256MiB',
                                nvme='1GiB', resume='auto')
start, _ = optimizer.resume()
for step in range(start, steps):
    tokens = batch(step, mesh.get_local_rank('data'))
    optimizer.zero_grad()
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    if step % 10 == 9 and dist.get_rank() == 0:
        print(f'step {step + 1}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm:.3f}', flush=True)
if dist.get_rank() == 0:
    print(f'{steps} steps done')
dist.barrier()
optimizer.close()
dist.destroy_process_group()
