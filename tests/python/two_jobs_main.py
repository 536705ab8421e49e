"""One rank of three of test_two_jobs.py: two_jobs_main.py FOLDER [CASE...], with torch's variables: two optimizers with one directory, and
optimizers of some ranks alone."""
import copy
import functools
import sys

import torch
import torch.distributed as dist
from agreement_main import parameters_of, run_cases, told
from scripts import batches, loss_of, mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ballast
import ballast.torch as bt

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def make(parameters, name, **more):
    return bt.AdamW(parameters, **{'lr': 1e-2, 'name': name, 'dram': '64MiB', 'nvme': '512MiB', 'threads': 1, 'step_timeout': 120, **more})


def model_of(seed):
    torch.manual_seed(seed)
    return mlp()


@functools.cache
def pair():
    """Of ranks 1 and 2, made by all ranks."""
    return dist.new_group([1, 2])


def train(models, optimizers, steps=3):
    for _ in range(steps):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            for batch in batches(1, seed=5):
                loss_of(model, batch).backward()
            optimizer.step()


@functools.cache
def expected(seed):
    """torch's parameters after training alone: each rank has the same batch."""
    model = model_of(seed)
    train([model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    return parameters_of(model)


def error_of(model, seed):
    return float((parameters_of(model) - expected(seed)).abs().max())


def whole(model):
    values = [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in values])


# --- one directory

@case
def actor_and_critic():
    models = [DistributedDataParallel(model_of(seed)) for seed in (0, 1)]
    optimizers = [make(model.named_parameters(), name, directory='both') for model, name in zip(models, ('actor', 'critic'))]
    train(models, optimizers)
    errors = [error_of(model, seed) for seed, model in enumerate(models)]
    optimizers[0].close()
    train(models[1:], optimizers[1:], 1)  # the server stays for the other
    third = make(models[0].named_parameters(), 'actor', directory='both', dram=None, nvme=None, resume='must')
    found = third.resume().step
    third.close()
    optimizers[1].close()
    dist.barrier()
    there = ballast.jobs('both') if dist.get_rank() == 0 else ['actor', 'critic']
    return errors, found, there


@case
def other_budgets():
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    for model in (first, second, third):
        DistributedDataParallel(model)  # makes them alike
    one = make(first.named_parameters(), 'one', directory='budgets')
    one.resume()
    said = told(make(second.named_parameters(), 'two', directory='budgets', dram='65MiB').resume)
    two = make(third.named_parameters(), 'two', directory='budgets', dram=64 << 20)
    after = told(two.resume)
    one.close()
    two.close()
    return said, after


@case
def sharded_in_one_directory():
    models = [bt.shard(model_of(seed)) for seed in (0, 1)]
    optimizers = [make(model.named_parameters(), name, directory='sharded') for model, name in zip(models, ('actor', 'critic'))]
    train(models, optimizers)
    errors = []
    for seed, model in enumerate(models):
        with bt.gathered(model):
            errors.append(float((whole(model) - expected(seed)).abs().max()))
    for optimizer in optimizers:
        optimizer.close()
    return errors


# --- group=

@case
def on_one_rank_each():
    """As a single rank's: its server is within its process."""
    groups = [dist.new_group([rank]) for rank in range(3)]
    rank = dist.get_rank()
    model = model_of(rank)
    optimizer = make(model.named_parameters(), 'alone', group=groups[rank])
    train([model], [optimizer])
    served = optimizer.job.connection._use is not None
    optimizer.close()
    return error_of(model, rank), served, told(lambda: make(mlp().named_parameters(), 'other', group=groups[(rank + 1) % 3]))


@case
def on_two_of_three():
    """Ranks 1 and 2 are 0 and 1 of their group; rank 0 trains something else meanwhile, in a group of all."""
    group, both = pair(), DistributedDataParallel(model_of(0))
    of_all = make(both.named_parameters(), 'all')
    if dist.get_rank() == 0:
        train([both], [of_all])
        of_all.close()
        return error_of(both, 0), None, None
    model = DistributedDataParallel(model_of(1), process_group=group)
    of_two = make(model.named_parameters(), 'two', group=group)
    train([both, model], [of_all, of_two])
    said = of_two.job.group.rank, of_two.job.options.world_size
    of_two.close()
    of_all.close()
    return error_of(both, 0), error_of(model, 1), said


@case
def fully_sharded_over_two_of_three():
    group = pair()
    if dist.get_rank() == 0:
        return None
    model = model_of(1)
    fully_shard(model, mesh=DeviceMesh.from_group(group, 'cpu'))
    optimizer = make(model.named_parameters(), 'fsdp', group=group)
    train([model], [optimizer])
    state = optimizer.full_state_dict()
    optimizer.load_state_dict(copy.deepcopy(state))
    found = float((whole(model) - expected(1)).abs().max())
    optimizer.close()
    return found


@case
def shard_over_two_of_three():
    group = pair()
    if dist.get_rank() == 0:
        return None
    model = bt.shard(model_of(1), mesh=DeviceMesh.from_group(group, 'cpu'))
    optimizer = make(model.named_parameters(), 'shard', group=group)
    train([model], [optimizer])
    with bt.gathered(model):
        found = float((whole(model) - expected(1)).abs().max())
    optimizer.close()
    return found


@case
def a_mesh_beyond_the_group():
    group = pair()
    model = fully_shard(model_of(1))
    if dist.get_rank() == 0:
        return None
    return told(make(model.named_parameters(), 'beyond', group=group).resume)


if __name__ == '__main__':
    sys.argv[1:] or sys.exit(__doc__)
    run_cases(CASES, 'two_jobs')
