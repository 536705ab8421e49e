"""One rank as torchrun --max-restarts starts it, for test_elastic.py: elastic_main.py plain|shard CRASHES. Where it is to crash, rank 1
raises in step 2 of the first attempt, and rank 0 is killed in step 4 of the second."""
import os
import signal
import sys

import torch
import torch.distributed as dist
from scripts import batches, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel

import ballast.torch as bt

STEPS = 6
way, crashes = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group('gloo')
rank, attempt = dist.get_rank(), int(os.environ['TORCHELASTIC_RESTART_COUNT'])
if os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True':
    # Gloo connects with the first collective, and reads an address of the earlier attempt where the other rank has not told its own yet.
    store = dist.distributed_c10d._get_default_store()
    store.set(f'here/{attempt}/{rank}', '')
    store.wait([f'here/{attempt}/{1 - rank}'])
torch.manual_seed(0)
model = bt.shard(mlp()) if way == 'shard' else DistributedDataParallel(mlp())
optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, max_norm=1.0, directory='state', dram='64MiB', nvme='512MiB', threads=1,
                     resume='auto', step_timeout=60.0)
start = optimizer.resume().step
each, losses = list(batches(2 * STEPS)), {}
for step in range(start, STEPS):
    loss = loss_of(model, each[2 * step + rank])
    loss.backward()
    if crashes and (attempt, step, rank) == (0, 2, 1):
        raise ValueError('on purpose')
    if crashes and (attempt, step, rank) == (1, 4, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    losses[step] = loss.item()
torch.save(losses, f'{rank}.pt')
optimizer.close()
dist.destroy_process_group()
