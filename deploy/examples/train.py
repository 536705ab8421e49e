"""The trainer of the examples beside: DDP over the ranks that RANK and WORLD_SIZE name, state on the servers of BALLAST_SERVERS.

Usage: train.py [STEPS]     Run again, it goes on from its last step. JOB names the job on the servers (default: example).
"""
import hashlib
import os
import sys

import ballast.torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
dist.init_process_group('gloo')
rank = dist.get_rank()

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
model = DistributedDataParallel(net)
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-3, max_norm=1.0, name=os.environ.get('JOB', 'example'), resume='auto')
start, _ = optimizer.resume()
for step in range(start, steps):
    data = torch.Generator().manual_seed(step * dist.get_world_size() + rank)  # what a step reads depends on its number alone
    inputs = torch.randn(32, 256, generator=data)
    loss = (model(inputs) - inputs.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 10 == 9:
        print(f'step {step + 1}: loss {loss.item():.4f}', flush=True)

if rank == 0:
    bits = hashlib.sha256(b''.join(parameter.detach().numpy().tobytes() for parameter in net.parameters())).hexdigest()
    print(f'done after step {steps}; parameters {bits}', flush=True)
dist.barrier()
optimizer.close()
dist.destroy_process_group()
