"""One rank of test_gathers.py: gathers_main.py SCRIPT FOLDER, as shard_main.py. Passes that are not the same on all ranks."""
import time

import torch.distributed as dist
from shard_main import batches, loss_of, made, main, ours, script, told

import ballast.torch as bt


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
def absent():
    """What ranks are told whose last one makes no pass, and the seconds until then."""
    model = bt.shard(made())
    optimizer = ours(model, step_timeout=4.0)
    optimizer.resume()
    before, said = time.monotonic(), ''
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(12)
    else:
        said = told(lambda: model(next(batches(1))))
    seconds = time.monotonic() - before
    dist.distributed_c10d._get_default_store().set(f'told/{dist.get_rank()}', b'')
    for rank in range(dist.get_world_size()):
        dist.distributed_c10d._get_default_store().wait([f'told/{rank}'])
    optimizer.close()
    return said, seconds


if __name__ == '__main__':
    main(barrier=False)
