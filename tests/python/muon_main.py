"""One rank of a Muon test: muon_main.py WAY[,WAY...] FOLDER [SERVERS]. Writes what each way left to FOLDER/WAY-RANK.pt.

A way trains the examples' transformer. Two runs of Muon drift apart as soon as one bit of a parameter differs, because the iteration works
in bf16: torch.optim.Muon from parameters that are an ulp away, too. So a Twin makes each step from our parameters with our gradients, with
momentum and moments of its own.
"""
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'client/python/examples'))
from transformer import Transformer, batch, loss_of

import ballast.torch as bt
from ballast.torch.steps import assisted

STEPS = 200 if os.environ.get('TEST_ROUNDS') == 'full' else 6
MUON = {'lr': 2e-3, 'weight_decay': 0.1, 'momentum': 0.9, 'adjust_lr_fn': 'match_rms_adamw'}
ADAMW = {'lr': 2e-3, 'weight_decay': 0.01, 'betas': (0.9, 0.95)}
MAX_NORM = 0.5
ROWS = 8  # of a batch, which data-parallel ranks share out


def made(dtype=torch.float32):
    torch.manual_seed(4)
    return Transformer().to(dtype)


def ours(model, **more):
    budgets = {} if 'servers' in more else {'dram': '128MiB', 'threads': 2}
    return bt.Muon(bt.muon_groups(model, **ADAMW), **MUON, **{**budgets, **more})


class Twin:
    """torch.optim.Muon for the matrices, and AdamW for the rest, of a whole model."""

    def __init__(self, model):
        self.model = made()
        matrices, rest = bt.muon_groups(self.model)
        self.parts = (torch.optim.Muon(matrices['params'], **MUON), torch.optim.AdamW(rest['params'], **ADAMW))
        self.ours = model
        self.worst = 0.0  # the largest difference after a step

    def before_step(self):
        with torch.no_grad():
            for mine, value in zip(self.model.parameters(), full(self.ours).values()):
                mine.copy_(value)
            for mine, each in zip(self.model.parameters(), self.ours.parameters()):
                mine.grad = whole(each.grad)

    def after_step(self):
        for part in self.parts:
            part.step()
        values = full(self.ours)
        self.worst = max(self.worst, *(float((mine - values[name]).detach().abs().max()) for name, mine in self.model.named_parameters()))

    def momenta(self):
        state = self.parts[0].state
        return {name: state[each]['momentum_buffer'] for name, each in self.model.named_parameters() if each in state}


def train(model, optimizer, steps=STEPS, start=0, rank=0, ranks=1, clip=True, twin=None):
    """ranks: data-parallel ones, which have rows of each batch. Returns losses."""
    losses = []
    for step in range(start, steps):
        tokens = batch(step, 0, size=ROWS)[rank * ROWS // ranks:(rank + 1) * ROWS // ranks]
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if twin is not None:
            twin.before_step()
        optimizer.step()
        if twin is not None:
            twin.after_step()
        losses.append(loss.item())
    return losses


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor).detach().clone()


def full(model):
    return {name.removeprefix('module.'): whole(each) for name, each in model.named_parameters()}


def beside_torch(model, optimizer, rank, ranks, clip=True):
    """The largest differences of a parameter after a step, and of a momentum at the end; the last loss."""
    twin = Twin(model)
    losses = train(model, optimizer, rank=rank, ranks=ranks, clip=clip, twin=twin)
    found, expected = momenta(model, optimizer), twin.momenta()
    assert found.keys() == expected.keys()
    return twin.worst, max(float((found[name] - each).abs().max()) for name, each in expected.items()), losses[-1]


def ddp(**more):
    model = DistributedDataParallel(made())
    return beside_torch(model, ours(model, name='ddp', **more), dist.get_rank(), dist.get_world_size())


def fsdp2(**more):
    model = made()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return beside_torch(model, ours(model, name='fsdp2', **more), dist.get_rank(), dist.get_world_size())


def tensor_parallel(**more):
    """2 x 2."""
    mesh = init_device_mesh('cpu', (dist.get_world_size() // 2, 2), mesh_dim_names=('data', 'tensor'))
    model = made()
    for block in model.blocks:
        columns = {name: ColwiseParallel() for name in ('query', 'key', 'value', 'mlp.up')}
        parallelize_module(block, mesh['tensor'], columns | {'out': RowwiseParallel(), 'mlp.down': RowwiseParallel()})
        fully_shard(block, mesh=mesh['data'])
    fully_shard(model, mesh=mesh['data'])
    return beside_torch(model, ours(model, name='tensor_parallel', **more), mesh.get_local_rank('data'), mesh.size(0),
                        clip=False)  # torch clips parameters of one mesh


def lopsided(**more):
    """One rank's part of a matrix has no gradient in a step: it counts as zeros, and nobody waits for it."""
    model = made()
    fully_shard(model)
    optimizer = ours(model, name='lopsided', **more)
    train(model, optimizer, steps=1, rank=dist.get_rank(), ranks=dist.get_world_size())
    tokens = batch(1, 0, size=ROWS)
    loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    if dist.get_rank() == 1:
        model.blocks[0].query.weight.grad = None
    optimizer.step()
    found = momenta(model, optimizer)['blocks.0.query.weight']
    if dist.get_rank() == 1:
        optimizer.param_groups[0]['ns_steps'] = 4
    model.zero_grad()
    loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    try:
        optimizer.step()
    except Exception as error:
        return str(error), found
    return 'no error', found


class Failing:
    """A rule that raises at one of its updates."""

    def __init__(self, rule, at):
        self._rule, self._at, self.calls = rule, at, 0

    def __getattr__(self, name):
        return getattr(self._rule, name)

    def update(self, group, direction):
        self.calls += 1
        if self.calls == self._at:
            raise RuntimeError('amid a wave')
        return self._rule.update(group, direction)


def in_waves(model, optimizer, fails_at):
    """Gives each matrix a wave of its own. fails_at: an update of rank 1. Returns the feature, and sizes of what waves pushed."""
    assisted.WAVE_BYTES = 1
    feature = next(each for each in optimizer.job.features if isinstance(each, assisted.Assisted))
    if dist.get_rank() == 1:
        feature._rule = Failing(feature._rule, fails_at)
    pushed, push = [], feature._push

    def counted(job, ready, units):
        push(job, ready, units)
        pushed.append(len(feature._went))
    feature._push = counted
    return feature, pushed


def again(call, said):
    """A call that is made once more if it raises."""
    def twice(*arguments, **more):
        try:
            return call(*arguments, **more)
        except Exception as error:
            said.append(str(error))
            return call(*arguments, **more)
    return twice


def waves(**more):
    """A step amid which one rank fails, when updates have gone to the servers, is made again. Beside beside_torch(): what was told; how
    many waves there are; the most members that went before a step."""
    model = made()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, said = ours(model, name='waves', **more), []
    feature, pushed = in_waves(model, optimizer, fails_at=30)
    optimizer.step = again(optimizer.step, said)
    found = beside_torch(model, optimizer, dist.get_rank(), dist.get_world_size())
    return found, said, len(feature._waves[1]), max(pushed)


def sharded_waves(**more):
    """As waves(), of parameters on the servers, whose other gradients went in backward: the step is refused until they are made again."""
    results = []
    for fails_at in (0, 30):
        model = bt.shard(made())
        optimizer, said, losses = ours(model, name=f'sharded_waves{fails_at}', **more), [], []
        in_waves(model, optimizer, fails_at)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(6):
            tokens = batch(step, 0, size=ROWS)[rank * ROWS // ranks:(rank + 1) * ROWS // ranks]
            for _ in range(3):
                optimizer.zero_grad()
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
                loss.backward()
                try:
                    again(optimizer.step, said)()
                    break
                except Exception as error:
                    said.append(str(error))
            losses.append(loss.item())
        with bt.gathered(model):
            results.append((losses, full(model), said))
        dist.barrier()
        optimizer.close()
    return results


def options(**more):
    """What is told at the opening if ranks differ, by option; and a job that opens with values of other types."""
    rank, said = dist.get_rank(), []
    for number, other in enumerate(({'momentum': 0.95}, {'nesterov': False}, {'use_muon': False})):
        optimizer = bt.Muon(nn.Linear(8, 8, bias=False).named_parameters(), **{**MUON, **(other if rank else {})}, dram='128MiB',
                            name=f'options{number}', **more)
        try:
            optimizer.resume()
            said.append('no error')
        except Exception as error:
            said.append(str(error))
        optimizer.close()
    torch.manual_seed(1)
    alike = {'eps': 1, 'ns_coefficients': [3.0, -4.0, 2.0]} if rank else {'eps': 1.0, 'ns_coefficients': (3, -4, 2)}
    optimizer = bt.Muon(nn.Linear(8, 8, bias=False).named_parameters(), **MUON, **alike, dram='128MiB', name='alike', **more)
    return said, optimizer.resume().step


def max_norm(**more):
    """Clipped within the update, by a norm that the trainer needs too: the norm and the losses."""
    model = DistributedDataParallel(made())
    optimizer = ours(model, name='max_norm', max_norm=MAX_NORM, **more)
    losses = train(model, optimizer, rank=dist.get_rank(), ranks=dist.get_world_size(), clip=False)
    return optimizer.grad_norm, losses


def sharded(**more):
    """Parameters on the servers."""
    model = made()
    frozen = model.blocks[1].query.weight.requires_grad_(False).detach().clone()
    bt.shard(model)
    optimizer = ours(model, name='sharded', **more)
    losses = train(model, optimizer, rank=dist.get_rank(), ranks=dist.get_world_size(), clip=False)
    with bt.gathered(model):
        assert torch.equal(whole(model.blocks[1].query.weight), frozen)
    return optimizer.grad_norm, losses


def momenta(model, optimizer):
    """Whole, by name."""
    state = optimizer.full_state_dict()['state']
    names = [name.removeprefix('module.') for group in bt.muon_groups(model) for name, _ in group['params']]
    return {names[i]: entry['momentum_buffer'] for i, entry in state.items() if 'momentum_buffer' in entry}


if __name__ == '__main__':
    dist.init_process_group('gloo')
    for way in sys.argv[1].split(','):
        found = globals()[way](**({'servers': sys.argv[3]} if len(sys.argv) > 3 else {}))
        torch.save(found, pathlib.Path(sys.argv[2]) / f'{way}-{dist.get_rank()}.pt')
        dist.barrier()
    dist.destroy_process_group()
