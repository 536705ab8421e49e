"""A mixture of experts whose experts live on the servers, over ranks 2 x 2: each rank of a pair has half of the experts, whose rows the
pairs share out; dense layers are sharded over all ranks. A rank pulls only those of its experts that tokens reach.

Usage: torchrun --nproc-per-node 4 experts.py [STEPS]. The same command goes on where it was."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer import WIDTH, batch, loss_of, on_meta

import ballast.torch

EXPERTS = 8


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to the expert that the router likes best, on either rank of the pair, and comes back."""

    def __init__(self, group):
        super().__init__()
        self.router, self.group, self.here = nn.Linear(WIDTH, EXPERTS), group, EXPERTS // group.size()
        first = group.rank() * self.here
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(first, first + self.here)})  # names of their own on each rank

    def forward(self, x):
        tokens, ranks = x.flatten(0, 1), self.group.size()
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order, counts = expert.argsort(), expert.bincount(minlength=EXPERTS)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=self.group)
        sent, received = counts.view(ranks, -1), came.view(ranks, -1)  # by rank, and expert there
        splits = sent.sum(1).tolist(), received.sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], splits[1], splits[0], self.group)
        by_expert = torch.arange(self.here).repeat(ranks).repeat_interleave(came).argsort()
        done = self.compute(here[by_expert], received.sum(0))[by_expert.argsort()]
        back = all_to_all_single_autograd(done, splits[0], splits[1], self.group)
        return (weight[:, None] * back[order.argsort()]).view_as(x)

    def compute(self, tokens, counts):
        """tokens [sum(counts), WIDTH]: counts[0] for the rank's first expert, and so on. Experts without tokens on all ranks that share
        their rows stay out."""
        experts, parts = list(self.experts.values()), tokens.split(counts.tolist())
        return torch.cat([tokens[:0], *(experts[i](parts[i]) for i in ballast.torch.reached_experts(experts, counts))])


def shard_experts(experts, mesh):
    for expert in experts.values():
        fully_shard(expert, mesh=mesh['data'])
        # An expert has tokens of all ranks: its gradient is a mean over all of them, as a dense layer's. Gloo can only sum.
        expert.set_gradient_divide_factor(dist.get_world_size())
        expert.set_force_sum_reduction_for_comms(True)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
mesh = init_device_mesh('cpu', (dist.get_world_size() // 2, 2), mesh_dim_names=('data', 'expert'))
model = on_meta()
for block in model.blocks:
    with torch.device('meta'):
        block.mlp = Mixture(mesh.get_group('expert'))
    shard_experts(block.mlp.experts, mesh)
    fully_shard(block)
ballast.torch.shard(fully_shard(model))
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='experts_state', dram='256MiB', nvme='1GiB',
                                resume='auto')
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
    print(f'{steps} steps done; pulled {optimizer.stats()["unit_pull_bytes"] / max(1, steps - start) / 1024:.0f} KiB a step')
dist.barrier()
optimizer.close()
dist.destroy_process_group()
