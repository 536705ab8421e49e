"""Drop-in: six models, 50 steps, the same losses as torch.optim.AdamW.

Tolerances. fp32 models: relative 1e-3 + 1e-4 absolute on each loss; the update itself is as exact as torch's (one rounding per
operation in both), but they round differently, and 50 steps of training amplify last bits. bf16 working copies: relative 2e-2 + 2e-2,
against torch over fp32 masters whose values are rounded to bf16 after every step."""
import copy

import pytest
import torch

pytest.importorskip('transformers')
pytest.importorskip('peft')
from models import MODELS, train  # noqa: E402

import ballast.torch as bt  # noqa: E402

ARGUMENTS = {'lr': 3e-3, 'weight_decay': 0.05}


class OverMasters:
    """What users write by hand for bf16 models: torch's AdamW over fp32 copies."""

    def __init__(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, **ARGUMENTS)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for master, p in zip(self.masters, self.parameters):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        for master, p in zip(self.masters, self.parameters):
            p.copy_(master)


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_same_losses(name, dtype, job):
    model = MODELS[name]().to(dtype)
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), **ARGUMENTS) if dtype == torch.float32 else OverMasters(twin)
    expected = train(name, twin, theirs)
    came = train(name, model, bt.AdamW(model.named_parameters(), **ARGUMENTS, **job))
    rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=rtol, atol=atol)
    assert expected[-1] < expected[0]


def test_units_are_blocks(job):
    model = MODELS['gpt2']()
    optimizer = bt.AdamW(model.parameters(), **ARGUMENTS, **job).attach(model)
    units = {tensor.unit for _, _, tensor in optimizer._new_tensors()}
    assert units == {'transformer', 'transformer.h.0', 'transformer.h.1'}
