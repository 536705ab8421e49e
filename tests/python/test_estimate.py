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


@pytest.mark.parametrize('where, more', [({}, 0), ({'servers': 1, 'durability': 'none'}, 2 + 4)])
def test_muon(where, more):
    """Of a matrix servers keep master and momentum, and two tensors take part in a step; of the rest, AdamW's."""
    model = torch.nn.Sequential(torch.nn.Embedding(128, 512), torch.nn.Linear(512, 2048, bias=False), torch.nn.LayerNorm(2048),
                                torch.nn.Linear(2048, 512, bias=False)).to(torch.bfloat16)
    matrices, rest = 2 * 2048 * 512, 128 * 512 + 2 * 2048
    told = ballast.estimate(model, optimizer='muon', dram='256MiB', **where)
    expected = 2 * (4 + more) * matrices + (12 + more) * rest
    assert 0 <= dict(told.tiers)['dram'] - expected <= 0.05 * expected, (dict(told.tiers), expected)
    assert told.rank_bytes == 4 * (matrices + rest) and f'{matrices + rest} parameters' in told.text
    # Directions and updates in 16 bits, updates in the gradient's dtype, the iteration on the largest, and momenta.
    rows = {row.what: row.size for row in told.rows if 'uon' in row.what or 'iteration' in row.what or 'momenta' in row.what}
    # A direction makes room for its update, and momenta are gone before there are updates.
    assert rows == {"directions and updates of Muon's matrices": 2 * matrices, 'the iteration on a matrix': 4 * matrices}
    groups = [{'params': [('up', model[1].weight)]}, {'params': [('down', model[3].weight), ('norm', model[2].weight)], 'use_muon': False}]
    told = ballast.estimate(groups, optimizer='muon', dram='256MiB', servers=1, durability='none')
    expected = 2 * 10 * 2048 * 512 + 18 * (2048 * 512 + 2048)
    assert 0 <= dict(told.tiers)['dram'] - expected <= 0.05 * expected
    with pytest.raises(ballast.Error, match=r"'0.bias' has shape \[2048\], but Muon orthogonalises matrices.*muon_groups"):
        ballast.estimate([('0.bias', model[2].bias)], optimizer='muon', dram='256MiB')


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


def test_f8_halves_working_copies():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4))).to(torch.bfloat16)

    def copies(**more):
        rows = ballast.estimate(model, dram='256MiB', frozen='state', ranks=2, **more).rows
        return sum(row.size for row in rows if row.what == 'working copies')
    assert 0 < copies(working='f8') <= 0.52 * copies()
    for wrong in ({'working': 'f4', 'frozen': 'state'}, {'working': 'f8'}):
        with pytest.raises(ballast.Error, match='working='):
            ballast.estimate(model, dram='256MiB', **wrong)
