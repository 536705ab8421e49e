"""Optimizer state through torch.distributed.checkpoint: DTensors of every wrapping, and other divisions, between our optimizer and
torch's."""
import os
import pathlib

import pytest
import torch
from own_process import Process, free_port

HERE = pathlib.Path(__file__).parent
WRAPPINGS = ['uneven', 'last_dimension', 'sequence_parallel', 'fsdp_by_tensor_parallel', 'pipeline_gpipe', 'experts_by_fsdp']
SHARDED = ['sharded_fsdp_by_tensor_parallel', 'sharded_pipeline_gpipe']
# (data, tensor, pipeline) that states saved by (2, 2, 1) are loaded at.
DIVISIONS = [(4, 1, 1), (1, 2, 2), (1, 1, 1)]
if os.environ.get('TEST_ROUNDS') == 'full':  # as well those of which the others are made
    WRAPPINGS += ['fsdp2', 'hsdp', 'tensor_parallel']
    SHARDED += ['sharded_uneven', 'sharded_hsdp', 'sharded_tensor_parallel']
    DIVISIONS += [(2, 1, 2), (1, 2, 1)]
WAYS = ['ours to ours', 'ours to theirs', 'theirs to ours']


def run(world, scripts, folder, **variables):
    port = str(free_port())
    ranks = [Process(HERE / 'dcp_main.py', folder, folder / f'{rank}.log', ','.join(scripts), folder, MASTER_ADDR='127.0.0.1',
                     MASTER_PORT=port, WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank), **variables) for rank in range(world)]
    codes = [rank.wait(1500) for rank in ranks]
    assert codes == [0] * world, '\n'.join(rank.output for rank in ranks)


def came(folder, name, world=4, suffix=''):
    for rank in range(world):
        found = torch.load(folder / f'{name}-{rank}{suffix}.pt', weights_only=False)
        assert not isinstance(found, str), f'rank {rank}: {found}'
        yield found


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dcp')
    run(4, [*WRAPPINGS, *SHARDED, 'save_divided', 'shard_divided', 'durable', 'torchtitan', 'streamed'], folder)
    return folder


@pytest.mark.parametrize('name', WRAPPINGS + SHARDED)
def test_wrapping(results, name):
    """Kinds as torch's, parts as the servers', moments that come back bit for bit, and torch's losses after a load either way."""
    for found in came(results, name):
        assert found['kinds'] == {} and found['parts'] == []
        close(found['ours'], found['theirs'])
        for way in WAYS:
            assert found.get(f'{way}, moments', []) == []
            close(found[way], found['theirs'])
        assert torch.equal(found['ours to ours'], found['ours']), 'a job that goes on from its own state makes the same steps, bit for bit'


@pytest.mark.parametrize('division', DIVISIONS, ids=str)
def test_other_division(results, division):
    world = division[0] * division[1] * division[2]
    said = ','.join(map(str, division))
    run(world, ['load_divided'], results, DIVISION=said, SUFFIX=f'-{said}')
    unbroken = next(came(results, 'save_divided'))
    close(unbroken['ours'], unbroken['theirs'])
    for found in came(results, 'load_divided', world, f'-{said}'):
        assert len(found) == (5 if division[2] > 1 else 10)
        for key, value in found.items():
            if key[-1] == 'moments':
                assert value == [], key
            else:
                torch.testing.assert_close(value, unbroken['theirs'], rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f'{key}: {text}')


def test_shard(results):
    """A model of shard(): its state_dict has what the servers have, and goes both ways, also in whole tensors."""
    unbroken = next(came(results, 'save_divided'))['theirs']
    for found in came(results, 'shard_divided'):
        assert found.pop('values') == []
        assert "a module below the one that shard() was given, with parameter '0.norm.weight'" in found.pop('below')
        assert len(found) == 7
        for key, value in found.items():
            torch.testing.assert_close(value, unbroken, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f'{key}: {text}')


def test_durable(results):
    for found in came(results, 'durable'):
        assert found['named'] == ['ballast'] and found['moments'] == []
        close(found['there'], found['ours'])
        assert "the state's group of parameter '0.norm.weight' has no 'lr', nor other options of group 0" in found['nested']


def test_torchtitan(results):
    for found in came(results, 'torchtitan'):
        assert len(found) == 5
        for value in found.values():
            close(value, found['theirs'])


def test_full_states_are_streamed(results):
    """8 tensors of 8 MiB have moments of 128 MiB: a rank reads a quarter, and has a tensor or two at a time beside it. Rank 0 keeps all."""
    for rank, found in enumerate(came(results, 'streamed')):
        assert found['right'] and found['differs'] == []
        sharded, full = (found['peaks'][key] / 2**20 for key in ('sharded', 'full'))
        assert sharded < 32 + 12
        assert rank == 0 or full < 32 + 32
