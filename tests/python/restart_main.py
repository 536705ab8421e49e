"""One rank of a group that goes on with a replacement for a rank that died, for test_elastic.py: restart_main.py plain|shard RANK ATTEMPT
PORT PORT, an attempt of 1 for the replacement. PORT: of each attempt's store."""
import contextlib
import os
import sys

import torch
import torch.distributed as dist
from scripts import batches, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel

import ballast.torch as bt

STEPS = 6
LATE_ERROR = 'expected an error of the group whose rank 1 has died'


def run(way, rank, attempt, port):
    store = dist.TCPStore('127.0.0.1', port, is_master=False)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = bt.shard(mlp()) if way == 'shard' else DistributedDataParallel(mlp())
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, resume='auto', step_timeout=120.0, open_timeout=120.0)
    each = list(batches(2 * STEPS))
    start = optimizer.resume().step
    for step in range(start, STEPS):
        loss_of(model, each[2 * step + rank]).backward()
        if (attempt, step, rank) == (0, 3, 1):
            os._exit(9)
        optimizer.step()
        optimizer.zero_grad()
    with bt.gathered(model) if way == 'shard' else contextlib.nullcontext():
        values = [p.full_tensor() if hasattr(p, 'full_tensor') else p.detach() for p in model.parameters()]
    torch.save((start, values), f'{rank}.pt')
    optimizer.close()


if __name__ == '__main__':
    way, (rank, attempt, *ports) = sys.argv[1], map(int, sys.argv[2:])
    torch.set_num_threads(1)
    if attempt == 0:
        try:
            run(way, rank, 0, ports[0])
        except RuntimeError as error:
            print(f'{type(error).__name__}: {error}', flush=True)
        else:
            raise AssertionError(LATE_ERROR)
        dist.destroy_process_group()
    run(way, rank, 1, ports[1])
    dist.destroy_process_group()
