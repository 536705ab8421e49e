"""push_early: gradients that go to the servers during backward change nothing but when they go."""
import copy
import os
import re
import subprocess
import weakref

import pytest
import torch
from conftest import OWN_ADDRESS
from own_process import run
from scripts import batches, loss_of, mlp
from torch import nn

import ballast
import ballast.torch as bt
from ballast import programs


class Watched:
    """A session that counts what is pushed early, and what is dropped."""

    def __init__(self, session):
        self._session, self.pushed, self.dropped = session, 0, 0

    def __getattr__(self, name):
        return getattr(self._session, name)

    def push_early(self, unit, gradients, let_go=False):
        self.pushed += 1
        return self._session.push_early(unit, gradients, let_go=let_go)

    def drop(self):
        self.dropped += 1
        return self._session.drop()


def pair(model, job, servers, **more):
    """(model, optimizer) with push_early, its session watched; and the same without."""
    twin = copy.deepcopy(model)
    made = [bt.AdamW(each.named_parameters(), lr=1e-2, servers=servers, name=f'{job["name"]}-{early}', push_early=early, **more)
            for each, early in ((model, True), (twin, False))]
    for optimizer in made:
        optimizer.resume()
    made[0].job.opened.session = made[0].job.features[0].session = Watched(made[0].job.opened.session)
    return (model, made[0]), (twin, made[1])


def same(a, b):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(a.parameters(), b.parameters()))


def backward(model, batch):
    loss_of(model, batch).backward()


UNITS = 3  # of an mlp


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('overlap', [False, True])
def test_to_the_last_bit_as_without(dtype, overlap, job, two_servers):
    def make(model, name, early):
        return bt.AdamW(model.named_parameters(), lr=1e-2, servers=two_servers, name=name, push_early=early, max_norm=0.5,
                        overlap=model if overlap else None)
    model = mlp().to(dtype)
    twin = copy.deepcopy(model)
    mine, theirs = make(model, job['name'], True), make(twin, job['name'] + '-twin', False)
    mine.resume()
    mine.job.opened.session = mine.job.features[0].session = Watched(mine.job.opened.session)
    for batch in batches(20):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            backward(each, batch)
            optimizer.step()
    mine.wait()
    theirs.wait()
    assert same(model, twin)
    assert mine.grad_norm == theirs.grad_norm
    assert mine.job.opened.session.pushed == 20 * UNITS
    assert mine.job.opened.session.dropped == 0


def test_gradients_whose_elements_lie_apart(job, two_servers):
    (model, optimizer), (twin, plain) = pair(mlp(), job, two_servers)
    for each in (model, twin):
        for parameter in each.parameters():
            parameter.grad = torch.zeros(*parameter.shape, 2)[..., 0]  # backward adds to it
    for each, made in ((model, optimizer), (twin, plain)):
        backward(each, next(iter(batches(1))))
        made.step()
    assert any(not parameter.grad.is_contiguous() for parameter in model.parameters())
    assert same(model, twin)


@pytest.mark.filterwarnings('error')
def test_accumulation_goes_with_the_last(job, two_servers):
    """How often gradients come, the step before has shown."""
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for i, batch in enumerate(batches(15)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            backward(each, batch)
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert same(model, twin)
    assert mine.job.opened.session.dropped == 1
    assert mine.job.opened.session.pushed == 5 * UNITS  # the first time too soon
    for count in (1, 3, 2):  # and then another count of batches
        for each, optimizer in ((model, mine), (twin, theirs)):
            for batch in batches(count):
                backward(each, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, twin)


class Routed(nn.Module):
    """Experts, of which each micro-batch reaches those that it names; and a layer that some leave out."""

    def __init__(self):
        super().__init__()
        self.first, self.skipped = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, reached, skips):
        x = self.first(torch.ones(2, 4))
        x = x if skips else self.skipped[0](x)
        return sum(self.experts[i](x) for i in reached).square().mean()


@pytest.mark.filterwarnings('error')
def test_uneven_micro_batches_send_no_gradient_twice(job, two_servers):
    """Each step has three micro-batches, and each reaches other experts."""
    torch.manual_seed(7)
    (model, mine), (twin, theirs) = pair(Routed(), job, two_servers)
    steps = [([0], [0, 1], [0, 1, 2]), ([0, 1], [1], [1, 2]), ([2], [2, 1], [2, 0, 1]), ([0], [0, 1], [0, 2]), ([1, 2], [1, 2], [1, 2, 0])]
    counts = []
    for number, micro_batches in enumerate(steps):
        pushed, dropped = mine.job.opened.session.pushed, mine.job.opened.session.dropped
        for each, optimizer in ((model, mine), (twin, theirs)):
            for i, reached in enumerate(micro_batches):
                each(reached, skips=number == 1 and i == 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append((mine.job.opened.session.pushed - pushed, mine.job.opened.session.dropped - dropped))
    assert same(model, twin)
    # The first step does not know of the micro-batches: two layers go, and are taken back. The third expects two gradients of the layer
    # that one left out. Of the other steps, each unit goes once: the layers and the one expert, or two, that all three reach.
    assert counts[1] == (2, 0) and counts[3:] == [(3, 0), (4, 0)], counts
    assert counts[0][1] == counts[2][1] == 1, counts


def test_zero_grad_takes_it_back(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for i, batch in enumerate(batches(9)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            backward(each, batch)
            if i % 3 == 1:
                optimizer.zero_grad(set_to_none=i == 1)
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert same(model, twin)
    assert mine.job.opened.session.dropped == 3
    assert mine.job.opened.session.pushed == 9 * UNITS


def test_gradients_that_are_changed_go_again(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    with pytest.warns(UserWarning, match=r"push_early: the gradient of parameter '\d.\w+' was changed after backward") as told:
        for batch in batches(6):
            for each, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                backward(each, batch)
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
                optimizer.step()
    assert len(told) == 1
    assert same(model, twin)
    assert mine.job.opened.session.dropped == 6


def test_a_gradient_that_is_replaced_or_taken_away(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    with pytest.warns(UserWarning, match='was changed'):
        for i, batch in enumerate(batches(6)):
            for each, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                backward(each, batch)
                each[0].weight.grad = None if i % 2 else torch.ones_like(each[0].weight)
                optimizer.step()
    assert same(model, twin)


def test_a_gradient_changed_through_data_is_found_in_debug(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers, debug=True)
    with pytest.warns(UserWarning, match="the gradient of parameter '0.weight' was changed"):
        for batch in batches(3):
            for each, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                backward(each, batch)
                each[0].weight.grad.data.mul_(2)
                optimizer.step()
    assert same(model, twin)


def test_grad_scaler_goes_again(job, two_servers):
    """unscale_ moves no version counter."""
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    with pytest.warns(UserWarning, match='was changed'):
        for each, optimizer in ((model, mine), (twin, theirs)):
            scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)
            for batch in batches(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(each, batch)).backward()
                scaler.step(optimizer)
                scaler.update()
    assert same(model, twin)


def test_a_step_that_does_not_begin_takes_nothing(job, two_servers):
    """Its gradients are not there for the next one."""
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for each, optimizer in ((model, mine), (twin, theirs)):
        backward(each, next(batches(1)))
        with pytest.raises(TypeError):
            optimizer.step(blob='text')
        for parameter in each.parameters():
            parameter.grad.zero_()
        optimizer.step()
    assert same(model, twin)
    assert mine.grad_norm == 0


def test_a_parameter_that_left_its_group_stays(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for each, optimizer in ((model, mine), (twin, theirs)):
        backward(each, next(batches(1)))
        optimizer.param_groups[0]['params'].pop()  # 3.bias
        before = each[3].bias.detach().clone()
        optimizer.step()
        assert torch.equal(each[3].bias, before)
    assert same(model, twin)


def test_what_else_is_asked_of_the_job_takes_it_back(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    looks = [lambda each, optimizer: optimizer.state_dict(),
             lambda each, optimizer: optimizer.state[each[0].weight]['exp_avg'].sum(),
             lambda each, optimizer: optimizer.full_state_dict(),
             lambda each, optimizer: optimizer.rollback(optimizer.versions()[-1])]
    for batch, look in zip(batches(4), looks):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            backward(each, batch)
            look(each, optimizer)
            optimizer.step()
    assert same(model, twin)
    assert mine.job.opened.session.dropped == 4
    for each, optimizer in ((model, mine), (twin, theirs)):  # and an edit, and parameters that come later
        optimizer.zero_grad()
        backward(each, next(batches(1)))
        with torch.no_grad():
            each[0].weight.mul_(0.5)
        more = nn.Parameter(torch.ones(5))
        more.grad = torch.ones(5)
        optimizer.add_param_group({'params': [('more', more)]})
        optimizer.step()
        assert more[0] < 1
    assert same(model, twin)


def test_a_unit_without_gradients(job, two_servers):
    """Of some of its parameters, or of all, in some steps."""
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for i, batch in enumerate(batches(8)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            for parameter in each[0].parameters():
                parameter.requires_grad_(i % 2 == 0)
            each[2].bias.requires_grad_(i % 3 == 0)
            backward(each, batch)
            optimizer.step()
    assert same(model, twin)
    assert 8 < mine.job.opened.session.pushed < 24


def test_a_step_that_is_refused_can_be_made_again(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for i, batch in enumerate(batches(4)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            backward(each, batch)
            if i % 2:
                optimizer.param_groups[0]['lr'] = float('nan')
                with pytest.raises((ballast.Error, ValueError)):
                    optimizer.step()
                optimizer.param_groups[0]['lr'] = 1e-2
                if i == 3:  # other gradients by then
                    optimizer.zero_grad()
                    backward(each, next(batches(1, seed=9)))
            optimizer.step()
    assert same(model, twin)


def test_a_skipped_step(job, two_servers):
    (model, mine), (twin, theirs) = pair(mlp(), job, two_servers)
    for i, batch in enumerate(batches(6)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            (loss_of(each, batch) * (float('inf') if i == 3 else 1)).backward()
            if i == 3:
                with pytest.warns(UserWarning, match='not finite'):
                    optimizer.step()
            else:
                optimizer.step()
    assert same(model, twin)


def test_over_a_server_that_is_killed_between_backward_and_step(job, tmp_path):
    """It has lost what went early, or has it in its log: the step comes out the same."""
    def start(address=f'{OWN_ADDRESS}:0'):
        server = subprocess.Popen(
            [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', address, '--metrics_listen', '127.0.0.1:0',
             '--data_directory', str(tmp_path), '--budget.dram', '128MiB', '--budget.nvme', '4GiB', '--log_level', 'error'],
            stdout=subprocess.PIPE, text=True)
        return server, re.search(r'listen=(\S+)', server.stdout.readline())[1]
    server, address = start()
    (model, mine), (twin, theirs) = pair(mlp(), job, address)
    for i, batch in enumerate(batches(6)):
        for each, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            backward(each, batch)
            if i in (2, 4) and each is model:
                assert mine.job.features[0]._stands([parameter.grad for parameter in model.parameters()])  # it is all there
                server.kill()
                server.wait()
                server.stdout.close()
                server, _ = start(address)
            optimizer.step()
    assert same(model, twin)
    mine.close()
    theirs.close()
    server.terminate()
    server.wait()
    server.stdout.close()


def test_a_job_that_is_opened_again_with_fewer_parameters(tmp_path):
    """What the first opening had registered is forgotten: a unit of it would take the place of another."""
    arguments = {'lr': 1e-2, 'directory': str(tmp_path), 'nvme': '1GiB', 'dram': '128MiB', 'threads': 1, 'name': 'again'}
    batch = next(iter(batches(1)))
    results = []
    for early in (False, True):
        torch.manual_seed(5)
        model = mlp()
        first = bt.SGD(model.named_parameters(), **arguments)
        backward(model, batch)
        first.step()
        first.close()
        state = bt.SGD(mlp().named_parameters(), **arguments, resume='auto').state_dict()
        named = list(model.named_parameters())
        named[0][1].requires_grad_(False)
        optimizer = bt.SGD(named, push_early=early, resume='auto', **arguments)
        with pytest.raises(ballast.Error, match='To go on from them, load nothing'):
            optimizer.load_state_dict(state)  # the job has all parameters
        ballast.drop('again', str(tmp_path))
        for step in range(3):
            named[0][1].requires_grad_(step > 0)
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
        optimizer.close()
        ballast.drop('again', str(tmp_path))
    for plain, early in zip(*results):
        assert torch.equal(plain, early)


def test_embedded(tmp_path):
    """Of a durable job gradients go to the log during backward; else they are read where they are."""
    run(tmp_path, '''
    import copy
    def train(model, **more):
        optimizer = make(model, **more)
        for batch in batches(10):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        assert optimizer.job.opened.session.pushes_gradients == (more['durability'] == 'step')
        assert (not optimizer.job.features) or optimizer.job.features[0].is_hooked == optimizer.job.opened.session.pushes_gradients
        return list(model.parameters())
    model = mlp()
    plain = train(copy.deepcopy(model), name='plain', durability='none')
    for durability in ('step', 'none'):
        early = train(copy.deepcopy(model), name=f'early-{durability}', durability=durability, push_early=True)
        assert all(torch.equal(a, b) for a, b in zip(early, plain)), durability
    ''')


def test_refused_arguments():
    with pytest.raises(ballast.Error, match="push_early='yes': expected True"):
        bt.AdamW(mlp().parameters(), push_early='yes')


@pytest.mark.parametrize('call', ['zero_grad', 'resume', 'step'])
def test_a_refused_load_leaves_nothing_behind(call, job, tmp_path):
    """Before the job was open: hooks that push into the session that the load had."""
    more = {'lr': 1e-2, 'dram': job['dram'], 'threads': 1, 'nvme': '1GiB', 'directory': str(tmp_path / 'state'), 'name': 'again'}
    model = mlp()
    first = bt.AdamW(model.named_parameters(), **more)
    backward(model, next(batches(1)))
    first.step()
    first.close()
    state = bt.AdamW(mlp().named_parameters(), **more, resume='auto').state_dict()
    optimizer = bt.AdamW(model.named_parameters(), **more, resume='auto', push_early=True)
    with pytest.raises(ballast.Error, match='was taken before its job was open'):
        optimizer.load_state_dict(state)
    model.zero_grad()
    backward(model, next(batches(1)))
    getattr(optimizer, call)()
    steps = optimizer.resume().step
    assert steps == (2 if call == 'step' else 1)
    optimizer.step()
    assert optimizer.resume().step == steps + 1
    optimizer.close()


def test_gradients_that_went_outlive_the_session(job, two_servers):
    """A closed optimizer may be the last that has them: the session reads them until it is closed."""
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), servers=two_servers, name=job['name'], push_early=True)
    optimizer.resume()
    backward(model, next(batches(1)))
    memory = [weakref.ref(tensor) for sent in optimizer.job.features[0]._sent.values() for tensor in sent.gradients]
    model.zero_grad()
    there, close = [], optimizer.job.connection.close

    def closed():
        there.extend(each() is not None for each in memory)
        close()
    optimizer.job.connection.close = closed
    optimizer.close()
    assert there and all(there)
