"""A mixture of experts: expert parallelism by FSDP2, 2 x 2. Each rank of a pair has half of the experts, whose rows the pairs share out;
dense layers are sharded over all ranks.

Usage: torchrun --nproc-per-node 4 experts.py [STEPS]. The same command goes on where it was."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformer import WIDTH, batch, loss_of, on_meta

import ballast.torch

EXPERTS = 4


class Experts(nn.Module):
    """An MLP for each expert; a rank of a pair has half of them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, WIDTH))

    def reset_parameters(self):
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, tokens, counts):
        """tokens [sum(counts), WIDTH]: counts[0] for the rank's first expert, and so on."""
        up, down = self.up.to_local(), self.down.to_local()
        return torch.cat([nn.functional.gelu(its @ up[i]) @ down[i] for i, its in enumerate(tokens.split(counts))])


class Mixture(nn.Module):
    """Each token goes to the expert that the router likes best, on either rank of the pair, and comes back."""

    def __init__(self, group):
        super().__init__()
        self.router, self.experts, self.group = nn.Linear(WIDTH, EXPERTS), Experts(), group

    def forward(self, x):
        tokens, ranks = x.flatten(0, 1), self.group.size()
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order, counts = expert.argsort(), expert.bincount(minlength=EXPERTS)
        came = torch.empty_like(counts)
        dist.all_to_all_single(came, counts, group=self.group)
        sent, received = counts.view(ranks, -1), came.view(ranks, -1)  # by rank, and expert there
        splits = sent.sum(1).tolist(), received.sum(1).tolist()
        here = all_to_all_single_autograd(tokens[order], splits[1], splits[0], self.group)
        by_expert = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(came).argsort()
        done = self.experts(here[by_expert], received.sum(0).tolist())[by_expert.argsort()]
        back = all_to_all_single_autograd(done, splits[0], splits[1], self.group)
        return (weight[:, None] * back[order.argsort()]).view_as(x)


def shard_experts(experts, mesh):
    for name, parameter in experts.named_parameters():
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter, mesh['expert'], [Shard(0)])))
    fully_shard(experts, mesh=mesh['data'], shard_placement_fn=lambda _: Shard(1))
    # An expert has tokens of all ranks: its gradient is a mean over all of them, as a dense layer's. Gloo can only sum.
    experts.set_gradient_divide_factor(dist.get_world_size())
    experts.set_force_sum_reduction_for_comms(True)


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
    print(f'{steps} steps done')
dist.barrier()
optimizer.close()
dist.destroy_process_group()
