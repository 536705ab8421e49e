"""One rank of test_lost_server.py: lost_server_main.py undisturbed,disturbed FOLDER. BALLAST_TEST_SERVERS: where servers are found;
BALLAST_TEST_LOST: pid:folder of the server that is lost amid a backward pass."""
import os
import shutil
import signal

import torch.distributed as dist
from shard_main import batches, loss_of, made, main, ours, script, whole_of

import ballast.torch as bt

STEPS, LOST_AT = 8, 4


def lose():
    pid, folder = os.environ['BALLAST_TEST_LOST'].split(':', 1)
    os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def trained(name, loses):
    """Gradients go to the servers within backward, and the trainer lets their memory go: no server may lose what it took."""
    model = bt.shard(made(), push_early=True)
    optimizer = ours(model, name=name, dram=None, threads=None, servers=os.environ['BALLAST_TEST_SERVERS'], replicas=2, failover_after=1.0)
    losses = []
    for step, batch in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if loses and step == LOST_AT and dist.get_rank() == 0:
            # Gradients of the last block are on their way by then, and those of the first are not made yet.
            model.blocks[1].register_full_backward_hook(lambda *_: lose())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    result = losses, whole_of(model)
    optimizer.close()
    return result


@script
def undisturbed():
    return trained('undisturbed', loses=False)


@script
def disturbed():
    return trained('disturbed', loses=True)


if __name__ == '__main__':
    main()
