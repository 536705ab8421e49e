"""One rank of test_universal.py: universal_main.py WHAT FOLDER, with torch's variables. 'deepspeed': DeepSpeed and Ballast train by turns.
'alone': FOLDER/zero1 and FOLDER/zero3 are what DeepSpeed left, and Ballast goes on. Writes what came of each way to FOLDER/found-RANK.pt,
or the traceback."""
import contextlib
import os
import pathlib
import sys
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from universal_deepspeed import (
    AFTER,
    ARGUMENTS,
    BEFORE,
    engine_losses,
    engine_of,
    engine_state,
    groups_of,
    loss_of,
    model_of,
    save_converted,
)
from universal_ours import differing

import ballast.torch as bt
from ballast import Error

F32, BF16 = torch.float32, torch.bfloat16


def fsdp2(model):
    for layer in (model[0], model[3]):
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model):
    """Columns of one weight and rows of the other, neither of which divide by two ranks."""
    return parallelize_module(model, init_device_mesh('cpu', (dist.get_world_size(),)), {
        '0': RowwiseParallel(input_layouts=Replicate()), '3': ColwiseParallel(output_layouts=Replicate())})


KINDS = {'plain': lambda model: model, 'fsdp2': fsdp2, 'shard': bt.shard, 'tensor': tensor_parallel}


def ours(model, name, **more):
    """Hyper-parameters are others than the checkpoint's, but for what a group of it would have."""
    return bt.AdamW([{**group, **more} for group in groups_of(model, named=True)], name=name, dram='64MiB', threads=1, step_timeout=60.0)


def losses(model, optimizer, kind, begin, count, dtype=F32):
    found = []
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        if kind == 'plain' and dist.get_world_size() > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        found.append(loss.item())
    return found


def state_of(optimizer):
    """As engine_state(), read from the servers."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group['params']:
            entry = {key: value for key, value in optimizer.job.read_state(parameter, whole=True).items() if key != 'step'}
            found[optimizer.job.member_of(parameter).name] = {'master': optimizer.job.read_master(parameter), **entry}
    return found


def closed(optimizer):
    dist.barrier()
    optimizer.close()


def into_ballast(folder, stage, dtype, kinds):
    engine = engine_of(stage, model_of(dtype=dtype))
    engine_losses(engine, 0, BEFORE)
    save_converted(engine, folder)
    held = engine_state(engine)
    found = {'theirs': engine_losses(engine, BEFORE, AFTER)}
    for kind in kinds:
        model = KINDS[kind](model_of(dtype=dtype))
        optimizer = ours(model, f'into-{stage}-{dtype}-{kind}', lr=0.5)
        came = bt.load_universal(optimizer, folder)
        found[kind] = {'came': (came.step, came.client_state, optimizer.resume().step), 'differing': differing(state_of(optimizer), held),
                       'groups': [{key: group[key] for key in ('lr', 'betas', 'eps', 'weight_decay')} for group in optimizer.param_groups],
                       'losses': losses(model, optimizer, kind, BEFORE, AFTER, dtype)}
        closed(optimizer)
    return found


def out_of_ballast(folder, kind, dtype, stages):
    model = KINDS[kind](model_of(dtype=dtype))
    optimizer = ours(model, f'out-{dtype}-{kind}', **ARGUMENTS)
    losses(model, optimizer, kind, 0, BEFORE, dtype)
    bt.save_universal(optimizer, folder, client_state={'cursor': 7})
    held = state_of(optimizer)
    found = {'ours': losses(model, optimizer, kind, BEFORE, AFTER, dtype)}
    closed(optimizer)
    for stage in stages:
        # ZeRO-3 leaves to the configuration what is not the same in all groups.
        engine = engine_of(stage, model_of(dtype=dtype), universal=True)
        _, client = engine.load_checkpoint(str(folder))
        found[stage] = {'came': (engine.global_steps, client['cursor']), 'differing': differing(engine_state(engine), held),
                        'losses': engine_losses(engine, BEFORE, AFTER)}
    if dist.get_world_size() == 1:
        again = KINDS[kind](model_of(dtype=dtype))
        optimizer = ours(again, f'again-{dtype}-{kind}')
        bt.load_universal(optimizer, folder)
        found['again'] = losses(again, optimizer, kind, BEFORE, AFTER, dtype)
        closed(optimizer)
    return found


def saved_doubled(model, optimizer, place):
    """Saves twice the parameters, as a loop that swaps another value in only to save it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    path = pathlib.Path(bt.save_universal(optimizer, place))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return {name: torch.load(path / 'zero' / name / 'fp32.pt')['param'] for name, _ in model.named_parameters()}


def without_deepspeed(folder):
    dist.init_process_group('gloo')
    found = {}
    for stage, kinds in ((1, ['fsdp2', 'tensor', 'shard']), (3, ['shard', 'plain'])):
        place = folder / f'zero{stage}'
        for kind in kinds:
            model = KINDS[kind](model_of(width=7))
            optimizer = ours(model, f'alone-{stage}-{kind}', lr=0.5)
            bt.load_universal(optimizer, place)
            place = folder / f'again-{stage}-{kind}'
            held = state_of(optimizer)
            found[stage, kind] = {'state': held}
            bt.save_universal(optimizer, place)
            if kind != 'shard':  # whose parameters nobody reaches between steps
                found[stage, kind]['edited'] = saved_doubled(model, optimizer, folder / f'edited-{stage}-{kind}')
                found[stage, kind]['kept'] = differing(state_of(optimizer), held)
            if kind != 'tensor':  # whose ranks have one batch
                found[stage, kind]['losses'] = losses(model, optimizer, kind, BEFORE, AFTER)
            closed(optimizer)
    # Frozen ones stay, and do not go along.
    model = model_of(width=7)
    model[0].weight.requires_grad_(False)
    value = model[0].weight.clone()
    optimizer = ours(bt.shard(model), 'frozen')
    bt.load_universal(optimizer, folder / 'without-0.weight')
    bt.save_universal(optimizer, folder / 'again-frozen')
    with bt.gathered(model):
        found['frozen'] = torch.equal(model[0].weight, value), torch.equal(model[0].bias, held['0.bias']['master'])
    closed(optimizer)
    # What is wrong for one rank is so for all, and nothing is changed.
    model = fsdp2(model_of(width=7))
    optimizer = ours(model, 'refused')
    own = folder / ('zero1' if dist.get_rank() == 0 else 'not there')
    try:
        bt.load_universal(optimizer, own)
        found['refused'] = None
    except Error as error:
        found['refused'] = str(error)
    return found


def with_deepspeed(folder):
    import deepspeed
    deepspeed.init_distributed('gloo')
    alone, found = dist.get_world_size() == 1, {}
    # shard() has values of one dtype alone, and mp_policy makes others of them.
    kinds = {(1, F32): ['plain', 'fsdp2'], (1, BF16): ['fsdp2'], (3, F32): ['shard']}
    for (stage, dtype), of in kinds.items():
        found['into', stage, dtype] = into_ballast(folder / f'into-{stage}-{dtype}', stage, dtype, ['plain'] if alone else of)
    stages = {('fsdp2', F32): [3], ('fsdp2', BF16): [1], ('shard', F32): [1]}
    if alone:
        stages = {('plain', F32): [1, 3], ('plain', BF16): [1]}
    for (kind, dtype), of in stages.items():
        found['out', kind, dtype] = out_of_ballast(folder / f'out-{kind}-{dtype}', kind, dtype, of)
    return found


def main():
    os.environ.setdefault('DS_ACCELERATOR', 'cpu')
    torch.set_num_threads(1)
    place = pathlib.Path(sys.argv[2])
    try:
        result = {'deepspeed': with_deepspeed, 'alone': without_deepspeed}[sys.argv[1]](place)
    except Exception:
        result = traceback.format_exc()
    torch.save(result, place / f'found-{os.environ["RANK"]}.pt')
    # A rank that ends first would take the store, and connections, from the other.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
