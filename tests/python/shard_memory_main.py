"""One rank of test_shard_memory.py: shard_memory_main.py NAME BLOCKS ALLOWED SERVERS FOLDER trains a model of BLOCKS blocks for a few
steps, and writes to FOLDER how much memory that took. ALLOWED: bytes of data that the process may take beyond its start. The start is
behind the imports, the process group, and a pass over one plain block. NAME: the job's; 'kept' keeps gradients in the trainer."""
import gc
import json
import os
import resource
import sys

STACK = 1 << 20
if __name__ == '__main__' and resource.getrlimit(resource.RLIMIT_STACK)[0] != STACK:
    # Stacks of threads are as large as this limit was when the process began, and count as data. Before the imports, which take seconds.
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ballast.torch as bt  # noqa: E402

WIDTH, ROWS = 896, 2
STEPS = 3


class Block(nn.Module):
    """12.25 MiB of parameters, and some."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def memory(what):
    """Bytes of this process, as /proc/self/status tells them."""
    with open('/proc/self/status', encoding='ascii') as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what + ':'))


def begin(allowed):
    """Libraries take their memory. From here on every allocation beyond `allowed` fails (RLIMIT_DATA: the heap, private mappings, stacks of
    threads). Returns the bytes that are resident now."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    Net(1)(torch.randn(ROWS, WIDTH)).square().mean().backward()
    from torch.distributed.fsdp import fully_shard  # noqa: F401, PLC0415
    gc.collect()
    data = memory('VmData') + allowed
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')
    return memory('VmRSS')


def train(name, blocks, servers):
    """Bytes of the model's parameters, and the losses."""
    with torch.device('meta'):
        model = Net(blocks)
    bt.shard(model, prefetch_bytes=16 << 20, push_early=name != 'kept')
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-5, servers=servers, name=name, durability='none')
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    optimizer.close()
    return sum(p.numel() * p.element_size() for p in model.parameters()), losses


def main():
    name, blocks, allowed, servers, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    start = begin(allowed)
    parameters, losses = train(name, blocks, servers)
    with open(f'{folder}/{name}-{dist.get_rank()}.json', 'w', encoding='utf-8') as file:
        json.dump({'parameters': parameters, 'peak': memory('VmHWM') - start, 'losses': losses}, file)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
