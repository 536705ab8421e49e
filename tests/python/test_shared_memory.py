"""Parameters over one memory: one update would be lost under the other's."""
import pytest
import torch
from torch import nn

import ballast
import ballast.torch as bt

SHARED = "share memory (tied by .data?), so the update of one would be lost. Use one Parameter under both names"


def tied_by_data():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    model[1].weight.data = model[0].weight.data
    return model.named_parameters()


def a_slice_and_the_whole():
    buffer = torch.randn(12)
    return [('whole', nn.Parameter(buffer)), ('part', nn.Parameter(buffer[8:10]))]


def a_transposed_view():
    buffer = torch.randn(4, 6)
    return [('one', nn.Parameter(buffer)), ('other', nn.Parameter(buffer.t()))]


def columns_that_meet():
    buffer = torch.randn(4, 6)
    return [('left', nn.Parameter(buffer[:, :3])), ('right', nn.Parameter(buffer[:, 2:]))]


def another_dtype():
    buffer = torch.zeros(8)
    return [('f32', nn.Parameter(buffer)), ('bf16', nn.Parameter(buffer.view(torch.bfloat16)[14:]))]


def two_storages():
    array = torch.zeros(8).numpy()
    return [('one', nn.Parameter(torch.from_numpy(array))), ('other', nn.Parameter(torch.from_numpy(array)))]


def slices():
    buffer = torch.randn(10)
    return [('a', nn.Parameter(buffer[:3])), ('b', nn.Parameter(buffer[3:10])), ('empty', nn.Parameter(buffer[2:2]))]


def columns():
    buffer = torch.randn(4, 6)
    return [('even', nn.Parameter(buffer[:, ::2])), ('odd', nn.Parameter(buffer[:, 1::2]))]


def blocks():
    buffer = torch.randn(4, 6)
    return [(str(i), nn.Parameter(part)) for i, part in enumerate(buffer.split(2, dim=1))]


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group['params']:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize('make', [tied_by_data, a_slice_and_the_whole, a_transposed_view, columns_that_meet, another_dtype, two_storages])
def test_shared_memory_is_refused_by_both_names(make, job):
    parameters = list(make())
    optimizer = bt.AdamW(parameters, **job)
    with pytest.raises(ballast.Error, match='^parameters ') as raised:
        step(optimizer)
    first, second = (name for name, parameter in parameters if 'bias' not in name)
    assert f"'{first}'" in str(raised.value) and f"'{second}'" in str(raised.value) and SHARED in str(raised.value)


@pytest.mark.parametrize('make', [slices, columns, blocks])
def test_memory_side_by_side_is_none(make, job):
    parameters = list(make())
    twins = [nn.Parameter(parameter.detach().clone()) for _, parameter in parameters]
    step(bt.AdamW(parameters, lr=1e-2, **job))
    step(torch.optim.AdamW(twins, lr=1e-2))
    for (_, parameter), twin in zip(parameters, twins):
        torch.testing.assert_close(parameter, twin)


def test_elements_that_share_memory(job):
    optimizer = bt.AdamW([('w', nn.Parameter(torch.zeros(1).expand(4)))], **job)
    with pytest.raises(ballast.Error, match="'w' has elements that share memory.*clone"):
        optimizer.resume()


def test_parameters_that_are_tied_later(job):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    optimizer = bt.AdamW(model.named_parameters(), **job)
    step(optimizer)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ballast.Error, match="'0.weight' and '1.weight' share memory|'1.weight' and '0.weight' share memory"):
        step(optimizer)
    model[1].weight.data = model[1].weight.data.clone()
    step(optimizer)


def test_a_late_parameter_that_shares_memory(job):
    first = nn.Parameter(torch.zeros(4))
    optimizer = bt.AdamW([('first', first)], **job)
    step(optimizer)
    optimizer.add_param_group({'params': [('late', nn.Parameter(first.detach()[2:]))]})
    with pytest.raises(ballast.Error, match="'first' and 'late' share memory"):
        step(optimizer)
