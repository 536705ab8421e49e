"""Drop-in: six models, 50 steps, the same losses as torch.optim.AdamW, within models.TOLERANCES. One rank here, embedded and over
two servers; two ranks in test_ranks.py."""
import pytest
import torch

pytest.importorskip('transformers')
pytest.importorskip('peft')
from models import ARGUMENTS, MODELS, check, compare  # noqa: E402

import ballast.torch as bt  # noqa: E402
from ballast.torch.job.fit import new_tensors  # noqa: E402


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_same_losses(name, dtype, job):
    check(dtype, *compare(name, dtype, lambda model: bt.AdamW(model.named_parameters(), **ARGUMENTS, **job)))


@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_same_losses_over_two_servers(name, dtype, two_servers):
    check(dtype, *compare(name, dtype, lambda model: bt.AdamW(model.named_parameters(), **ARGUMENTS, servers=two_servers,
                                                              name=f'{name}-{dtype}')))


def test_units_are_blocks(job):
    model = MODELS['gpt2']()
    optimizer = bt.AdamW(model.parameters(), **ARGUMENTS, **job).attach(model)
    units = {tensor.unit for _, _, tensor in new_tensors(optimizer.job.parameters, optimizer.job.group)}
    assert units == {'transformer', 'transformer.h.0', 'transformer.h.1'}
