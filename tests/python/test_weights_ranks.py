"""shard(weights=) on two ranks: each reads its own parts, and replicas must read the same."""
import json

import pytest
import test_shard
import torch
from shard_main import made
from test_weights import assert_equal, read
from weights_main import Pair

safetensors = pytest.importorskip('safetensors.torch')


def save(model, folder):
    """Two files and an index, without the second name of a tied tensor."""
    folder.mkdir()
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    index = {name: f'{"ab"[i % 2]}.safetensors' for i, name in enumerate(tensors)}
    for file in 'ab':
        safetensors.save_file({name: value for name, value in tensors.items() if index[name][0] == file}, folder / f'{file}.safetensors')
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp('pair')
    model = made()
    save(model, folder / 'in')
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save(model, folder / 'other')
    torch.manual_seed(2)
    safetensors.save_file({name: value.detach() for name, value in Pair().named_parameters()}, folder / 'pair.safetensors')
    return test_shard.run(['shares', 'replicas', 'columns'], folder, script='weights_main.py'), folder


def total(folder):
    return sum(value.nbytes for value in read(folder).values())


def test_each_rank_reads_its_parts(pair):
    done, folder = pair
    assert sum(read for read, _, _ in done['shares']) == total(folder / 'in')
    for _, (came, expected), whole in done['shares']:
        assert torch.equal(came, expected)
        assert_equal(read(folder / 'trained'), whole)
    assert_equal(read(folder / 'saved'), read(folder / 'in'))


def test_replicas(pair):
    done, folder = pair
    for read_bytes, said in done['replicas']:
        assert read_bytes <= total(folder / 'in')
        assert 'weights=' in said and 'on rank 0 and' in said and 'on rank 1' in said, said


def test_columns(pair):
    done, folder = pair
    expected = safetensors.load_file(folder / 'pair.safetensors')
    for whole in done['columns']:
        assert_equal(whole, expected)
