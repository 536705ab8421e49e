"""The memory of gathered()'s copies: each tensor has a storage of its own, nothing writes to one that somebody has, and the next block
takes the memory of the last."""
import mmap
import pathlib

import pytest
import torch
from own_process import run

from ballast.torch.sharding.memory import Memory

MIB = 1 << 20
SHARDED = '''
import torch.distributed as dist
from torch import nn
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
def made(name, **more):
    """Of a matrix of 6 MiB and one of 2.3; the bias is malloc's."""
    torch.manual_seed(5)
    model = bt.shard(nn.Sequential(nn.Linear(1024, 1536), nn.GELU(), nn.Linear(1536, 400)), **more)
    return model, bt.AdamW(model.named_parameters(), lr=1e-2, name=name, dram='256MiB', threads=1)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
def state(model):
    with bt.gathered(model):
        return model.state_dict()
def clones(model):
    return {name: value.clone() for name, value in state(model).items()}
def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items())
'''


def test_copies_that_outlive_their_block(tmp_path):
    run(tmp_path, SHARDED + '''
    model, optimizer = made('kept')
    step(model, optimizer)
    kept = state(model)
    before = {name: value.clone() for name, value in kept.items()}
    memory = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in kept.values()}
    assert list(memory.values()) == [value.nbytes for value in kept.values()]
    step(model, optimizer)
    now = clones(model)
    assert same(kept, before) and not any(torch.equal(kept[name], value) for name, value in now.items())
    del kept
    again = state(model)
    large = [name for name, value in again.items() if value.nbytes > 1 << 20]
    assert len(large) == 2 and all(again[name].data_ptr() in memory for name in large)
    assert same(again, now)
    optimizer.close()
    ''')


@pytest.mark.parametrize('gathers', ['torch.float32', 'torch.bfloat16'])
def test_one_element_of_a_large_copy(gathers, tmp_path):
    """It counts with write=True, and is refused by name without. With gathers of bf16 the copies are masters."""
    run(tmp_path, SHARDED + f'''
    from torch.distributed.fsdp import MixedPrecisionPolicy
    model, optimizer = made('written', mp_policy=MixedPrecisionPolicy(param_dtype={gathers}))
    step(model, optimizer)
    before = clones(model)
    assert before['0.weight'].dtype == torch.float32
    for name in ('0.weight', '2.bias'):
        try:
            with bt.gathered(model):
                model.get_parameter(name).data.view(-1)[-3] += 1
            raise AssertionError('accepted')
        except ballast.Error as error:
            assert f"parameter '{{name}}' was written to within gathered()" in str(error), error
    assert same(clones(model), before)
    with bt.gathered(model, write=True):
        model[0].weight.data[1100, 7] = 3.0
    before['0.weight'][1100, 7] = 3.0
    assert same(clones(model), before)
    optimizer.close()
    ''')


def lazily_freed(address):
    """Bytes of the mapping that the kernel may take without writing them anywhere; with those that it has taken, or never gave.
    None: it does not tell."""
    inside, found = False, {}
    for line in pathlib.Path('/proc/self/smaps').read_text(encoding='utf-8').splitlines():
        first = line.split()[0]
        if '-' in first and not first.endswith(':'):
            begin, end = (int(each, 16) for each in first.split('-'))
            inside = begin <= address < end
        elif inside and first in ('Size:', 'Rss:', 'LazyFree:'):
            found[first] = int(line.split()[1]) << 10
    lazy = found.get('LazyFree:')
    return (lazy, None if lazy is None else lazy + found['Size:'] - found['Rss:'])


class Locked(mmap.mmap):
    def madvise(self, *_):
        raise OSError('as a kernel has it that knows none, or for locked memory')


def test_memory_that_the_system_takes_no_advice_on(monkeypatch):
    monkeypatch.setattr(mmap, 'mmap', Locked)
    memory = Memory(seldom=True)
    first = memory.take(MIB, torch.float32).fill_(1)
    del first
    assert bool((memory.take(MIB, torch.float32) == 0).all())  # new memory


def test_memory_between_uses():
    memory = Memory(seldom=True)
    first = memory.take(3 * MIB, torch.float32).fill_(1)
    address, rest = first.data_ptr(), first.numpy()[5:]
    assert lazily_freed(address)[0] in (0, None)
    del first
    second = memory.take(3 * MIB, torch.float32).fill_(2)
    assert second.data_ptr() != address and (rest == 1).all()
    del rest
    _, freed = lazily_freed(address)
    assert freed is None or freed > 6 * MIB
    third = memory.take(3 * MIB - 100, torch.float32).fill_(3)  # in as many pages
    assert third.data_ptr() == address and lazily_freed(address)[0] in (0, None)
    assert bool((second == 2).all()) and third.untyped_storage().nbytes() == third.nbytes == 12 * MIB - 400
    assert memory.take(0, torch.float32).numel() == 0
    assert address % mmap.PAGESIZE == 0
