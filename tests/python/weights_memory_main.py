"""A trainer of test_weights_memory.py, on one rank: weights_memory_main.py load|resume WIDTH BLOCKS CHECKPOINT SERVERS FOLDER. `load`
begins a job from the checkpoint, writes the weights to FOLDER/saved, and trains; `resume` goes on with that job. Both write to FOLDER how
much memory each part took beyond the start, which is behind the imports, the process group and a pass over one plain block."""
import contextlib
import ctypes
import gc
import json
import os
import sys

import shard_memory_main as memory_main
import torch
import torch.distributed as dist

import ballast.torch as bt

STEPS = 2
peaks = {}


@contextlib.contextmanager
def peak(what, start):
    """Peak of resident memory in the block, beyond the start."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the heap's peak is not a peak of the next block
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')
    yield
    peaks[what] = memory_main.memory('VmHWM') - start


def from_disk():
    """Bytes that this process has read from storage."""
    with open('/proc/self/io', encoding='ascii') as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith('read_bytes:'))


def train(model, optimizer):
    losses = []
    x = torch.randn(memory_main.ROWS, memory_main.WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    what, width, blocks, checkpoint, servers, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    memory_main.WIDTH = width
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    memory_main.Net(1)(torch.randn(memory_main.ROWS, width)).square().mean().backward()
    from torch.distributed.fsdp import fully_shard  # noqa: F401, PLC0415
    gc.collect()
    start, read_before = memory_main.memory('VmRSS'), from_disk()
    with torch.device('meta'):
        model = memory_main.Net(blocks)
    model.blocks[:int(os.environ.get('WEIGHTS_FROZEN', '0'))].requires_grad_(False)
    with peak(what, start):
        bt.shard(model, weights=checkpoint, prefetch_bytes=16 << 20)
        optimizer = bt.SGD(model.named_parameters(), lr=1e-5, servers=servers, name='job', durability='none', step_timeout=600.0,
                             resume='must' if what == 'resume' else 'never')
        begun = optimizer.resume().step
    read_then = from_disk()
    if what == 'load':
        with peak('save', start):
            bt.save_weights(model, f'{folder}/saved')
    with peak('train', start):
        losses = train(model, optimizer)
    read = optimizer.stats()['weights_bytes']
    optimizer.close()
    with open(f'{folder}/{what}.json', 'w', encoding='utf-8') as file:
        json.dump({'peaks': peaks, 'begun': begun, 'losses': losses, 'read': read, 'from disk': read_then - read_before,
                   'start': start}, file)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
