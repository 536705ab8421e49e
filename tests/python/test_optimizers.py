"""Every optimizer against torch's of the same name, over 50 steps of a small model."""
import pytest
import torch
from conftest import PAIRS
from scripts import assert_close, both, mlp, train

import ballast.torch as bt


@pytest.mark.parametrize('pair', PAIRS)
def test_same_losses_as_torch(pair, job):
    ours, theirs, arguments = PAIRS[pair]
    results = both(lambda model, make: train(model, make(model.parameters())),
                   lambda p: ours(p, **arguments, **job), lambda p: theirs(p, **arguments))
    assert_close(*results)


def test_named_parameters_and_attach_name_the_job(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=1)
    assert [member.name for member in optimizer._members] == [name for name, _ in model.named_parameters()]
    attached = bt.AdamW(model.parameters(), **{**job, 'name': job['name'] + 'b'}).attach(model)
    train(model, attached, steps=1)
    assert [member.name for member in attached._members] == [name for name, _ in model.named_parameters()]


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
