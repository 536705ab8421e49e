"""ballast.estimate's bytes of each process are what the processes take."""
import json
import re

import pytest
from own_process import Process
from test_ranks import free_port

SCRIPT = '''
import ctypes, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import ballast, ballast.torch as bt
torch.set_num_threads(1)
torch.manual_seed(5)
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once, and is not counted
kind, world = sys.argv[1], int(os.environ.get('WORLD_SIZE', 1))
if 'RANK' in os.environ:
    dist.init_process_group('gloo')

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(32))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def taken(pid, *kinds):
    fields = dict(line.split(':', 1) for line in open(f'/proc/{pid}/status'))
    return sum(int(fields[kind].split()[0]) << 10 for kind in kinds)

def trainer():
    return taken('self', 'RssAnon', 'RssShmem')

def servers():
    # Children of this process. What a server shares with trainers is counted there.
    tasks = os.listdir('/proc/self/task')
    return [taken(pid, 'RssAnon') for task in tasks for pid in open(f'/proc/self/task/{task}/children').read().split()]

nn.Linear(8, 8)(torch.ones(8)).sum().backward()  # what the first backward pass takes for good
before = trainer()
with torch.device('meta' if kind == 'shard' else 'cpu'):
    model = Net()
if kind == 'shard':
    bt.shard(model, units=list(model.blocks), prefetch_bytes=16 << 20)
told = ballast.estimate(model, dram='2GiB', ranks=world, frozen='working' if kind == 'shard' else None, prefetch_bytes=16 << 20)
optimizer = bt.AdamW(model.named_parameters(), lr=1e-4, dram='2GiB', threads=1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
found = {'trainer': trainer() - before, **{'server': size for size in servers()}}
print('found', json.dumps(found), 'told', json.dumps(dict(told.processes)), flush=True)
optimizer.close()
'''


@pytest.mark.parametrize('kind, ranks', [('plain', 1), ('plain', 2), ('shard', 1)])
def test_each_process_takes_what_was_told(kind, ranks, tmp_path):
    """A plain loop in one process, two ranks with a private server, and shard() on one rank; 32M parameters in bf16."""
    script, port = tmp_path / 'script.py', str(free_port())
    script.write_text(SCRIPT, encoding='utf-8')
    group = [{'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(ranks), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
             if ranks > 1 or kind == 'shard' else {} for rank in range(ranks)]
    processes = [Process(script, tmp_path, tmp_path / f'{rank}.log', kind, **variables) for rank, variables in enumerate(group)]
    codes = [process.wait() for process in processes]
    said = '\n'.join(process.output for process in processes)
    assert codes == [0] * ranks, said
    print(said)
    for rank, process in enumerate(processes):
        found, told = (json.loads(text) for text in re.search(r'found (\{.*\}) told (\{.*\})', process.output).groups())
        assert set(found) == ({'trainer', 'server'} if ranks > 1 and rank == 0 else {'trainer'})
        for name, size in found.items():
            # How much of what shard() sends and pulls ahead is on its way at one time, no two runs have alike: told is the most.
            on_its_way = (64 + 16) << 20 if kind == 'shard' else 0
            assert 0.95 * (told[name] - on_its_way) <= size <= 1.05 * told[name], (name, size / 2**20, told[name] / 2**20)
