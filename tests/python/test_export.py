"""State that leaves a job in files and comes back: safetensors, torch's Distributed Checkpoint."""
import json
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ballast
import ballast.torch as bt

DTYPES = [torch.float32, torch.bfloat16]


def make_model(dtype):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.ReLU(), torch.nn.Linear(70, 5)).to(dtype)


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(16, 33, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(model, job, name, **more):
    return bt.AdamW(model.named_parameters(), lr=1e-2, **{**job, 'name': job['name'] + name}, **more)


def uninterrupted(job, dtype):
    model = make_model(dtype)
    return train(model, make(model, job, '-whole'), 8)


def torch_through_dcp(folder):
    """The same script with torch's optimizer, in fp32."""
    losses, model = [], None
    for first in (0, 4):
        model = make_model(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if first:
            train(model, optimizer, 1, first=77)
            state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state['model'])
            optimizer.load_state_dict(state['optimizer'])
        losses += train(model, optimizer, 4, first=first)
        if not first:
            dcp.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, checkpoint_id=folder)
    return losses


@pytest.mark.parametrize('dtype', DTYPES)
def test_safetensors_round_trip(job, tmp_path, dtype):
    expected = uninterrupted(job, dtype)
    model = make_model(dtype)
    first = make(model, job, '-a')
    losses = train(model, first, 4)
    bt.export_state(first, tmp_path / 'state')
    torch.save(model.state_dict(), tmp_path / 'model.pt')
    other = make_model(dtype)
    other.load_state_dict(torch.load(tmp_path / 'model.pt'))
    second = make(other, job, '-b')
    bt.import_state(second, tmp_path / 'state')
    assert losses + train(other, second, 4, first=4) == expected  # the same bits


@pytest.fixture
def exported(job, tmp_path):
    model = make_model(torch.float32)
    optimizer = make(model, job, '-exported')
    train(model, optimizer, 2)
    bt.export_state(optimizer, tmp_path / 'state')
    return model, tmp_path / 'state'


def test_a_flipped_bit_is_refused(job, exported):
    model, folder = exported
    shard = folder / 'state-00001.safetensors'
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    fresh = make(model, job, '-fresh')
    with pytest.raises(ballast.Error, match='not what was exported'):
        bt.import_state(fresh, folder)
    assert fresh.job.opened is None  # nothing was begun
    shard.write_bytes(data[:-100])
    with pytest.raises(ballast.Error, match='another copy') as error:
        bt.import_state(fresh, folder)
    assert error.value.reason == 'CHECKSUM'


def test_what_is_no_export_is_refused(job, exported):
    model, folder = exported
    fresh = make(model, job, '-fresh')
    with pytest.raises(ballast.Error, match='not empty'):
        bt.export_state(fresh, folder)
    sgd = bt.SGD(model.named_parameters(), lr=1e-2, **{**job, 'name': job['name'] + '-sgd'})
    with pytest.raises(ballast.Error, match='is of adamw'):
        bt.import_state(sgd, folder)
    index = folder / 'state.safetensors.index.json'
    text = index.read_text()
    evil = json.loads(text)
    evil['weight_map'] = {name: '../' + file for name, file in evil['weight_map'].items()}
    index.write_text(json.dumps(evil))
    with pytest.raises(ballast.Error, match='not in the folder itself'):
        bt.import_state(fresh, folder)
    index.write_text(text[:-20])
    with pytest.raises(ballast.Error, match='cannot be read'):
        bt.import_state(fresh, folder)
    os.remove(index)  # written last: an export that did not end has none
    with pytest.raises(ballast.Error, match='did not end'):
        bt.import_state(fresh, folder)
    other = torch.nn.Linear(3, 3)
    index.write_text(text)
    with pytest.raises(ballast.Error, match='other parameters'):
        bt.import_state(make(other, job, '-other'), folder)


@pytest.mark.parametrize('dtype', DTYPES)
def test_distributed_checkpoint_round_trip(job, tmp_path, dtype):
    """The state itself, by DCP: into a template made of the new optimizer's own."""
    expected = uninterrupted(job, dtype)
    model = make_model(dtype)
    first = make(model, job, '-a')
    losses = train(model, first, 4)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch: no process group
        dcp.save({'model': model.state_dict(), 'optimizer': first.full_state_dict()}, checkpoint_id=tmp_path / 'dcp')
        other = make_model(dtype)
        second = make(other, job, '-b')
        train(other, second, 1, first=77)  # so that there is state to be overwritten
        state = {'model': other.state_dict(), 'optimizer': second.full_state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / 'dcp')
        reference = torch_through_dcp(tmp_path / 'torch') if dtype == torch.float32 else None
    other.load_state_dict(state['model'])
    second.load_state_dict(state['optimizer'])
    losses += train(other, second, 4, first=4)
    assert losses == expected
    if reference is not None:
        assert losses == pytest.approx(reference, rel=1e-5)


def test_torchs_helpers_of_distributed_checkpoints(job):
    """get_state_dict and set_state_dict know parameters by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = make_model(torch.float32)
    optimizer = make(model, job, '-first')
    train(model, optimizer, 3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert set(optimizer_state['state']) == {name for name, _ in model.named_parameters()}
    other = make_model(torch.float32)
    second = make(other, job, '-second')
    set_state_dict(other, second, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert train(model, optimizer, 2, first=3) == train(other, second, 2, first=3)
