"""One rank of test_gathers.py: gathers_main.py SCRIPT FOLDER, as shard_main.py. Passes that are not the same on all ranks."""
import sys
import time

import torch
import torch.distributed as dist
from shard_main import ARGUMENTS, batches, loss_of, made, main, ours, plain, script, theirs, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ballast.torch as bt
from ballast.torch.sharding import collectives


@script
def another_order():
    """What a step is told after blocks of one size were gathered in another order on the last rank; steps made; and the losses of the same
    step made well, here and by a job that saw nothing else."""
    model = bt.shard(made())
    optimizer = ours(model)
    tokens = next(batches(1))
    if dist.get_rank() == dist.get_world_size() - 1:
        model.order = [1, 0, 2]
    loss_of(model, tokens).backward()
    said = told(optimizer.step)
    steps = optimizer.stats()['steps']
    optimizer.zero_grad()
    losses = []
    second = bt.shard(made())
    for each, its in ((model, optimizer), (second, ours(second, name='second'))):
        each.order = None
        for _ in range(2):
            its.zero_grad()
            loss = loss_of(each, tokens)
            loss.backward()
            its.step()
            losses.append(loss.item())
        dist.barrier()
        its.close()
    return said, steps, losses


@script
def second_of_a_mixture():
    """As another_order(), with a second partition, which must not keep the mixture."""
    nodes = init_device_mesh('cpu', (2, 2), mesh_dim_names=('node', 'local'))
    model = bt.shard(made(), second=nodes['local'])
    optimizer = ours(model)
    tokens = next(batches(1))
    losses = [loss_of(model, tokens).item()]
    if dist.get_rank() == 1:
        model.order = [1, 0, 2]
    optimizer.job.features[-1].differed()  # the pass to come pulls anew
    loss_of(model, tokens).backward()
    said = told(optimizer.step)
    model.order = None
    optimizer.zero_grad()
    losses.append(loss_of(model, tokens).item())
    dist.barrier()
    optimizer.close()
    return said, losses


@script
def two_models():
    """What the step of one model is told after units of two were gathered in another order on the last rank."""
    first, second = bt.shard(made()), bt.shard(made())
    optimizers = ours(first), ours(second, name='second')
    tokens = next(batches(1))
    for optimizer in optimizers:
        optimizer.resume()
    for model in (second, first) if dist.get_rank() else (first, second):
        loss_of(model, tokens)
    said = told(optimizers[0].step)
    dist.barrier()
    for optimizer in optimizers:
        optimizer.close()
    return said


@script
def late():
    """A rank that comes later than ranks say that they wait, again and again: the loss of each pass."""
    collectives._SAY_SECONDS = 0.003
    model = bt.shard(made())
    optimizer = ours(model)
    optimizer.resume()
    losses = []
    for i in range(40):
        if dist.get_rank() == 1:
            time.sleep(0.001 * (i % 8))
        with torch.no_grad():
            losses.append(loss_of(model, next(batches(1))).item())
        optimizer.job.features[-1].differed()  # units that FSDP2 keeps are gathered again
    dist.barrier()
    optimizer.close()
    return losses


@script
def no_values():
    """What ranks are told where a module of the last rank cannot make its values; and the loss of the step once it can."""
    with torch.device('meta'):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    reset = model[1].reset_parameters
    if dist.get_rank() == dist.get_world_size() - 1:
        model[1].reset_parameters = lambda: 1 / 0
    bt.shard(model, units=[model[0], model[1]])
    optimizer = ours(model)
    said = told(optimizer.resume)
    model[1].reset_parameters = reset
    loss = model(torch.ones(2, 5)).square().sum()
    loss.backward()
    optimizer.step()
    dist.barrier()
    optimizer.close()
    return said, loss.item()


@script
def gone_on_some():
    """Losses of steps, amid which all ranks but the last make a pass that is let go: of plain FSDP2 and of ours; and what steps are told.

    A step is made again where it was refused."""
    def model_of(take):
        torch.manual_seed(3)
        model = nn.Module()
        model.dense, own = nn.Linear(6, 6), nn.Linear(6, 6)
        mesh = init_device_mesh('cpu', (dist.get_world_size(), 1), mesh_dim_names=('ranks', 'rank'))
        fully_shard(model.dense)
        setattr(model, f'own{dist.get_rank()}', fully_shard(own, mesh=mesh['rank']))
        take(model)
        return model, own

    def passes(model, own, optimizer):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        x, losses = torch.ones(3, 6), []
        for i in range(4):
            if i == 2 and not is_last:
                own(x).sum().backward()
            if i == 2:
                optimizer.zero_grad()
            loss = own(model.dense(x)).square().sum()
            loss.backward()
            said.append(told(optimizer.step))
            optimizer.zero_grad()
            if said[-1] != 'nothing':
                own(model.dense(x)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    said = []
    model, own = model_of(lambda model: model)
    expected = passes(model, own, torch.optim.AdamW(model.parameters(), **ARGUMENTS))
    model, own = model_of(bt.shard)
    optimizer = ours(model)
    came = passes(model, own, optimizer)
    dist.barrier()
    optimizer.close()
    return expected, came, said


@script
def inference_first():
    """Losses of a pass in inference mode, and of a step after it; of plain FSDP2, whose first pass is the step's."""
    twin, model = plain(made()), bt.shard(made())
    optimizer = ours(model)
    tokens = next(batches(1))
    with torch.inference_mode():
        first = loss_of(model, tokens).item()
    losses = []
    for each, its in ((twin, theirs(twin.parameters())), (model, optimizer)):
        for _ in range(2):
            its.zero_grad()
            loss = loss_of(each, tokens)
            loss.backward()
            its.step()
            losses.append(loss.item())
    dist.barrier()
    optimizer.close()
    return first, losses


@script
def absent():
    """What ranks are told whose last one makes no pass, and the seconds until then."""
    model = bt.shard(made())
    optimizer = ours(model)
    optimizer.resume()
    optimizer.job.options.step_timeout = 4.0
    before, said = time.monotonic(), ''
    if dist.get_rank() < dist.get_world_size() - 1:
        said = told(lambda: model(next(batches(1))))
    seconds = time.monotonic() - before
    dist.distributed_c10d._get_default_store().set(f'told/{dist.get_rank()}', b'')
    for rank in range(dist.get_world_size()):
        dist.distributed_c10d._get_default_store().wait([f'told/{rank}'])
    optimizer.close()
    return said, seconds


if __name__ == '__main__':
    main(barrier=sys.argv[1] != 'absent')
