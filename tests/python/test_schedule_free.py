"""Schedule-free AdamW against its paper: y in training, the average in evaluation."""
import copy
import itertools
import pathlib

import pytest
import torch
import torch.distributed as dist
from own_process import Process, free_port
from schedule_free import ARGUMENTS, AdamWScheduleFree
from scripts import batches, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt

HERE = pathlib.Path(__file__).parent


def averages(model, optimizer):
    optimizer.eval()
    values = [p.detach().clone() for p in model.parameters()]
    optimizer.train()
    return values


@pytest.mark.parametrize('arguments', [{}, ARGUMENTS, {'betas': (0.95, 0.99), 'weight_lr_power': 0.0}])
def test_y_and_x_are_the_papers(arguments, job):
    model = mlp()
    twin = copy.deepcopy(model)
    theirs = AdamWScheduleFree(twin.parameters(), **arguments)
    expected = train(twin, theirs, steps=30)
    ours = bt.AdamWScheduleFree(model.named_parameters(), **arguments, **job)
    assert not ours.job.spec.master == 'lent'  # eval() writes to parameters, which must not be masters then
    came = train(model, ours, steps=30)
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    for mine, p, y in zip(averages(model, ours), twin.parameters(), before):
        torch.testing.assert_close(mine, theirs.average(p), rtol=1e-3, atol=2e-5)
        assert not torch.equal(mine, y)
    for p, y in zip(model.parameters(), before):
        assert torch.equal(p, y)
    ours.close()


def test_training_goes_on_after_an_evaluation_as_if_there_had_been_none(job):
    def trained(name, evaluates):
        torch.manual_seed(1)
        model = mlp().bfloat16()
        optimizer = bt.AdamWScheduleFree(model.named_parameters(), **ARGUMENTS, **{**job, 'name': job['name'] + name})
        if evaluates:
            optimizer.eval()  # before any step the average is y
            optimizer.eval()
            optimizer.train()
        train(model, optimizer, steps=8, after_step=lambda i: averages(model, optimizer) if evaluates and i % 3 == 0 else None)
        optimizer.eval()
        values = [p.detach().clone() for p in model.parameters()]
        optimizer.close()
        return values
    for mine, other in zip(trained('a', False), trained('b', True)):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, other)


def test_a_job_goes_on_with_its_weights(job, tmp_path):
    model = mlp()
    twin = copy.deepcopy(model)
    theirs = AdamWScheduleFree(twin.parameters(), **ARGUMENTS)
    train(twin, theirs, steps=12)
    data, durable = batches(12), {**job, 'directory': str(tmp_path), 'nvme': '1GiB', 'resume': 'auto'}
    for count in (4, 3, 5):
        optimizer = bt.AdamWScheduleFree(model.named_parameters(), **ARGUMENTS, **durable)
        optimizer.resume()
        for batch in itertools.islice(data, count):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        optimizer.close()
    again = bt.AdamWScheduleFree(model.named_parameters(), **ARGUMENTS, **durable)
    again.eval()  # opens the job
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, theirs.average(q), rtol=1e-3, atol=1e-5)
    again.close()


def test_ranks_of_fsdp2_evaluate_their_parts(tmp_path):
    port = str(free_port())
    ranks = [Process(HERE / 'schedule_free_main.py', tmp_path, tmp_path / f'{rank}.log', tmp_path, MASTER_ADDR='127.0.0.1',
                     MASTER_PORT=port, WORLD_SIZE='2', RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], '\n'.join(rank.output for rank in ranks)
    torch.manual_seed(1)
    model = mlp()
    theirs = AdamWScheduleFree(model.parameters(), **ARGUMENTS)
    train(model, theirs, steps=5)
    expected = [[theirs.average(p).clone() for p in model.parameters()]]
    train(model, theirs, steps=2)
    expected.append([p.detach() for p in model.parameters()])
    for mine, other in zip(torch.load(tmp_path / 'values.pt', weights_only=True), expected):
        for p, q in zip(mine, other):
            torch.testing.assert_close(p.detach(), q, rtol=1e-3, atol=1e-5)


def test_what_needs_y_is_refused_while_parameters_hold_the_average(job):
    model = mlp()
    optimizer = bt.AdamWScheduleFree(model.named_parameters(), **job)
    train(model, optimizer, steps=2)
    state = optimizer.state_dict()
    assert set(state['state'][0]) == {'step', 'z_minus_y', 'exp_avg_sq'}
    optimizer.eval()
    for call in (optimizer.step, optimizer.state_dict, optimizer.full_state_dict, lambda: optimizer.load_state_dict(state),
                 lambda: dict(optimizer.state[model[0].weight])):
        with pytest.raises(ballast.Error, match=r'hold the average.*optimizer\.train\(\)'):
            call()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.warns(UserWarning, match='the written values are lost'):
        optimizer.train()
    train(model, optimizer, steps=1)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ballast.Error, match='written to since the last step'):
        optimizer.eval()
    train(model, optimizer, steps=1)
    optimizer.eval()
    optimizer.close()


def test_what_it_cannot_do_is_refused_by_name(job):
    with pytest.raises(ValueError, match='first one above 0'):
        bt.AdamWScheduleFree([nn.Parameter(torch.ones(2))], betas=(0.0, 0.9))
    coarse = bt.AdamWScheduleFree([nn.Parameter(torch.ones(2))], moments='bf16', **job)
    coarse.param_groups[0]['params'][0].grad = torch.ones(2)
    with pytest.raises(ballast.Error, match='it takes f32 moments'):
        coarse.step()


def test_a_model_of_shard_is_refused(job, tmp_path):
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        bt.shard(model)
        optimizer = bt.AdamWScheduleFree(model.named_parameters(), **job)
        with pytest.raises(ballast.Error, match='servers hand out y alone'):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
