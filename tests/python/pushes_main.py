"""One rank of test_pushes.py and test_gpu_shard.py: pushes_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py. Gradients of shard() on
their way, and what fails there; the server of a single rank."""
import contextlib
import sys

import torch
import torch.distributed as dist
from shard_main import batches, both, loss_of, made, main, ours, plain, script, theirs, told
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.sharding import pushes
from ballast.torch.steps import background
from ballast.torch.tensors import memory


def step(model, optimizer, tokens):
    """The loss before it."""
    optimizer.zero_grad()
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    return loss.item()


@contextlib.contextmanager
def elsewhere():
    """Gradients go the way of a GPU's, by a copy and a thread that waits for it, also on CPUs."""
    kept = pushes.is_elsewhere
    pushes.is_elsewhere = lambda gradient: True
    try:
        yield
    finally:
        pushes.is_elsewhere = kept


@script
def early_copied():
    with elsewhere():
        return both('early_copied', push_early=True)


@script
def push_failed():
    """What step() is told where the second of a step's pushes failed behind backward, and losses of training that goes on; a twin's."""
    twin, model = plain(made()), bt.shard(made())
    other, optimizer = theirs(twin.parameters()), ours(model)
    push, failing = background._push, []

    def fails(*arguments):
        if failing:
            failing.pop()
            if not failing:
                raise ballast.Error('the push failed', 'SERVER_DOWN')
        push(*arguments)
    background._push = fails
    losses, refusal = [], None
    try:
        with elsewhere():
            for i, tokens in enumerate(batches(6)):
                if i == 3:
                    failing[:] = [1, 1]
                    optimizer.zero_grad()
                    loss_of(model, tokens).backward()
                    refusal = told(optimizer.step)
                    optimizer.zero_grad()
                losses.append([step(twin, other, tokens), step(model, optimizer, tokens)])
    finally:
        background._push = push
    optimizer.close()
    return refusal, torch.tensor(losses)


@script
def only_push_failed():
    """What step() is told where the model has one unit and its push failed, and steps made after that."""
    model = bt.shard(nn.Linear(4, 4))
    optimizer = ours(model)
    push = background._push

    def fails(*arguments):
        raise ballast.Error('the push failed', 'SERVER_DOWN')
    with elsewhere():
        background._push = fails
        try:
            model(torch.ones(1, 4)).sum().backward()
            refusal = told(optimizer.step)
        finally:
            background._push = push
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    steps = optimizer.stats()['steps']
    dist.barrier()
    optimizer.close()
    return refusal, steps


@script
def step_not_begun():
    """What step() is told that fails before the session is asked, and losses of training that goes on; a twin's."""
    twin, model = plain(made()), bt.shard(made())
    other, optimizer = theirs(twin.parameters()), ours(model)
    wait = memory.Memory.wait

    def fails(self):
        raise ballast.Error('no memory', 'IO')
    losses, refusal = [], None
    for i, tokens in enumerate(batches(6)):
        if i == 3:
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            memory.Memory.wait = fails
            try:
                refusal = told(optimizer.step)
            finally:
                memory.Memory.wait = wait
        losses.append([step(twin, other, tokens), step(model, optimizer, tokens)])
    optimizer.close()
    return refusal, torch.tensor(losses)


@script
def own_folder():
    """Of one rank: the durability of a job without a folder, beside an optimizer that has one; the step that a job in that folder goes on
    from, when another server of the process had the folder last."""
    folder = f'{sys.argv[2]}/kept'
    plain_model = nn.Linear(4, 4)
    beside = bt.SGD(plain_model.named_parameters(), lr=0.1, name='beside', directory=folder, dram='128MiB', nvme='4GiB', threads=2)
    plain_model(torch.ones(1, 4)).sum().backward()
    beside.step()
    optimizer = ours(bt.shard(nn.Linear(4, 4)))
    optimizer.resume()
    durability = optimizer.job.options.durability
    optimizer.close()
    beside.close()
    steps = []
    for _ in range(2):
        model = bt.shard(nn.Linear(4, 4))
        optimizer = ours(model, directory=folder, nvme='4GiB', resume='auto')
        steps.append(optimizer.resume().step)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.close()
        assert sorted(ballast.jobs(folder)) == ['beside', 'own_folder']
    return durability, steps


if __name__ == '__main__':
    main()
