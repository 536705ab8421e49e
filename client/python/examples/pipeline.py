"""A pipeline of two stages by FSDP2 over two ranks each: every stage pulls its own layers, and all stages share one job.

Usage: torchrun --nproc-per-node 4 pipeline.py [STEPS]. The same command goes on where it was."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformer import BLOCKS, batch, loss_of, on_meta

import ballast.torch

STAGES, MICRO_BATCHES = 2, 4
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=('pipeline', 'data'))
stage, part = mesh.get_local_rank('pipeline'), mesh.get_local_rank('data')

model = on_meta()
# Layers of other stages pass on what comes; the stage's own keep their names, by which the job knows them.
for i in range(BLOCKS):
    if i * STAGES // BLOCKS != stage:
        model.blocks[i] = nn.Identity()
if stage > 0:
    model.embed = nn.Identity()
if stage < STAGES - 1:
    model.head = nn.Identity()
ballast.torch.shard(model, mesh['data'], reshard_after_forward=False)
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='pipeline_state', dram='256MiB', nvme='1GiB',
                                resume='auto')
start, _ = optimizer.resume()  # of all ranks, before the first pass: stages' passes do not begin together

# The loss divides by the micro-batches: gradients that have gone to the servers cannot be divided by the schedule.
schedule = Schedule1F1B(PipelineStage(model, stage, STAGES, torch.device('cpu'), group=mesh.get_group('pipeline')), MICRO_BATCHES,
                        lambda logits, target: loss_of(logits, target) / MICRO_BATCHES, scale_grads=False)
for step in range(start, steps):
    tokens = batch(step, part)
    optimizer.zero_grad()
    losses = []
    if stage == 0:
        schedule.step(tokens[:, :-1])
    else:
        schedule.step(target=tokens[:, 1:], losses=losses)
    optimizer.step()
    if step % 10 == 9 and dist.get_rank() == dist.get_world_size() - 1:
        print(f'step {step + 1}: loss {sum(losses).item():.4f}, gradient norm {optimizer.grad_norm:.3f}', flush=True)
if dist.get_rank() == 0:
    print(f'{steps} steps done')
dist.barrier()
optimizer.close()
dist.destroy_process_group()
