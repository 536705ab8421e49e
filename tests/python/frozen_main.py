"""One rank of test_frozen.py: frozen_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py. LoRA on a frozen base."""
import os
import sys
import warnings

import torch
import torch.distributed as dist
from shard_main import main, plain, script, told
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

import ballast.torch as bt

BF16 = {'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


class Lora(nn.Module):
    """A linear layer whose weight is frozen, and an update of low rank that is trained."""

    def __init__(self, width, bias, rank=4):
        super().__init__()
        self.base = nn.Linear(width, width, bias=bias)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    def __init__(self, width=33, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList(Lora(width, bias) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(**more):
    torch.manual_seed(3)
    return Net(**more)


def ours(model, name, **more):
    arguments = {'lr': 1e-2, 'weight_decay': 0.1, 'max_norm': 1.0, 'name': name, 'dram': '128MiB', 'threads': 2, 'chunk_elements': 1 << 16}
    return bt.AdamW(model.named_parameters(), **{**arguments, **more})


def served(name, model, **more):
    return ours(model, name, dram=None, threads=None, durability='step', resume='auto', **more)


def batches(count, width):
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    for _ in range(count):
        yield torch.randn(8, width, generator=generator), torch.randint(3, (8,), generator=generator)


def train(model, optimizer, steps=8, first=0):
    """The losses. first: steps that others made before."""
    losses = []
    for x, y in list(batches(first + steps, model.blocks[0].base.in_features))[first:]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def whole_of(model):
    with bt.gathered(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    dist.barrier()  # the first rank's close() ends the server
    return values


def _alike(name, policy):
    """Plain FSDP2 whose base nothing quantizes, and shard() in each way: losses and parameters; all with our optimizer, whose bits are one
    for all. And of 'q8', beside plain FSDP2 on the values that the servers keep."""
    results = {}
    twin = plain(made(), **policy)
    optimizer = ours(twin, f'{name}-plain')
    results['plain'] = train(twin, optimizer), {n: p.detach().full_tensor() for n, p in twin.named_parameters()}
    optimizer.close()
    for frozen in ('working', 'state', 'q8'):
        model = bt.shard(made(), frozen=frozen, **policy)
        optimizer = ours(model, f'{name}-{frozen}')
        results[frozen] = train(model, optimizer), whole_of(model)
        optimizer.close()
    quantized = made()
    with torch.no_grad():
        for n, p in quantized.named_parameters():
            if not p.requires_grad:
                p.copy_(results['q8'][1][n])
    quantized = plain(quantized, **policy)
    optimizer = ours(quantized, f'{name}-quantized')
    results['quantized'] = train(quantized, optimizer), {n: p.detach().full_tensor() for n, p in quantized.named_parameters()}
    optimizer.close()
    return results, dict(made().named_parameters())


@script
def wide():
    return _alike('wide', {})


@script
def narrow():
    return _alike('narrow', BF16)


def _kept(name, frozen):
    model = bt.shard(made(width=1024, bias=False), frozen=frozen, **BF16)
    optimizer = served(name, model, chunk_elements=1 << 20)
    train(model, optimizer, 1)
    optimizer.close()
    return [(list(p.shape), p.requires_grad) for p in model.parameters()]


@script
def kept_working():
    return _kept('kept_working', 'working')


@script
def kept_q8():
    return _kept('kept_q8', 'q8')


def _part(name, frozen):
    """STEPS more steps of a job that outlives its trainers, and servers that are killed between: its losses and values."""
    steps, first = int(os.environ['STEPS']), int(os.environ['FIRST'])
    model = bt.shard(made(), frozen=frozen, **BF16)
    optimizer = served(name, model)
    assert optimizer.resume().step == first
    losses = train(model, optimizer, steps, first)
    values = whole_of(model)
    optimizer.close()
    return losses, values


@script
def part_working():
    return _part('part_working', 'working')


@script
def part_q8():
    return _part('part_q8', 'q8')


@script
def loaded():
    """The states of a job go into another one; and a model's state_dict brings another base to one that keeps it in 8 bits."""
    model = bt.shard(made(), **BF16)
    optimizer = ours(model, 'loaded')
    train(model, optimizer, 3)
    state, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    moments = optimizer.full_state_dict()
    later = train(model, optimizer, 3, first=3)
    values = whole_of(model)
    optimizer.close()

    other = bt.shard(made(), **BF16)
    other.load_state_dict(state)
    again = ours(other, 'loaded-again')
    again.load_state_dict(moments)
    follows = train(other, again, 3, first=3)
    follows_values = whole_of(other)
    again.close()

    quantized = bt.shard(made(), frozen='q8', **BF16)
    third = ours(quantized, 'loaded-q8')
    train(quantized, third, 1)
    generator = torch.Generator().manual_seed(9)
    base = {name: torch.randn(value.shape, generator=generator) for name, value in state.items() if '.base.' in name}
    quantized.load_state_dict({**state, **base})
    came = whole_of(quantized)
    third.close()
    has = [moments['param_groups'][0]['param_names'][i] for i in moments['state']]
    return (later, values), (follows, follows_values), has, base, came


class Longer(Net):
    def __init__(self):
        super().__init__()
        self.blocks.append(Lora(33, True))


@script
def only_trained():
    """The usual script of LoRA, whose optimizer gets what wants gradients: what it is told, and losses after each way that the error names,
    under the name of the job that was refused."""
    def optimizer_of(params):
        return bt.AdamW(params, lr=1e-2, name='only_trained', dram='128MiB', threads=2)

    def begun():
        model = bt.shard(made(), frozen='q8', **BF16)
        optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
        return model, optimizer, told(lambda: train(model, optimizer, 1))
    model, optimizer, said = begun()
    optimizer.add_param_group({'params': [p for p in model.parameters() if not p.requires_grad]})
    losses = [train(model, optimizer, 2)]
    optimizer.close()
    model, optimizer, _ = begun()
    one_at_a_time = told(lambda: optimizer_of(model.named_parameters()))
    optimizer.close()
    optimizer = optimizer_of(model.named_parameters())
    losses.append(train(model, optimizer, 2))
    optimizer.close()
    return said, one_at_a_time, losses


@script
def refused():
    said = {}
    model = bt.shard(made(), **BF16)
    optimizer = ours(model, 'refused')
    train(model, optimizer, 1)
    model.blocks[1].base.weight.requires_grad_(True)
    said['unfrozen'] = told(lambda: optimizer.step())
    model.blocks[1].base.weight.requires_grad_(False)
    optimizer.zero_grad()
    train(model, optimizer, 1, first=1)
    said['written'] = told(lambda: _write(model))
    said['moments'] = told(lambda: optimizer.load_state_dict(_with_moments(optimizer)))
    optimizer.close()
    for kind, value in (('inf', float('inf')), ('nan', float('nan')), ('large', 3.4e38)):
        model = made()
        with torch.no_grad():
            model.blocks[0].base.weight[5, 7] = value
        model = bt.shard(model, frozen='q8', **BF16)
        optimizer = ours(model, f'refused-{kind}')
        said[kind] = told(optimizer.resume)
        optimizer.close()
    kept = {'directory': f'{sys.argv[2]}/longer', 'nvme': '1GiB', 'resume': 'auto'}
    model = bt.shard(made(), **BF16)
    optimizer = ours(model, 'longer', **kept)
    train(model, optimizer, 1)
    optimizer.close()
    model = bt.shard(Longer(), **BF16)
    optimizer = ours(model, 'longer', **kept)
    said['longer'] = told(optimizer.resume)
    optimizer.close()
    said['argument'] = told(lambda: bt.shard(made(), frozen='int4'))
    dist.barrier()
    return said


def _write(model):
    with bt.gathered(model), torch.no_grad():
        model.blocks[0].base.weight.mul_(2)


def _with_moments(optimizer):
    state = optimizer.full_state_dict()
    names = state['param_groups'][0]['param_names']
    base, trained = names.index('blocks.0.base.bias'), names.index('head.bias')
    state['state'][base] = {'step': torch.tensor(2.0), 'exp_avg': torch.zeros(33), 'exp_avg_sq': torch.zeros(33)}
    assert trained in state['state']
    return state


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    main()
