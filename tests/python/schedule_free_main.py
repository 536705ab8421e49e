"""One of two FSDP2 ranks of a schedule-free run: schedule_free_main.py FOLDER. Rank 0 writes y and x to FOLDER/values.pt."""
import os
import sys

import torch
import torch.distributed as dist
from schedule_free import ARGUMENTS
from scripts import mlp, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ballast.torch as bt

dist.init_process_group('gloo')
torch.manual_seed(1)
model = mlp()
fully_shard(model, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))
optimizer = bt.AdamWScheduleFree(model.named_parameters(), **ARGUMENTS, dram='128MiB', threads=1)
train(model, optimizer, steps=5)
optimizer.eval()
x = [p.full_tensor() for p in model.parameters()]
optimizer.train()
train(model, optimizer, steps=2)
y = [p.full_tensor() for p in model.parameters()]
if dist.get_rank() == 0:
    torch.save((x, y), os.path.join(sys.argv[1], 'values.pt'))
optimizer.close()
dist.destroy_process_group()
