"""One rank of test_zeropp.py: zeropp_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py. Four ranks, two to a node."""
import functools
import os
import warnings

import torch
import torch.distributed as dist
from shard_main import batches, both, loss_of, made, main, ours, plain, script, told
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ballast.torch as bt

FULL = os.environ.get('TEST_ROUNDS') == 'full'
STEPS = 30 if FULL else 15  # where bytes are counted
FEW = STEPS if FULL else 6


@functools.cache
def nodes():
    return init_device_mesh('cpu', (2, 2), mesh_dim_names=('node', 'rank'))


def wide():
    return made(width=16, rows=64)


def trained(name, micro=1, make=wide, steps=STEPS, **extra):
    return both(name, make=make, push_early=True, micro=micro, extra=extra, steps=steps)


@script
def exact():
    return trained('exact')


@script
def second():
    return trained('second', second=nodes()['rank'])


@script
def exact_accumulation():
    return trained('exact_accumulation', micro=2, steps=FEW)


@script
def second_accumulation():
    return trained('second_accumulation', micro=2, steps=FEW, second=nodes()['rank'])


@script
def second_uneven():
    """Units that two ranks cannot halve."""
    return trained('second_uneven', make=lambda: made(width=10, rows=19), steps=FEW, second=nodes()['rank'])


@script
def gather():
    return trained('gather', gather='q8')


@script
def reduce():
    return trained('reduce', reduce='q8')


@script
def every():
    return trained('every', gather='q8', reduce='q8', second=nodes()['rank'])


@script
def gathered_values():
    """The largest error of what a forward pass computes with, by unit, and its bound: 1/254 of the unit's largest magnitude."""
    model = bt.shard(made(tied=False), gather='q8')
    optimizer = ours(model)
    optimizer.resume()
    with bt.gathered(model):
        exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    pairs = []

    def seen(prefix, module, _):
        its = [(p.detach(), exact[f'{prefix}.{name}']) for name, p in module.named_parameters()]
        pairs.append((max((came - value).abs().max().item() for came, value in its),
                      max(value.abs().max().item() for _, value in its) / 254))
    for i, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, prefix=f'blocks.{i}': seen(prefix, module, args))
    with torch.no_grad():
        model(next(batches(1)))
    dist.barrier()
    optimizer.close()
    return pairs


@script
def reduced_values():
    """The largest error of a unit's reduced gradients, and its bound: the mean over ranks of 1/254 of the largest magnitude."""
    alone, twin = made(tied=False), plain(made(tied=False))
    model = bt.shard(made(tied=False), reduce='q8', push_early=False)
    optimizer = ours(model)
    tokens = next(batches(1))
    for each in (alone, twin, model):
        loss_of(each, tokens).backward()
    pairs = []
    for i, block in enumerate(alone.blocks):
        bound = torch.tensor(max(p.grad.abs().max().item() for p in block.parameters()) / 254)
        dist.all_reduce(bound)
        its = zip(twin.blocks[i].parameters(), model.blocks[i].parameters())
        errors = [(a.grad.to_local() - b.grad.to_local()).abs() for a, b in its]
        pairs.append((max(error.max().item() for error in errors if error.numel()), bound.item() / dist.get_world_size()))
    optimizer.close()
    return pairs


@script
def not_finite():
    """Whether each of two steps was skipped: one rank's gradient has an infinity, then a NaN."""
    model = bt.shard(made(), reduce='q8', gather='q8')
    optimizer = ours(model)
    skipped = []
    for bad in (float('inf'), float('nan')):
        optimizer.zero_grad()
        loss = loss_of(model, next(batches(1)))
        (loss * bad if dist.get_rank() == 1 else loss).backward()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            optimizer.step()
        skipped.append(optimizer.last_step_skipped)
    optimizer.close()
    return skipped


@script
def goes_back():
    """A second partition after a rollback, and after a load: losses of steps and of a pass after them, and of the same ones again."""
    model = bt.shard(made(), second=nodes()['rank'])
    optimizer = ours(model, durability='step', dram=None, threads=None)
    found = []

    def steps():
        losses = []
        for tokens in batches(3):
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(loss_of(model, tokens).item())
        return losses
    steps()
    state, version = optimizer.state_dict(), optimizer.job.opened.session.version
    found.append(steps())
    optimizer.rollback(version)
    found.append(steps())
    optimizer.load_state_dict(state)
    found.append(steps())
    optimizer.close()
    return found


@script
def refused():
    said = {}
    said['gather'] = told(lambda: bt.shard(made(), gather='q4'))
    said['reduce'] = told(lambda: bt.shard(made(), reduce=torch.bfloat16))
    said['second'] = told(lambda: bt.shard(made(), second=nodes()))
    other = DeviceMesh('cpu', [0, 1, 2, 3])
    pairs = nodes()
    said['apart'] = told(lambda: bt.shard(made(), mesh=pairs['rank'], second=other))
    model = made()
    model.blocks[0].up.to(torch.bfloat16).requires_grad_(False)
    mixed = bt.shard(model, gather='q8')
    optimizer = ours(mixed, name='mixed')
    said['mixed'] = told(lambda: mixed(next(batches(1))))
    optimizer.close()
    for name, compressed in (('gather beside TP', {'gather': 'q8'}), ('reduce beside TP', {'reduce': 'q8'})):
        mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('fsdp', 'tp'))
        model = made()
        for block in model.blocks:
            parallelize_module(block, mesh['tp'], {'up': ColwiseParallel(), 'down': RowwiseParallel()})
        said[name] = told(lambda model=model, mesh=mesh, compressed=compressed: bt.shard(model, mesh=mesh['fsdp'], **compressed))
    return said


if __name__ == '__main__':
    main()
