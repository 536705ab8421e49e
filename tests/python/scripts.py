"""A training script as users write them, run once with torch's optimizer and once with ours: the tests compare what both
leave behind."""
import copy

import torch
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def batches(count, seed=7):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def loss_of(model, batch):
    like = next(model.parameters())
    return nn.functional.cross_entropy(model(batch[0].to(like.device, like.dtype)).float(), batch[1].to(like.device))


def train(model, optimizer, steps=50, after_backward=None, after_step=None):
    """The losses of a plain loop."""
    losses = []
    for i, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if after_backward:
            after_backward(i)
        optimizer.step()
        if after_step:
            after_step(i)
        losses.append(loss.item())
    return losses


def both(script, ours, theirs, make_model=mlp):
    """`script(model, make_optimizer)` on equal models, with theirs and with ours: (theirs' result, ours', models)."""
    model = make_model()
    twin = copy.deepcopy(model)
    expected = script(twin, theirs)
    came = script(model, ours)
    return expected, came, twin, model


def assert_close(expected, came, twin, model, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=rtol, atol=atol)
    for (name, theirs), mine in zip(twin.named_parameters(), model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda m, name=name: f'{name}: {m}')
