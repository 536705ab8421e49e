"""state_dict() changes nothing, and a state that was taken while parameters held edits leaves parameters as they are when it is loaded."""
import copy
import pathlib
import warnings

import pytest
import torch
from scripts import mlp, train

import ballast.torch as bt


@pytest.fixture
def durable(job, tmp_path):
    return {**job, 'directory': tmp_path, 'nvme': '1GiB', 'lr': 1e-2, 'resume': 'auto'}


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def masters(optimizer, model):
    return [optimizer.state[parameter]['master'].clone() for parameter in model.parameters()]


@torch.no_grad()
def write(model, values):
    for parameter, value in zip(model.parameters(), values):
        parameter.data.copy_(value)


def halved(model):
    return [value * 0.5 for value in bits(model)]


def left_alone(optimizer, model, before, version):
    """The masters are those of the job's version, now and after a step without gradients."""
    assert optimizer.job.opened.session.version == version
    assert same(masters(optimizer, model), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = None
    optimizer.step()
    assert same(masters(optimizer, model), before)
    optimizer.close()


def test_an_average_that_was_swapped_in_saved_and_swapped_back_leaves_the_masters(durable):
    model = mlp().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), **durable)
    train(model, optimizer, steps=3)
    own, before, version = bits(model), masters(optimizer, model), optimizer.job.opened.session.version
    write(model, halved(model))
    optimizer.state_dict()
    optimizer.full_state_dict()
    write(model, own)
    left_alone(optimizer, model, before, version)


def test_an_average_that_was_saved_as_a_universal_checkpoint_leaves_the_masters(durable, tmp_path):
    model = mlp().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), **durable)
    train(model, optimizer, steps=3)
    own, before, version = bits(model), masters(optimizer, model), optimizer.job.opened.session.version
    write(model, halved(model))
    with torch.no_grad():
        model[0].weight.view(-1)[0] = own[0].view(-1)[0]  # its master rounds to it, and is saved whole
    path = pathlib.Path(bt.save_universal(optimizer, tmp_path / 'universal'))
    saved = {name: torch.load(path / 'zero' / name / 'fp32.pt')['param'] for name, _ in model.named_parameters()}
    expected = {name: value.detach().float() for name, value in model.named_parameters()}
    expected['0.weight'].view(-1)[0] = before[0].view(-1)[0]
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    write(model, own)
    left_alone(optimizer, model, before, version)


@pytest.mark.parametrize('order', ['model first', 'optimizer first'])
@pytest.mark.parametrize('anew', [False, True])
def test_both_states_saved_with_an_edit_come_back_with_it(order, anew, durable):
    """As a loop that clamps after each step saves them: no step has taken the edit."""
    model = mlp().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), **durable)
    train(model, optimizer, steps=3)
    write(model, halved(model))
    with torch.no_grad():
        model[0].weight[0] = 2.0
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, steps=3)
    after = bits(model)
    if anew:
        optimizer.close()
        torch.manual_seed(9)
        model = mlp().bfloat16()
        optimizer = bt.AdamW(model.named_parameters(), **durable)
    if order == 'model first':
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    else:
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
    assert same(bits(model), saved[0].values())
    assert train(model, optimizer, steps=3) == expected
    assert same(bits(model), after)
    optimizer.close()


def test_a_state_without_edits_brings_its_parameters_and_names_those_that_it_overwrites(durable):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **durable)
    train(model, optimizer, steps=3)
    own, saved = bits(model), copy.deepcopy(optimizer.state_dict())
    write(model, halved(model))
    with pytest.warns(UserWarning, match="'0.weight' and 5 others, which were written to since the last step, now hold the value of"):
        optimizer.load_state_dict(saved)
    assert same(bits(model), own)
    write(model, [value.clone() for value in own])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        optimizer.load_state_dict(saved)
    optimizer.close()
