"""overlap=model: a step beside the training loop changes nothing but when things happen."""
import copy
import gc
import os
import pickle
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from main_thread import waits_in, when
from own_process import run
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ballast
import ballast.torch as bt
from ballast.torch.steps.step import Step


class Gated:
    """A session whose step waits: for `go` before it begins, and for `units` before it tells of a unit other than the first."""

    def __init__(self, session):
        self._session = session
        self.go, self.units = threading.Event(), threading.Event()
        self.in_time = True
        self.go.set()
        self.units.set()

    def __getattr__(self, name):
        return getattr(self._session, name)

    def _await(self, event):
        self.in_time = event.wait(120) and self.in_time  # only what waits in vain waits so long

    def step(self, *args, ready, **kwargs):
        told = []

        def gated(indices):
            if told:
                self._await(self.units)
            told.append(indices)
            ready(indices)
        self._await(self.go)
        return self._session.step(*args, ready=gated, **kwargs)


def gated(model, job, **more):
    optimizer = bt.AdamW(model.parameters(), overlap=model, **job, **more)
    optimizer.resume()
    optimizer.job.opened.session = Gated(optimizer.job.opened.session)
    return optimizer, optimizer.job.opened.session


def backward(model):
    loss_of(model, next(batches(1))).backward()


def plain_copy(model, job, **more):
    """What one step makes of the model's parameters, from its gradients."""
    twin = copy.deepcopy(model)
    for mine, theirs in zip(twin.parameters(), model.parameters()):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    optimizer = bt.AdamW(twin.parameters(), **{**job, 'name': job['name'] + '-plain'}, **more).attach(twin)
    optimizer.step()
    optimizer.close()
    return [parameter.detach() for parameter in twin.parameters()]


def same(model, parameters):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), parameters))


@pytest.mark.parametrize('over_servers', [False, True])
def test_to_the_last_bit_as_without(over_servers, job, request):
    """With what a loop does between steps."""
    def script(model, make):
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=60)

        def after(i):
            schedule.step()
            if i == 20:
                optimizer.zero_grad(set_to_none=False)
            if i == 30:
                optimizer.wait()
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
        return train(model, optimizer, after_step=after,
                     after_backward=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    def make(suffix, overlaps):
        arguments = {'servers': request.getfixturevalue('two_servers'), 'name': 'overlap'} if over_servers else job
        return lambda model: bt.AdamW(model.named_parameters(), lr=1e-2, overlap=model if overlaps else None,
                                      **{**arguments, 'name': arguments['name'] + suffix})
    expected, came, twin, model = both(script, make('', True), make('-plain', False))
    model(torch.zeros(1, 16))  # waits
    assert_close(expected, came, twin, model, rtol=0, atol=0)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_models(dtype, job):
    """Tied embeddings, experts that a batch does not visit, adapters over frozen weights."""
    pytest.importorskip('transformers')
    pytest.importorskip('peft')
    import models
    for name in models.MODELS:
        models.check(dtype, *models.compare(name, dtype, lambda model, name=name: bt.AdamW(
            model.parameters(), **models.ARGUMENTS, overlap=model, **{**job, 'name': f'{job["name"]}-{name}'})))


def test_step_returns_before_it_has_ended_and_forward_waits(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    expected = plain_copy(model, job)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    session.go.clear()
    optimizer.step()
    optimizer.zero_grad()
    assert same(model, before)
    when(lambda: waits_in('overlap.py'), session.go.set)
    model(torch.zeros(1, 16))
    assert same(model, expected)
    assert session.in_time


def test_a_block_runs_while_later_ones_are_on_their_way(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    expected = plain_copy(model, job)
    session.units.clear()
    optimizer.step()
    # Only the first block's forward, done, lets the second block's parameters come.
    model[0].register_forward_hook(lambda *_: session.units.set())
    model(torch.zeros(1, 16))
    assert session.in_time
    assert same(model, expected)


@pytest.mark.parametrize('use', ['forward', 'wait'])
def test_a_signals_handler_waits_in_the_stead_of_who_waited(use, job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    expected = plain_copy(model, job)
    waited = []

    def handler(*_):
        session.go.set()
        optimizer.wait()
        waited.append(True)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        session.go.clear()
        optimizer.step()
        when(lambda: waits_in('overlap.py'), lambda: os.kill(os.getpid(), signal.SIGALRM))
        optimizer.wait() if use == 'wait' else model(torch.zeros(1, 16))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert waited and session.in_time
    assert same(model, expected)


@pytest.mark.parametrize('use', ['forward', 'wait'])
def test_a_signals_handler_waits_as_parameters_land(use, job, monkeypatch):
    """The step counts once."""
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    expected = plain_copy(model, job)
    land, waited = Step.land, []

    def landing(step, indices):
        land(step, indices)
        if not waited:
            waited.append(True)
            optimizer.wait()
    monkeypatch.setattr(Step, 'land', landing)
    optimizer.step()
    optimizer.wait() if use == 'wait' else model(torch.zeros(1, 16))
    assert waited and session.in_time and optimizer.resume().step == 1
    assert same(model, expected)
    backward(model)
    optimizer.step()
    assert optimizer.resume().step == 2


@pytest.mark.parametrize('use', ['state_dict', 'wait', 'grad_norm', 'last_step_skipped', 'state', 'full_state_dict', 'zero_grad', 'stats',
                                 'close'])
def test_what_waits(use, job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    expected = plain_copy(model, job)
    session.go.clear()
    optimizer.step()
    when(lambda: waits_in('overlap.py'), session.go.set)
    {'state_dict': model.state_dict, 'wait': optimizer.wait, 'grad_norm': lambda: optimizer.grad_norm,
     'last_step_skipped': lambda: optimizer.last_step_skipped, 'state': lambda: optimizer.state[model[0].weight]['exp_avg'],
     'full_state_dict': optimizer.full_state_dict, 'zero_grad': lambda: optimizer.zero_grad(set_to_none=False),
     'stats': optimizer.stats, 'close': optimizer.close}[use]()
    assert session.in_time
    assert same(model, expected)


class DirectUse(nn.Module):
    """Reads parameters of children that are never called, as nn.MultiheadAttention does its output's."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(2)])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = (x @ self.list[0] @ self.list[1])[:, None]
        return self.head(self.attention(x, x, x)[0][:, 0])


def test_parameters_that_modules_read_of_others(job):
    model = DirectUse()
    optimizer, session = gated(model, job, lr=0.1)
    backward(model)
    expected = plain_copy(model, job, lr=0.1)
    x = torch.randn(2, 16)
    session.go.clear()
    optimizer.step()
    when(lambda: waits_in('overlap.py'), session.go.set)
    came = model(x)
    optimizer.wait()
    assert session.in_time
    assert same(model, expected)
    assert torch.equal(came, model(x))
    came.sum().backward()  # nothing was read before it was there


class Experts(nn.Module):
    """A block that reads the weights of its experts, which are units of their own in the job."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        return nn.functional.linear(x, self.query.weight + torch.stack([each.weight for each in self.experts]).sum(0))


def test_a_block_waits_for_the_experts_whose_weights_it_reads(job):
    results = []
    for make in (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
                 lambda model: bt.AdamW(model.named_parameters(), lr=1e-2, overlap=model, **job)):
        torch.manual_seed(3)
        model = nn.Sequential(*(Experts() for _ in range(3)))
        optimizer, losses = make(model), []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 16)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-4)


class Reached(nn.Module):
    """A container whose parts the loop calls."""

    def __init__(self, part):
        super().__init__()
        self.part, self.other = part, nn.Linear(4, 4)


def wrapper_within(**more):
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=True, **more)
    return Reached(net), net


def wrapper_outside(**more):
    model = Reached(mlp())
    return model, DistributedDataParallel(model.part, gradient_as_bucket_view=True, **more)


def wrapper_around(**more):
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=True, **more)
    return net.module, net


def landed_at_the_first_layer(model, net, job, hidden=False):
    """By parameter of net, whether it has landed when the first layer runs. hidden: gc tells of no module that was there."""
    backward(net)
    optimizer = bt.AdamW(model.parameters(), overlap=model, **job)
    optimizer.resume()
    seen, before = [], [p._version for p in net.parameters()]
    net.module[0].register_forward_pre_hook(lambda *_: seen.append([p._version for p in net.parameters()]))
    if hidden:
        gc.freeze()
    try:
        optimizer.step()
        net(torch.zeros(1, 16))
        optimizer.close()
    finally:
        gc.unfreeze()
    assert all(p._version > was for p, was in zip(net.parameters(), before))
    return [p._version == at for p, at in zip(net.parameters(), *seen)]


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures('one_rank')
@pytest.mark.parametrize('hidden', [False, True])
@pytest.mark.parametrize('made', [wrapper_within, wrapper_outside, wrapper_around])
def test_a_pass_of_ddp_with_views_and_unused_parameters_waits_for_all(made, hidden, job):
    """Its backward pass writes to all gradients."""
    assert landed_at_the_first_layer(*made(find_unused_parameters=True), job, hidden) == [True] * 6


@pytest.mark.usefixtures('one_rank')
@pytest.mark.parametrize('made', [wrapper_within, wrapper_outside, wrapper_around])
def test_a_pass_of_ddp_with_views_alone_waits_for_its_block(made, job):
    assert landed_at_the_first_layer(*made(), job) == [True] * 2 + [False] * 4


def test_a_gradient_changed_amid_the_step_is_an_error(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    session.go.clear()
    optimizer.step()
    model[0].weight.grad.zero_()
    session.go.set()
    with pytest.raises(ballast.Error, match="gradient of parameter '0.weight' was changed while the step read it"):
        model(torch.zeros(1, 16))
    optimizer.wait()
    backward(model)
    optimizer.step()
    optimizer.wait()


def test_a_read_that_no_hook_sees_is_an_error_in_backward(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    session.go.clear()
    optimizer.step()
    optimizer.zero_grad()
    x = torch.randn(2, 16, requires_grad=True)
    hidden = nn.functional.linear(x, model[0].weight)  # without the module
    session.go.set()
    optimizer.wait()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        hidden.sum().backward()


def test_an_error_of_the_step_comes_where_it_is_waited_for(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def fail(*_, **__):
        raise ballast.Error('the disk is gone', 'IO')
    session.step = fail
    optimizer.step()
    with pytest.raises(ballast.Error, match='the disk is gone'):
        model(torch.zeros(1, 16))
    assert same(model, before)
    del session.step
    optimizer.step()
    optimizer.wait()
    assert optimizer.resume().step == 1
    assert not same(model, before)


def test_a_skipped_step(job):
    model = mlp()
    optimizer, _ = gated(model, job)
    backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model[0].bias.grad[3] = float('inf')
    optimizer.step()
    with pytest.warns(UserWarning, match="gradient of '0.bias' is not finite"):
        model(torch.zeros(1, 16))
    assert optimizer.last_step_skipped
    assert same(model, before)


def test_copies_of_the_model_have_nothing_to_wait_for(job):
    model = mlp()
    optimizer, session = gated(model, job)
    backward(model)
    optimizer.step()
    optimizer.wait()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    session.go.clear()
    optimizer.step()
    for each in copies:
        each(torch.zeros(1, 16))  # would wait for what is let go in vain
    session.go.set()
    optimizer.wait()
    assert session.in_time


def test_refusals(job):
    model, other = mlp(), mlp()
    backward(model)
    backward(other)
    with pytest.raises(ballast.Error, match='expected the model whose forward passes'):
        bt.AdamW(model.parameters(), overlap=True, **job)
    with pytest.raises(ballast.Error, match='is not one of the model'):
        bt.AdamW(other.parameters(), overlap=model, **job).step()
    compiled = torch.compile(model)
    with pytest.raises(ballast.Error, match='is compiled'):
        bt.AdamW(compiled.parameters(), overlap=compiled, **job).step()
    model.compile()
    with pytest.raises(ballast.Error, match='is compiled'):
        bt.AdamW(model.parameters(), overlap=model, **job).step()


def test_a_script_that_ends_amid_a_step(tmp_path):
    """The step is made; and the next run, durable, goes on behind it to the same parameters as steps that were waited for."""
    body = '''
    model = mlp()
    optimizer = make(model, resume='auto', overlap=model if os.environ['OVERLAP'] == '1' else None)
    for i in range(optimizer.resume().step, int(os.environ['STEPS'])):
        loss_of(model, list(batches(8))[i]).backward()
        optimizer.step()
        optimizer.zero_grad()
    '''
    told = "print(optimizer.resume().step, [p.sum().item().hex() for p in model.parameters()])"
    outputs = []
    for overlap in '01':
        folder = tmp_path / overlap
        folder.mkdir()
        run(folder, body, OVERLAP=overlap, STEPS='5')
        outputs.append(run(folder, body + told, OVERLAP=overlap, STEPS='8'))
    assert outputs[0] == outputs[1]
    assert outputs[0].splitlines()[-1].startswith('8 ')


def test_an_error_of_the_last_step_is_told_at_the_end(tmp_path):
    done = run(tmp_path, '''
    model = mlp()
    optimizer = make(model, overlap=model)
    loss_of(model, next(batches(1))).backward()
    optimizer.resume()
    class Failing:
        def __getattr__(self, name):
            return getattr(session, name)
        def step(self, *_, **__):
            raise ballast.Error('the disk is gone', 'IO')
    session, optimizer.job.opened.session = optimizer.job.opened.session, Failing()
    optimizer.step()
    ''')
    assert 'the disk is gone' in done
