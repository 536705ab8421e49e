"""One rank of test_shard*.py: shard_main.py SCRIPT[,SCRIPT...] FOLDER, as rank_main.py."""
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ballast.torch as bt

# Gradients of the keys' bias are nothing but rounding: eps keeps an update of it small.
ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1, 'eps': 1e-4}
VOCABULARY = 17
SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.down = nn.Linear(2 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """With a tied head. Rows of most parameters do not divide by two ranks."""

    def __init__(self, width=6, blocks=3, recompute=None, tied=True, rows=VOCABULARY):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute  # None, or use_reentrant

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def made(**more):
    torch.manual_seed(3)
    return Net(**more)


def plain(model, **policy):
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return model


def ours(model, **more):
    return bt.AdamW(model.named_parameters(), **{**ARGUMENTS, 'name': sys._getframe(1).f_code.co_name, 'dram': '128MiB', 'threads': 2, **more})


def theirs(parameters):
    return torch.optim.AdamW(parameters, **ARGUMENTS)


def batches(count):
    """Of this rank."""
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(count):
        yield torch.randint(16, (4, 8), generator=generator)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients_of(model):
    """None: it went to the servers in backward, or there is none."""
    local = [None if p.grad is None else p.grad.to_local() for p in model.parameters()]
    return [None if each is None or hasattr(each, 'of') else each.clone() for each in local]


def train(model, optimizer, steps=30, micro=1, sync_all=False):
    """Losses, and gradients of the first two steps."""
    losses, gradients = [], []
    for i, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        for k, tokens in enumerate(batch.chunk(micro)):
            model.set_requires_gradient_sync(sync_all or k == micro - 1)
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.detach())
        if i < 2:
            gradients.append(gradients_of(model))
        optimizer.step()
    return torch.stack(losses), gradients


def whole(model):
    return [p.detach().full_tensor().float() for p in model.parameters()]


def whole_of(model):
    with bt.gathered(model):
        return [p.detach().clone().float() for p in model.parameters()]


def both(name, make=made, policy=None, push_early=False, steps=30, backwards=1, **more):
    """Plain FSDP2 with torch's optimizer, and shard() with ours: (losses, gradients of two steps, parameters) of each, and stats."""
    policy = policy or {}
    twin = plain(make(), **policy)
    results = [[*train(twin, theirs([p for p in twin.parameters() if p.requires_grad]), steps, **more), whole(twin)]]
    model = bt.shard(make(), push_early=push_early, backwards=backwards, **policy)
    optimizer = ours(model, name=name)
    results.append([*train(model, optimizer, steps, **more), whole_of(model)])
    stats = optimizer.stats()
    optimizer.close()
    return results, stats


@script
def uneven():
    return both('uneven')


@script
def even():
    return both('even', make=lambda: made(width=8, tied=False, rows=16))


@script
def recompute_reentrant():
    return both('recompute_reentrant', make=lambda: made(recompute=True))


@script
def recompute():
    return both('recompute', make=lambda: made(recompute=False))


@script
def accumulation():
    return both('accumulation', micro=2)


@script
def accumulation_synced():
    return both('accumulation_synced', micro=2, sync_all=True)


@script
def no_reshard():
    return both('no_reshard', policy={'reshard_after_forward': False})


@script
def bf16():
    return both('bf16', policy={'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)})


@script
def early():
    return both('early', push_early=True)


@script
def early_accumulation():
    return both('early_accumulation', push_early=True, micro=2)


@script
def early_synced():
    return both('early_synced', push_early=True, micro=2, sync_all=True, backwards=2)


@script
def frozen():
    def make():
        model = made()
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        model.blocks[2].norm.requires_grad_(False)
        return model
    return both('frozen', make=make, push_early=True)


if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    for name in sys.argv[1].split(','):
        torch.save(SCRIPTS[name](), f'{sys.argv[2]}/{name}-{dist.get_rank()}.pt')
        dist.barrier()
    dist.destroy_process_group()
