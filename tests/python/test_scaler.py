"""LossScaler against torch.amp.GradScaler, and what GradScaler does not do: fp16 gradients."""
import copy
import warnings

import pytest
import torch
from scripts import assert_close, batches, both, loss_of, mlp
from torch import nn

import ballast
import ballast.torch as bt


def test_loss_scaler_of_fp16_gradients(job):
    """An fp16 model under a scale that overflows at first, against fp32 masters fed with the same unscaled gradients."""
    model = mlp().half()
    twin = copy.deepcopy(model)
    masters = [p.detach().float().clone().requires_grad_() for p in twin.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-2)
    ours, scaler = bt.AdamW(model.parameters(), lr=1e-2, **job), bt.LossScaler(init_scale=2.0**20, growth_interval=4)
    skipped, scales = 0, []
    for batch in batches(25):
        ours.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scale = scaler.get_scale()
        scales.append(scale)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            scaler.step(ours)
        scaler.update()
        if ours.last_step_skipped:
            skipped += 1
            continue
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float() / scale
        theirs.step()
    assert 1 <= skipped < 20 and max(scales) == scales[0] and ours.stats()['steps'] == 25
    for master, p in zip(masters, model.parameters()):
        torch.testing.assert_close(p.float(), master.half().float(), rtol=2e-3, atol=2e-4)
    with pytest.raises(ballast.Error, match='max_norm'):
        scaler.unscale_(ours)


def scaler_of(optimizer, **arguments):
    theirs = isinstance(optimizer, torch.optim.AdamW)
    return torch.amp.GradScaler('cpu', **arguments) if theirs else bt.LossScaler(**arguments)


@pytest.mark.parametrize('unscale', [False, True])
@pytest.mark.parametrize('enabled', [False, True])
def test_like_grad_scaler(unscale, enabled, job):
    """fp32 gradients: scales grow and fall at the same steps; unscaled gradients are clipped; a state dict goes on; a scale is set."""
    def script(model, make):
        optimizer = make(model.parameters())
        scaler = scaler_of(optimizer, init_scale=1024.0, growth_interval=3, enabled=enabled)
        came = []
        for i, batch in enumerate(batches(20)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if i == 7 and enabled:
                model[3].bias.grad[0] = float('inf')
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update(new_scale=512.0 if i == 12 else None)
            came += [loss.item(), scaler.get_scale(), scaler.is_enabled()]
            if i == 9:  # two of three good steps
                state = scaler.state_dict()
                scaler = scaler_of(optimizer, enabled=enabled)
                scaler.load_state_dict(state)
        if enabled:
            assert {512.0, 2048.0, 4096.0} <= set(came)
        return came
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_the_wrong_order_is_refused_in_its_words(job):
    def script(model, make):
        optimizer = make(model.parameters())
        scaler = scaler_of(optimizer)
        told = []

        def refused(call):
            with pytest.raises(RuntimeError) as raised:
                call()
            told.append(str(raised.value).replace('GradScaler', 'LossScaler'))
        scaler.scale(loss_of(model, next(batches(1)))).backward()
        scaler.unscale_(optimizer)
        refused(lambda: scaler.unscale_(optimizer))
        refused(lambda: scaler.step(optimizer, closure=lambda: 1.0))
        scaler.step(optimizer)
        refused(lambda: scaler.step(optimizer))
        scaler.update()
        scaler.scale(loss_of(model, next(batches(1)))).backward()
        scaler.step(optimizer)
        refused(lambda: scaler.unscale_(optimizer))
        scaler.update()
        refused(lambda: scaler.load_state_dict({}))
        return told
    expected, came, _, _ = both(script, lambda p: bt.AdamW(p, **job), torch.optim.AdamW)
    assert came == expected
