"""One rank of test_experts.py: experts_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py."""
import os
import re
import sys
import time
import urllib.request

import torch
import torch.distributed as dist
from shard_main import main, ours, script, theirs, told
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import ballast.torch as bt

WIDTH, EXPERTS, TOKENS, STEPS = 8, 6, 3, 4


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to two of the experts."""

    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert(WIDTH) for _ in range(EXPERTS))
        self.agrees, self.recomputes, self.reached = True, False, []

    def forward(self, x):
        return checkpoint(self._forward, x, use_reentrant=False) if self.recomputes else self._forward(x)

    def _forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        self.reached.append(counts.nonzero().flatten().tolist())
        done = self.shared(x)
        for i in bt.reached_experts(self.experts, counts) if self.agrees else self.reached[-1]:
            token, place = (chosen == i).nonzero(as_tuple=True)
            done = done.index_add(0, token, weights[token, place, None] * self.experts[i](x[token]))
        return x + done


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def made(**more):
    """more: attributes of the mixtures."""
    torch.manual_seed(3)
    model = Net()
    for mixture in model.blocks:
        for name, value in more.items():
            setattr(mixture, name, value)
    return model


def batches(count=STEPS):
    """Of all ranks."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(dist.get_world_size(), TOKENS, WIDTH, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return (model(x) - x.flip(-1)).square().mean()


def in_memory(model, micro=1):
    """Losses and parameters of one process with the tokens of all ranks."""
    optimizer, losses = theirs(model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        for _ in range(micro):
            loss = torch.stack([loss_of(model, x) for x in batch]).mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def on_servers(model, name, micro=1):
    """The same of ranks with their own tokens; and stats() behind each step."""
    optimizer, losses, stats = ours(model, name=name), [], []
    for batch in batches():
        optimizer.zero_grad()
        for _ in range(micro):
            loss = loss_of(model, batch[dist.get_rank()])
            loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
        stats.append(optimizer.stats())
    with bt.gathered(model):
        parameters = [p.detach().clone() for p in model.parameters()]
    dist.barrier()
    optimizer.close()
    return losses, parameters, stats


def both(name, more=None, micro=1, **arguments):
    twin, model = made(), bt.shard(made(**more or {}), backwards=micro, **arguments)
    expected, came = in_memory(twin, micro), on_servers(model, name, micro)
    return expected, came, [mixture.reached for mixture in model.blocks]


@script
def agreed():
    return both('agreed')


@script
def kept():
    """Gradients stay until step()."""
    return both('kept', push_early=False)


@script
def no_reshard():
    return both('no_reshard', reshard_after_forward=False)


@script
def recomputed():
    return both('recomputed', {'recomputes': True})


@script
def micro_batches():
    return both('micro_batches', micro=2)


@script
def replicas():
    """HSDP, 2 x 2."""
    return both('replicas', mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('replica', 'shard')))


@script
def evaluated():
    """Losses of passes without a gradient; and of the first rank's tokens within gathered(), on that rank alone."""
    model = bt.shard(made())
    optimizer = ours(model)
    rank, losses = dist.get_rank(), []
    with torch.no_grad():
        losses += [loss_of(model, batch[rank]).item() for batch in batches(3)]
        with bt.gathered(model):
            losses += [loss_of(model, batch[0]).item() for batch in batches(3)] if rank == 0 else []
    dist.barrier()
    optimizer.close()
    twin = made()
    with torch.no_grad():
        return losses, [loss_of(twin, batch[rank]).item() for batch in batches(3)]


@script
def refused():
    """What ranks are told that call experts of their own alone; whose experts are gathered with their block; of a wrong number; and of
    whom one has an error before its router. No collective works behind that."""
    said = []
    model = bt.shard(made(agrees=False))
    optimizer = ours(model)
    optimizer.resume()
    optimizer.job.options.step_timeout = 3.0
    said.append(told(lambda: [loss_of(model, batch[dist.get_rank()]) for batch in batches()]))
    dist.barrier()
    optimizer.close()
    whole = made()
    bt.shard(whole, units=list(whole.blocks))
    optimizer = ours(whole, name='whole')
    said.append(told(lambda: loss_of(whole, batches()[0][0])))
    dist.barrier()
    optimizer.close()
    said.append(told(lambda: bt.reached_experts(whole.blocks[0].experts, torch.ones(4))))
    dist.barrier()
    one = bt.shard(made())
    optimizer = ours(one, name='one')
    optimizer.resume()

    def routes(*_):  # the first rank waits in vain from here on
        optimizer.job.options.step_timeout = 2.0
        if dist.get_rank() == 1:
            raise ZeroDivisionError
    one.blocks[0].router.register_forward_pre_hook(routes)
    said.append(told(lambda: loss_of(one, batches()[0][0])))
    store = dist.distributed_c10d._get_default_store()
    store.set(f'told/{dist.get_rank()}', b'')
    store.wait(['told/0', 'told/1'])
    optimizer.close()
    return said


class Sparse(nn.Module):
    """Experts alone, of which the caller chooses some. tells: shard() hears of them ahead."""

    def __init__(self, tells):
        super().__init__()
        self.tells = tells
        self.norm, self.experts = nn.LayerNorm(64), nn.ModuleList(Expert(64) for _ in range(64))

    def forward(self, x, chosen):
        if self.tells:
            chosen = bt.reached_experts(self.experts, torch.zeros(64).index_fill(0, torch.tensor(chosen), 1))
        return torch.cat([self.experts[i](part) for i, part in zip(chosen, self.norm(x).chunk(len(chosen)))])


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Sparse(tells) for tells in (True, False))

    def forward(self, x, chosen):
        for layer in self.layers:
            x = x + layer(x, chosen)
        return x


def counters(optimizer):
    """Bytes so far that the server has sent, received, and written in memory, once it has made all updates; and those of pulls and pushes
    by stats()."""
    while True:
        with urllib.request.urlopen(f'http://{os.environ["METRICS"]}/metrics') as answer:
            told = dict(re.findall(r'^(ballast_\S+) (\S+)$', answer.read().decode(), re.M))
        job = '{training_job="a_part"}'
        if int(told[f'ballast_job_oldest_chunk_version{job}']) == optimizer.job.opened.session.version:
            break
        time.sleep(0.01)
    stats = optimizer.stats()
    return [float(told[f'ballast_{name}']) for name in (f'sent_bytes_total{job}', f'received_bytes_total{job}',
                                                        'tier_written_bytes_total{tier="dram"}')] + [
        stats['unit_pull_bytes'], stats['unit_push_bytes']]


@script
def a_part():
    """Losses in memory and with a server, of steps with 8 of 64 experts and a last one with all; are the parameters alike; how many
    gradients backward has left; stats(); counters() of each step."""
    twin, model = Deep(), bt.shard(Deep())
    optimizer = ours(model, durability='none', dram=None, threads=None)
    other, losses, told, left = theirs(twin.parameters()), [], [], []
    optimizer.resume()
    generator = torch.Generator().manual_seed(5)
    steps = [torch.randperm(64, generator=generator)[:8].sort().values.tolist() for _ in range(5)] + [list(range(64))]
    for chosen in steps:
        told.append(counters(optimizer))
        x = torch.randn(64, 64, generator=generator)
        for net, its in ((twin, other), (model, optimizer)):
            its.zero_grad()
            loss = (net(x, chosen) - x).square().mean()
            loss.backward()
            left += [p for p in model.parameters() if p.grad is not None and not hasattr(p.grad.to_local(), 'of')]
            its.step()
            losses.append(loss.item())
    told.append(counters(optimizer))
    stats = optimizer.stats()
    with bt.gathered(model):
        same = all(torch.allclose(p, q, rtol=0, atol=1e-5) for p, q in zip(model.parameters(), twin.parameters()))
    optimizer.close()
    return losses, same, len(left), stats, [[b - a for a, b in zip(*each)] for each in zip(told, told[1:])]


def mixtral(implementation):
    from transformers import MixtralConfig, MixtralForCausalLM
    torch.manual_seed(3)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                             num_attention_heads=2, num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2))
    model.set_experts_implementation(implementation)
    return bt.split_experts(model)


@script
def fused():
    """Losses of steps in memory and of ours, with transformers' fused experts; their state_dict()s: of ours by Distributed Checkpoint, in
    a checkpoint of transformers that was read again, and when ours has loaded its first values."""
    from transformers import MixtralForCausalLM
    tokens = [torch.randint(32, (dist.get_world_size(), 1, 3), generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def loss_of(model, x):
        return model(input_ids=x, labels=x).loss
    twin, model = mixtral('eager'), mixtral('eager')
    first = {name: value.clone() for name, value in twin.state_dict().items()}
    bt.shard(model)
    optimizer, other, losses = ours(model), theirs(twin.parameters()), []
    for batch in tokens:
        for each in (other, optimizer):
            each.zero_grad()
        expected, loss = torch.stack([loss_of(twin, x) for x in batch]).mean(), loss_of(model, batch[dist.get_rank()])
        expected.backward()
        loss.backward()
        other.step()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append((expected.item(), loss.item() / dist.get_world_size()))
    left_out = sum(parameter.grad is None for parameter in twin.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # of DTensors
    folder = f'{sys.argv[2]}/checkpoint'
    with bt.gathered(model):
        model.save_pretrained(folder)  # writes on the first rank
    dist.barrier()
    read = MixtralForCausalLM.from_pretrained(folder).state_dict()
    model.load_state_dict(first)
    with bt.gathered(model):
        loaded = {name: value.clone() for name, value in model.state_dict().items()}
    dist.barrier()
    optimizer.close()
    return losses, left_out, [(state, twin.state_dict()), (read, state), (loaded, first)]


if __name__ == '__main__':
    main(barrier=not sys.argv[1].endswith('refused'))
