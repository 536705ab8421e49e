"""ballast.estimate: what a model's job would take."""
import pytest
import torch

import ballast


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512, bias=False)).to(torch.bfloat16)


def test_bytes_of_an_embedded_server_and_of_a_rank(model):
    parameters = sum(p.numel() for p in model.parameters())
    told = ballast.estimate(model, dram='64MiB')
    assert told.fits and f'{parameters} parameters' in told.text
    dram = dict(told.tiers)['dram']
    assert 12 * parameters <= dram <= 12 * parameters + (1 << 20)  # no working copies, and no room for slices
    assert told.rank_bytes == 4 * parameters
    assert told.step_seconds == 0  # no machine profile


@pytest.mark.parametrize('where', [{'servers': 1, 'durability': 'none'}, {'ranks': 2}])
def test_servers_have_working_copies(model, where):
    """The private one of several ranks, too."""
    parameters = sum(p.numel() for p in model.parameters())
    told = ballast.estimate(model.parameters(), dram='64MiB', **where)
    assert dict(told.tiers)['dram'] >= (12 + 2 + 4) * parameters


def test_a_model_without_memory_and_with_frozen_parts():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512, dtype=torch.bfloat16, device='meta'),
                                torch.nn.Linear(512, 4, device='meta').requires_grad_(False))
    told = ballast.estimate(model, dram='64MiB', amsgrad=True)
    # Frozen fp32 makes the job fp32, as it would be.
    assert told.rank_bytes == 8 * 512 * 513
    assert dict(told.tiers)['dram'] >= 16 * 512 * 513


@pytest.mark.parametrize('frozen, size', [(None, 0), ('working', 2), ('q8', 1.02), ('state', 12 + 2 + 4)])
def test_a_frozen_base(frozen, size):
    """As shard() keeps it; without shard() the servers have none of it."""
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16, device='meta').requires_grad_(False),
                                torch.nn.Linear(2048, 1, bias=False, dtype=torch.bfloat16, device='meta'))
    told = ballast.estimate(model, dram='256MiB', servers=1, durability='none', frozen=frozen)
    assert 0 <= dict(told.tiers)['dram'] - size * 2048 ** 2 < 0.01 * 2048 ** 2 + 20 * 2048 + (4096 * 20)
    with pytest.raises(ballast.Error, match="frozen='q4'"):
        ballast.estimate(model, dram='256MiB', frozen='q4')


def test_what_is_short(model):
    told = ballast.estimate(model, dram='1MiB')
    assert not told.fits and 'nvme budget' in told.text
    with pytest.raises(ballast.Error, match='expected one of f32, bf16, i8, f8'):
        ballast.estimate(model, dram='64MiB', moments='z')
    for wrong in ({'ranks': -1}, {'ranks': 1 << 20}, {'servers': 1, 'dram': None}):
        with pytest.raises(ballast.Error, match='expected'):
            ballast.estimate(model, **{'dram': '64MiB', **wrong})
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ballast.Error):
        ballast.estimate(frozen, dram='64MiB')
