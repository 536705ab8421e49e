"""Every optimizer against torch's of the same name, over 50 steps of a small model."""
import itertools
import math

import pytest
import torch
from ademamix import AdEMAMix
from conftest import PAIRS
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt
from ballast import embedded
from ballast.torch.algorithms import _warmed


@pytest.mark.parametrize('pair', PAIRS)
def test_same_losses_as_torch(pair, job):
    ours, theirs, arguments = PAIRS[pair]
    results = both(lambda model, make: train(model, make(model.parameters())),
                   lambda p: ours(p, **arguments, **job), lambda p: theirs(p, **arguments))
    assert_close(*results)


@pytest.mark.parametrize('nesterov', [False, True])
def test_momentum_that_comes_and_goes(nesterov, job):
    """As a schedule makes it; and a group beside that never has any. While it is 0 the buffer stays as it is."""
    schedule = [0.0, 0.0, 0.9, 0.5, 0.0, 0.0, 0.9, 0.9]
    start = [torch.randn(40, 30), torch.randn(500)]
    found = []
    for make, more in ((torch.optim.SGD, {}), (bt.SGD, {**job, 'momentum_buffer': True})):
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimizer = make([{'params': parameters[:1]}, {'params': parameters[1:], 'momentum': 0.0}], lr=0.1, weight_decay=0.01, momentum=0.9,
                         **more)
        generator = torch.Generator().manual_seed(3)
        for momentum in schedule:
            optimizer.param_groups[0].update(momentum=momentum, nesterov=nesterov)
            optimizer.param_groups[1].update(nesterov=nesterov)
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found.append(parameters)
    for theirs, ours in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_momentum_without_a_buffer_is_refused_in_words(job):
    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = bt.SGD([parameter], lr=0.1, **job)
    optimizer.step()
    optimizer.param_groups[0]['momentum'] = 0.9
    with pytest.raises(ballast.Error, match='momentum=0.9.*momentum_buffer=True'):
        optimizer.step()
    optimizer.param_groups[0]['momentum'] = 0
    optimizer.step()
    assert optimizer.resume().step == 2
    again = bt.SGD([parameter], lr=0.1, momentum_buffer=True, dampening=0.5, **{**job, 'name': job['name'] + 'b'})
    with pytest.raises(ballast.Error, match='dampening=0.5.*dampening=0'):
        again.step()


def test_named_parameters_and_attach_name_the_job(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=1)
    assert [member.name for member in optimizer.job.members] == [name for name, _ in model.named_parameters()]
    attached = bt.AdamW(model.parameters(), **{**job, 'name': job['name'] + 'b'}).attach(model)
    train(model, attached, steps=1)
    assert [member.name for member in attached.job.members] == [name for name, _ in model.named_parameters()]


def test_bf16_model_keeps_fp32_masters(job):
    """The same as a torch run whose fp32 masters are rounded to bf16 after each step."""
    model = mlp().bfloat16()
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    twin = mlp().bfloat16()
    twin.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(masters, lr=1e-2)

    def script(i):
        for master, parameter in zip(masters, twin.parameters()):
            master.grad = parameter.grad.float()
        theirs.step()
        with torch.no_grad():
            for master, parameter in zip(masters, twin.parameters()):
                parameter.copy_(master)

    class Nothing:
        def zero_grad(self):
            twin.zero_grad()

        def step(self):
            pass

    expected = train(twin, Nothing(), after_backward=script)
    came = train(model, bt.AdamW([{'params': list(model.parameters())}], lr=1e-2, **job))
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=5e-3, atol=5e-3)


def test_8bit_moments_are_near_to_fp32_ones_and_small(job):
    """After the same 20 gradients. Dynamic quantization (Dettmers et al. 2022) keeps a value to about 1/14 of itself, or, if it is
    tiny beside its block of 256, to a small part of the block's largest; the first update cannot differ by more than rounding."""
    shape = (1024, 1024)
    start = torch.randn(shape)
    moments, used, masters = {}, {}, {}
    for name, make in (('fp32', bt.AdamW), ('8bit', bt.AdamW8bit)):
        before = embedded.server().server.tiers[0][1] if embedded._running else 0
        parameter = nn.Parameter(start.clone())
        optimizer = make([parameter], lr=1e-3, **{**job, 'name': f'{job["name"]}-{name}'})
        generator = torch.Generator().manual_seed(2)
        for _ in range(20):
            parameter.grad = torch.randn(shape, generator=generator) + 0.2
            optimizer.step()
        moments[name], masters[name] = dict(optimizer.state[parameter]), parameter.detach()
        used[name] = embedded.server().server.tiers[0][1] - before
        optimizer.close()
    bytes_saved = used['fp32'] - used['8bit']
    assert bytes_saved == pytest.approx(6 * start.numel(), rel=0.1)  # 8 bytes a parameter against 2
    for moment in ('exp_avg', 'exp_avg_sq'):
        exact, coarse = moments['fp32'][moment], moments['8bit'][moment]
        assert not torch.equal(exact, coarse)
        largest = exact.abs().view(-1, 256).amax(1, keepdim=True)
        error = (exact - coarse).abs().view(-1, 256) / largest
        assert error.mean() < 0.02 and error.max() < 0.1, (moment, error.mean(), error.max())
    assert (masters['fp32'] - masters['8bit']).abs().mean() < 0.1 * (masters['fp32'] - start).abs().mean()


def test_8bit_moments_train(job):
    model = mlp()
    losses = train(model, bt.AdamW8bit(model.parameters(), lr=1e-2, **job))
    assert losses[-1] < losses[0]


def test_lion_against_its_paper(job):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    moments = [torch.zeros_like(p) for p in twin.parameters()]

    class Paper:
        def zero_grad(self):
            twin.zero_grad()

        @torch.no_grad()
        def step(self):
            for p, m in zip(twin.parameters(), moments):
                update = torch.sign(0.9 * m + 0.1 * p.grad)
                p -= 1e-3 * (update + 0.1 * p)
                m.mul_(0.99).add_(p.grad, alpha=0.01)

    expected = train(twin, Paper(), steps=20)
    came = train(model, bt.Lion(model.parameters(), lr=1e-3, weight_decay=0.1, **job), steps=20)
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=1e-3, atol=1e-4)


def test_ademamix_warms_up_and_goes_on_where_it_was(job, tmp_path):
    """As the paper's, over a restart amid the warm-up, and from a state into another job."""
    arguments = {'lr': 1e-3, 'weight_decay': 0.1, 'alpha': 8.0, 't_alpha': 12, 't_beta3': 10}
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    data = batches(20)

    def losses(optimizer, count):
        came = []
        for batch in itertools.islice(data, count):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            came.append(loss.item())
        return came
    expected = train(twin, AdEMAMix(twin.parameters(), **arguments), steps=20)
    durable = {**job, 'directory': str(tmp_path), 'nvme': '1GiB', 'resume': 'auto'}
    first = bt.AdEMAMix(model.named_parameters(), **arguments, **durable)
    came = losses(first, 5)
    first.close()
    again = bt.AdEMAMix(model.named_parameters(), **arguments, **durable)
    assert again.resume().step == 5
    came += losses(again, 4)
    state = again.full_state_dict()
    assert state['param_groups'][0]['t_beta3'] == 10 and 'exp_avg_slow' in state['state'][0]
    again.close()
    other = bt.AdEMAMix(model.named_parameters(), lr=7.0, **{**durable, 'name': job['name'] + 'b'})
    other.load_state_dict(state)
    came += losses(other, 11)
    other.close()
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(('first', 'last'), [(0.9, 0.9999), (0.0, 0.99), (0.9, 0.9), (0.99, 0.9), (0.9, 0.0)])
def test_the_warm_up_of_a_slow_mean_ends_where_it_should(first, last):
    decays = [_warmed(first, last, part / 10) for part in range(11)]
    assert decays == sorted(decays) and decays[-1] == last
    assert decays[0] == pytest.approx(min(first, last))
    if 0 < first < last:  # half of the way in half-lives
        assert 1 / math.log(decays[5]) == pytest.approx((1 / math.log(first) + 1 / math.log(last)) / 2)


def test_ademamix_in_16_bits(job):
    """Rounded at random, so that a slow mean moves although a step changes it by less than its last bit. Not in 8 bits."""
    parameters = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    exact, rounded = (bt.AdEMAMix([parameter], betas=(0.9, 0.999, 0.999), moments=moments, **{**job, 'name': job['name'] + moments})
                      for parameter, moments in zip(parameters, ('f32', 'bf16')))
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        gradient = torch.randn(64, 64, generator=generator) * 0.1 + 1
        for parameter, optimizer in zip(parameters, (exact, rounded)):
            parameter.grad = gradient.clone()
            optimizer.step()
    slow = [optimizer.state[parameter]['exp_avg_slow'] for parameter, optimizer in zip(parameters, (exact, rounded))]
    assert slow[0].mean() == pytest.approx(1 - 0.999**300, rel=0.01)
    assert slow[1].mean() == pytest.approx(slow[0].mean().item(), rel=0.005)
    torch.testing.assert_close(slow[1], slow[0], rtol=0.2, atol=0)
    coarse = bt.AdEMAMix([parameters[0]], moments='i8', **{**job, 'name': job['name'] + 'i8'})
    parameters[0].grad = torch.ones(64, 64)
    with pytest.raises(ballast.Error, match='ademamix: its slow mean .*take f32 or bf16 moments'):
        coarse.step()


def test_ademamix_takes_three_betas():
    for betas in ((0.9, 0.999), (0.9, 0.999, 1.0)):
        with pytest.raises(ValueError, match=r'AdEMAMix: (betas=\(0.9, 0.999\), expected three|beta3=1.0, expected)'):
            bt.AdEMAMix([nn.Parameter(torch.ones(2))], betas=betas)
