"""One rank of test_f8.py: f8_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py."""
import os
import pathlib

import torch
import torch.distributed as dist
from shard_main import batches, hybrid_mesh, loss_of, made, main, ours, script, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ballast.torch as bt
from ballast.torch.sharding.coded import BLOCK

STEPS = 300 if os.environ.get('TEST_ROUNDS') == 'full' else 100
CONTEXT, WIDTH, BYTES = 8, 256, 128
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class BytesModel(nn.Module):
    """Tells the next byte of a text from the CONTEXT bytes before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def text():
    license = pathlib.Path(__file__).parents[2] / 'LICENSE'
    return torch.tensor([byte % BYTES for byte in license.read_bytes()])


def trained(name, **more):
    """The loss of each step on all ranks together, and stats."""
    torch.manual_seed(7)
    model = bt.shard(BytesModel(), mp_policy=BF16, **more)
    optimizer = ours(model, name=name, lr=1e-3)
    windows = text().unfold(0, CONTEXT + 1, 1)
    world = dist.get_world_size()
    generator, losses = torch.Generator().manual_seed(11), []
    for _ in range(STEPS):
        batch = windows[torch.randint(len(windows), (64,), generator=generator)].chunk(world)[dist.get_rank()]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).float(), batch[:, -1])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean)
    stats = optimizer.stats()
    dist.barrier()
    optimizer.close()
    return torch.stack(losses), stats


@script
def losses():
    return {'bf16': trained('bf16'), 'f8': trained('f8', working='f8')}


def blocks_of(master):
    """What a pass computes with, by torch's own conversions."""
    padded = nn.functional.pad(master.flatten(), (0, -master.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1, keepdim=True) * torch.tensor(1 / 448, dtype=torch.float32)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return ((padded * inverse).to(torch.float8_e4m3fn).float() * scales).flatten()[:master.numel()].view(master.shape)


def seen(make, steps=1, **policy):
    """Pairs of a parameter that a forward pass computes with, after steps, and what its master says; and whether gathered() has that."""
    model = bt.shard(make(), working='f8', **policy)
    optimizer = ours(model, name='seen')
    optimizer.resume()
    for tokens in batches(steps):
        loss_of(model, tokens).backward()
        optimizer.step()
    session, exact = optimizer.job.opened.session, {}
    for name, parameter in model.named_parameters():
        exact[name] = torch.empty(parameter.shape)
        session.read(name, 'master', exact[name].view(-1))
    pairs = {}

    def look(prefix, module, _):
        for name, parameter in module.named_parameters():
            whole = f'{prefix}{name}'
            if whole in exact:
                pairs[whole] = parameter.detach().clone(), exact[whole]
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, prefix=f'blocks.{i}.': look(prefix, module, args))
    model.register_forward_pre_hook(lambda module, args: look('', module.embed, args) or pairs.update(
        {'embed.weight': (module.embed.weight.detach().clone(), exact['embed.weight'])}))
    with torch.no_grad():
        model(next(batches(1)))
    with bt.gathered(model):
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    dist.barrier()
    optimizer.close()
    return {name: (came, blocks_of(master).to(came.dtype), torch.equal(master, whole[name])) for name, (came, master) in pairs.items()}


@script
def uneven():
    return seen(made)


@script
def initial():
    """Ranks' first values, which meet amid blocks."""
    return seen(made, steps=0)


@script
def uneven_bf16():
    return seen(made, mp_policy=BF16)


@script
def even():
    return seen(lambda: made(width=32, rows=64, blocks=2))


@script
def recomputed():
    return seen(lambda: made(recompute=True), reshard_after_forward=True)


@script
def hybrid():
    return seen(made, mesh=hybrid_mesh())


@script
def refused():
    said = {}
    said['name'] = told(lambda: bt.shard(made(), working='f4'))
    said['gather'] = told(lambda: bt.shard(made(), working='f8', gather='q8'))
    still = made()
    still.blocks[0].requires_grad_(False)
    said['frozen'] = told(lambda: bt.shard(still, working='f8'))
    mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('fsdp', 'tp'))
    model = made()
    for block in model.blocks:
        parallelize_module(block, mesh['tp'], {'up': ColwiseParallel(), 'down': RowwiseParallel()})
    said['beside TP'] = told(lambda: bt.shard(model, mesh=mesh['fsdp'], working='f8'))
    other, here = bt.shard(made(), working='f8'), nn.Parameter(torch.ones(3))
    optimizer = bt.AdamW([*other.named_parameters(), ('here', here)], name='mixed', dram='128MiB')
    said['mixed'] = told(lambda: other(next(batches(1))))
    optimizer.close()
    return said


@script
def frozen_state():
    """Losses with a part that wants no gradient and keeps its state."""
    model = made()
    model.blocks[0].requires_grad_(False)
    sharded = bt.shard(model, working='f8', frozen='state')
    optimizer = ours(sharded)
    found = []
    for tokens in batches(3):
        optimizer.zero_grad()
        loss = loss_of(sharded, tokens)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    dist.barrier()
    optimizer.close()
    return found


if __name__ == '__main__':
    main()
