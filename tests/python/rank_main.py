"""One rank of a test: rank_main.py SCRIPT[,SCRIPT...] FOLDER, with RANK, WORLD_SIZE and the rest of torch's variables. Writes what each
script returned to FOLDER/SCRIPT-RANK.pt."""
import collections
import copy
import os
import sys

import torch
import torch.distributed as dist
from scripts import batches, loss_of, mlp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ballast.torch as bt

ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}
STEPS = 30 if os.environ.get('TEST_ROUNDS') == 'full' else 16  # a parameter comes before the 13th


def ours(parameters, **more):
    budgets = {} if os.environ.get('BALLAST_SERVERS') else {'dram': '128MiB', 'threads': 2}
    return bt.AdamW(parameters, **ARGUMENTS, **budgets, **more, name=script)


def theirs(parameters):
    return torch.optim.AdamW(parameters, **ARGUMENTS)


def own_batches(count):
    """Of all ranks' batches, this rank's."""
    for i, batch in enumerate(batches(count * dist.get_world_size())):
        if i % dist.get_world_size() == dist.get_rank():
            yield batch


def train(model, optimizer, steps=STEPS, before_step=None):
    losses = []
    for i, batch in enumerate(own_batches(steps)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if before_step:
            before_step(i)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def values_of(tensors):
    return [each.full_tensor() if hasattr(each, 'full_tensor') else each.detach().clone().as_subclass(torch.Tensor) for each in tensors]


def full(model):
    return values_of(model.parameters())


def run_both(wrap, script):
    torch.manual_seed(3)
    base = mlp()
    results = []
    for make in (theirs, ours):
        model = wrap(copy.deepcopy(base))
        optimizer = make(model.named_parameters() if make is ours else model.parameters())
        results.append((script(model, optimizer), full(model)))
        if make is ours:
            optimizer.close()
    return results


def ddp():
    return run_both(DistributedDataParallel, train)


def ddp_overlap():
    def script(model, optimizer):
        if isinstance(optimizer, bt.AdamW):
            optimizer.close()
            optimizer = ours(model.named_parameters(), overlap=model)
        losses = train(model, optimizer)
        if isinstance(optimizer, bt.AdamW):
            optimizer.close()
        return losses
    return run_both(DistributedDataParallel, script)


def ddp_no_sync():
    def script(model, optimizer):
        losses = []
        for i, batch in enumerate(own_batches(24)):
            if i % 3 < 2:
                with model.no_sync():
                    loss_of(model, batch).backward()
                continue
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)
    return run_both(DistributedDataParallel, script)


def train_with_an_edit(model, optimizer):
    """And with a parameter whose group comes later."""
    late = optimizer.param_groups[0]['params'].pop()

    def before_step(i):
        if i == 7:
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        if i == 12:
            optimizer.add_param_group({'params': [late], 'lr': 1e-3})
    return train(model, optimizer, before_step=before_step)


def ddp_edit():
    return run_both(DistributedDataParallel, train_with_an_edit)


def sparse_on_one_rank():
    """What each rank was told, and the losses of the steps after it."""
    torch.manual_seed(3)
    model = mlp()
    optimizer = ours(model.named_parameters())
    told = ''
    for i, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if i == 1:
            if dist.get_rank() == 1:
                model[3].bias.grad = model[3].bias.grad.to_sparse()
            try:
                optimizer.step()
            except RuntimeError as error:
                told = str(error)
            continue
        optimizer.step()
    optimizer.close()
    return told, full(model)


def none_on_one_rank():
    """Without DDP: each rank has the same gradients, but one of them forgot a tensor, then all, then none."""
    torch.manual_seed(3)
    model = mlp()
    optimizer = ours(model.named_parameters())
    told = []
    for i, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if dist.get_rank() == 1 and i < 2:
            model[3].bias.grad = None
            if i == 1:
                optimizer.zero_grad()
        try:
            optimizer.step()
            told.append('accepted')
        except RuntimeError as error:
            told.append(str(error))
    optimizer.close()
    return full(model), told


def fsdp2():
    def wrap(model):
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    return run_both(wrap, train)


def early():
    optimizer = ours(DistributedDataParallel(mlp()).named_parameters(), push_early=True)
    try:
        optimizer.resume()
    except bt.optimizer.Error as error:
        return str(error)
    return 'accepted'


def fsdp2_moved():
    """Conversions exchange what DTensors hold."""
    def script(model, optimizer):
        model.bfloat16().float()
        losses = train(model, optimizer, 10)
        model.cpu()
        losses = torch.cat([losses, train(model, optimizer, 10)])
        model.load_state_dict(model.state_dict())
        losses = torch.cat([losses, train(model, optimizer, 10)])
        if isinstance(optimizer, bt.AdamW):
            names = optimizer.full_state_dict()['param_groups'][0]['param_names']
            assert names == [name for name, _ in model.named_parameters()], names
        return [losses, *values_of(optimizer.state[p]['exp_avg'] for p in model.parameters())]
    return run_both(fully_shard, script)


def fsdp2_edit():
    def wrap(model):
        return fully_shard(model)
    return run_both(wrap, train_with_an_edit)


def run_models(wrap_name, wrap):
    """(torch's losses, ours) of models.MODELS, two of them in bf16 too, by name and dtype."""
    import models

    def own(name, i):
        return models.batch(name, i * dist.get_world_size() + dist.get_rank())
    losses = {}
    for dtype, names in ((torch.float32, models.MODELS), (torch.bfloat16, ['gpt2', 'lora_gpt2'])):
        for name in names:
            torch.manual_seed(3)
            job = f'{wrap_name}-{name}-{dtype}'
            losses[name, dtype] = models.compare(name, dtype, wrap=wrap, batches=own, ours=lambda model, job=job: bt.AdamW(
                model.named_parameters(), **models.ARGUMENTS, name=job))
    return losses


def models_ddp():
    return run_models('ddp', DistributedDataParallel)


def models_fsdp2():
    def wrap(model):
        for name, module in model.named_modules():
            block = name.rsplit('.', 1)[-1].isdigit() and sum(part.isdigit() for part in name.split('.')) == 1
            if block and any(True for _ in module.parameters()):
                fully_shard(module)
        return fully_shard(model)
    return run_models('fsdp2', wrap)


def sharded(model):
    return fully_shard(model)


def run_and_load(wrap, whole):
    """Ten steps of torch's optimizer, and five of ours that follow on its first five."""
    torch.manual_seed(3)
    base = mlp()
    data = list(own_batches(10))

    def go_on(model, optimizer, mine):
        losses = []
        for batch in mine:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    twin, model = wrap(copy.deepcopy(base)), wrap(copy.deepcopy(base))
    optimizer = theirs(twin.parameters())
    go_on(twin, optimizer, data[:5])
    state = copy.deepcopy(optimizer.state_dict())
    if whole:
        for entry in state['state'].values():
            entry.update({key: value.full_tensor() for key, value in entry.items() if hasattr(value, 'full_tensor')})
    model.load_state_dict(copy.deepcopy(twin.state_dict()))
    mine = ours(model.named_parameters())
    mine.load_state_dict(state)
    results = [(go_on(twin, optimizer, data[5:]), full(twin)), (go_on(model, mine, data[5:]), full(model))]
    # And from job to job, into one that has made steps: the same bits.
    saved = mine.full_state_dict()
    third = wrap(copy.deepcopy(base))
    follower = bt.AdamW(third.named_parameters(), **ARGUMENTS, name=f'follower-{script}',
                        **({} if os.environ.get('BALLAST_SERVERS') else {'dram': '128MiB', 'threads': 2}))
    go_on(third, follower, data[:1])
    third.load_state_dict(copy.deepcopy(model.state_dict()))
    follower.load_state_dict(saved)
    assert torch.equal(go_on(third, follower, data[:2]), go_on(model, mine, data[:2]))
    assert all(torch.equal(a, b) for a, b in zip(full(third), full(model)))
    mine.close()
    follower.close()
    return results


def ddp_load():
    return run_and_load(DistributedDataParallel, whole=False)


def fsdp2_load():
    return run_and_load(sharded, whole=False)


def fsdp2_load_whole():
    return run_and_load(sharded, whole=True)


def with_nan(state):
    state['state'][0]['exp_avg'][0, 0] = float('nan')


def with_fewer(state):
    state['param_groups'][0]['params'].pop()


def with_none(state):
    state['state'] = {}


def with_other_steps(state):
    for entry in state['state'].values():
        entry['step'] += 1


FAULTS = with_nan, with_fewer, with_none, with_other_steps


def rotten_on_one_rank():
    """What each rank was told of states that one of them cannot load, before the job is open and after; how far what came of the
    sound one is from it; and the parameters."""
    torch.manual_seed(3)
    model = mlp()
    other = theirs(model.parameters())
    loss_of(model, next(batches(1))).backward()
    other.step()
    optimizer = ours(model.named_parameters(), step_timeout=60.0)
    state, told, off = other.state_dict(), [], 0.0
    for _ in ('not open', 'open'):
        for fault in FAULTS:
            rotten = copy.deepcopy(state)
            if dist.get_rank() == 1:
                fault(rotten)
            try:
                optimizer.load_state_dict(rotten)
                told.append('')
            except (RuntimeError, ValueError) as error:
                told.append(str(error))
        optimizer.load_state_dict(state)
        loaded = optimizer.full_state_dict()['state']
        off = max([off] + [(loaded[i][key] - entry[key]).abs().max().item() for i, entry in state['state'].items() for key in entry])
        optimizer.step()
    optimizer.close()
    return told, off, full(model)


def late_to_a_load():
    """Rank 1 comes when rank 0 has given up: what each was told, and of the next load."""
    torch.manual_seed(3)
    model = mlp()
    other = theirs(model.parameters())
    loss_of(model, next(batches(1))).backward()
    other.step()
    optimizer = ours(model.named_parameters(), step_timeout=2.0)
    told, store = '', dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(['given_up'])
    try:
        optimizer.load_state_dict(other.state_dict())
    except RuntimeError as error:
        told = str(error)
    store.set('given_up', b'')
    dist.barrier()
    optimizer.job.options.step_timeout = 60.0
    optimizer.load_state_dict(other.state_dict())
    steps = optimizer.state[model[0].weight]['step'].item()
    optimizer.close()
    return told, steps


def state_writes():
    """Of FSDP2 and of DDP: whether other values on one rank are refused, and parameters after a reset, one entry and two steps."""
    told, parameters = [], []
    for i, wrap in enumerate((sharded, DistributedDataParallel)):
        torch.manual_seed(3)
        base = mlp()
        model, twin = wrap(copy.deepcopy(base)), wrap(copy.deepcopy(base))
        other, optimizer = theirs(twin.parameters()), bt.AdamW(model.named_parameters(), **ARGUMENTS, name=f'writes{i}',
                                                                  dram='128MiB', threads=2)
        for each, made in ((twin, other), (model, optimizer)):
            train(each, made, steps=3)
            made.state = collections.defaultdict(dict)
            train(each, made, steps=1)
            p = next(iter(each.parameters()))
            made.state[p] = {key: value if key == 'step' else value * 0.5 for key, value in made.state[p].items()}
            train(each, made, steps=1)
        for p, q in zip(full(model), full(twin)):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
        try:
            p = next(iter(model.parameters()))
            whole = {key: value.full_tensor() if hasattr(value, 'full_tensor') else value for key, value in optimizer.state[p].items()}
            optimizer.state[p] = {key: value if key == 'step' else value * (1 + dist.get_rank()) for key, value in whole.items()}
            told.append(False)
        except RuntimeError as error:
            told.append('expected the same on all' in str(error))
        parameters += full(model)
        optimizer.close()
    return told, parameters


def ways():
    """Cells of test_state_ways.py."""
    import state_ways
    servers = os.environ['BALLAST_SERVERS']
    # What of torch's functions differs between whole and sharded tensors is theirs; so, with whole ones, two of their ways.
    some = [way for way in state_ways.WAYS if way not in state_ways.DSD or way in ('get_state_dict', 'get_state_dict flat')]
    return {**state_ways.all_cells('ddp', DistributedDataParallel, servers, sys.argv[2], some),
            **state_ways.all_cells('fsdp2', sharded, servers, sys.argv[2])}


if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    for script in sys.argv[1].split(','):
        torch.save(globals()[script](), f'{sys.argv[2]}/{script}-{dist.get_rank()}.pt')
        dist.barrier()
    dist.destroy_process_group()
