"""One trainer of test_estimate_memory.py: estimate_main.py KIND CONFIG SERVERS PIDS trains three steps of a model, and prints as JSON what
estimate() told and what the processes took at their peaks, beyond this one's imports and a pass of torch over a small model. CONFIG: the
path of a transformers config.json, or '' for a plain model. SERVERS, PIDS: of named servers, or ''. It keeps its files in 'state'."""
import ctypes
import gc
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import ballast
import ballast.torch as bt

# Arguments of estimate() and of the optimizer. Of the plain model; and what is different for the configuration, which has four times as
# many parameters.
KINDS = {
    'memory': ({'dram': '2GiB'}, {}),
    'directory': ({'directory': 'state', 'dram': '2GiB', 'nvme': '8GiB'}, {'dram': '6GiB', 'nvme': '16GiB'}),
    'nvme': ({'directory': 'state', 'dram': '160MiB', 'nvme': '8GiB', 'dtype': torch.bfloat16}, {'dram': '400MiB', 'nvme': '16GiB'}),
    'ranks': ({'dram': '2GiB', 'dtype': torch.bfloat16}, {'dram': '4GiB'}),
    'shard': ({'dram': '2GiB', 'dtype': torch.bfloat16, 'frozen': 'working'}, {'dram': '4GiB'}),
    'shard_alone': ({'dram': '2GiB', 'dtype': torch.bfloat16, 'frozen': 'working'}, {'dram': '4GiB'}),
    'muon': ({'optimizer': 'muon', 'dram': '2GiB'}, {}),
    'muon_ranks': ({'optimizer': 'muon', 'dram': '2GiB', 'dtype': torch.bfloat16}, {'dram': '4GiB'}),
    'muon_shard': ({'optimizer': 'muon', 'dram': '2GiB', 'dtype': torch.bfloat16, 'frozen': 'working'}, {'dram': '4GiB'}),
    'f8_shard': ({'dram': '2GiB', 'dtype': torch.bfloat16, 'frozen': 'working', 'working': 'f8'}, {'dram': '4GiB'}),
    'experts_shard': ({'dram': '2GiB', 'dtype': torch.bfloat16, 'frozen': 'working'}, {'dram': '4GiB'}),
    'servers': ({'dram': '1GiB', 'nvme': '8GiB', 'servers': 2, 'moments': 'i8', 'dtype': torch.bfloat16}, {'dram': '2GiB'}),
}
VOCABULARY, WIDTH, BLOCKS, ROWS, STEPS = 6000, 768, 6, 4, 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Experts(nn.Module):
    """A token goes to each expert in turn."""

    def __init__(self, width, count=8):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x):
        reached = bt.reached_experts(self.experts, torch.ones(len(self.experts)))
        return x + sum(self.experts[i](x) for i in reached)


class Net(nn.Module):
    def __init__(self, vocabulary=VOCABULARY, width=WIDTH, blocks=BLOCKS, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_config(path, dtype):
    import transformers
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return bt.split_experts(model) if hasattr(config, 'num_local_experts') else model


def loss_of(model):
    out = model(torch.arange(ROWS)[None])
    return getattr(out, 'logits', out).float().square().mean()


def small(dtype, config, sharded):
    """What the first pass takes for good: code of torch, and of Python that it imports."""
    model = Net(64, 64, 1).to(dtype)
    if config:
        import transformers
        shape = {**json.loads(pathlib.Path(config).read_text(encoding='utf-8')), 'hidden_size': 64, 'intermediate_size': 64,
                 'num_hidden_layers': 1, 'vocab_size': 64, 'num_attention_heads': 2, 'num_key_value_heads': 2}
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape), dtype=dtype)
    if sharded:
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(model)
    loss_of(model).backward()


def status(pid, *names):
    fields = dict(line.split(':', 1) for line in open(f'/proc/{pid}/status', encoding='ascii'))
    return [int(fields[name].split()[0]) << 10 for name in names]


def children():
    """Of this process: the private server of several ranks."""
    return [pid for task in os.listdir('/proc/self/task')
            for pid in open(f'/proc/self/task/{task}/children', encoding='ascii').read().split()]


def start(kind, config):
    """Arguments, dtype, and the memory that this process has before anything else."""
    given = {**KINDS[kind][0], **(KINDS[kind][1] if config else {})}
    dtype = given.pop('dtype', torch.float32)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory goes back to the system at once, and a peak counts it once
    torch.set_num_threads(1)
    torch.manual_seed(5)  # ranks begin with the same values
    if 'RANK' in os.environ:
        dist.init_process_group('gloo')
    small(dtype, config, 'frozen' in given)
    gc.collect()
    pathlib.Path('/proc/self/clear_refs').write_text('5', encoding='ascii')  # the peak begins anew (proc(5))
    return given, dtype, status('self', 'VmRSS')[0]


def estimated(given, dtype, config, block):
    ranks = int(os.environ.get('WORLD_SIZE', '1'))
    if config:
        return ballast.estimate(config, dtype=dtype, ranks=ranks, **given), of_config(config, dtype)
    with torch.device('meta' if 'frozen' in given else 'cpu'):
        model = Net(block=block).to(dtype)
    return ballast.estimate(model, ranks=ranks, **given), model


def optimizer_of(model, given, servers):
    is_muon = given.get('optimizer') == 'muon'
    keys = ('moments',) if servers else ('moments', 'directory', 'dram', 'nvme')
    given = {**{key: given[key] for key in keys if key in given}, **({'servers': servers} if servers else {})}
    if is_muon:
        return bt.Muon(bt.muon_groups(model), lr=1e-4, **given)
    return bt.AdamW(model.named_parameters(), lr=1e-4, **given)


def on_disk(folder):
    return sum(path.stat().st_blocks for path in pathlib.Path(folder).rglob('*') if path.is_file()) * 512


def main(kind, config, servers, pids):
    given, dtype, before = start(kind, config)
    told, model = estimated(given, dtype, config, Experts if kind == 'experts_shard' else Block)
    if 'frozen' in given:
        bt.shard(model, working=given.get('working'))
    optimizer = optimizer_of(model, given, servers)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    found = [['trainer', status('self', 'VmHWM')[0] - before]]
    found += [['server', status(pid, 'VmHWM')[0]] for pid in (pids.split(',') if pids else children())]
    folders = [given['directory']] if 'directory' in given else pathlib.Path('servers').iterdir() if servers else []
    found += [['disk', on_disk(folder)] for folder in folders]
    print('estimate', json.dumps({'found': found, 'told': {**dict(told.processes), 'disk': told.disk}, 'text': told.text}), flush=True)
    optimizer.close()


if __name__ == '__main__':
    main(*sys.argv[1:])
