"""Every optimizer against torch's of the same name, over 50 steps of a small model."""
import pytest
import torch
from conftest import PAIRS
from scripts import assert_close, both, mlp, train
from torch import nn

import ballast
import ballast.torch as bt
from ballast import embedded


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
