"""An FSDP2 loop whose parameters live on the state servers: no rank ever holds the model, and the same command goes on where it was.

Usage: torchrun --nproc-per-node 2 fsdp2_shard.py [STEPS]. The job is in ./fsdp2_shard_state, the last model in fsdp2_shard.pt."""
import sys

import torch
import torch.distributed as dist
from transformer import batch, loss_of, on_meta

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
model = ballast.torch.shard(on_meta())  # was: fully_shard() of each block, and of the model
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='fsdp2_shard_state', dram='256MiB',
                                nvme='1GiB', resume='auto')
start, _ = optimizer.resume()
for step in range(start, steps):
    tokens = batch(step, dist.get_rank())
    optimizer.zero_grad()
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    if step % 10 == 9 and dist.get_rank() == 0:
        print(f'step {step + 1}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm:.3f}', flush=True)

if dist.get_rank() == 0:
    with ballast.torch.gathered(model):  # whole parameters, of one rank alone
        torch.save(model.state_dict(), 'fsdp2_shard.pt')
    print(f'{steps} steps done')
dist.barrier()  # the first rank's close() ends the server that the others read from
optimizer.close()
dist.destroy_process_group()
