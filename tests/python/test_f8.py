"""shard(working='f8'): what passes compute with, bytes, and losses beside bf16's, on one, two and four ranks."""
import pytest
import torch
from test_shard import run

SEEN = ['initial', 'uneven', 'uneven_bf16', 'even', 'recomputed']


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return run([*SEEN, 'losses', 'frozen_state', 'refused'], tmp_path_factory.mktemp('pair'), script='f8_main.py')


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    return run([*SEEN, 'losses'], tmp_path_factory.mktemp('alone'), world=1, script='f8_main.py')


def check_seen(ranks):
    for pairs in ranks:
        assert len(pairs) > 5
        for name, (came, expected, is_exact) in pairs.items():
            assert torch.equal(came, expected), name
            assert is_exact, f'gathered() has another master of {name}'
        assert any((came != 0).any() for came, _, _ in pairs.values())


@pytest.mark.parametrize('script', SEEN)
def test_passes_compute_with_the_blocks_of_the_masters(script, pair):
    check_seen(pair[script])


@pytest.mark.parametrize('script', SEEN)
def test_of_one_rank(script, alone):
    check_seen(alone[script])


def test_of_replicas_of_shards(tmp_path):
    check_seen(run(['hybrid'], tmp_path, world=4, script='f8_main.py')['hybrid'])


@pytest.mark.parametrize('world', ['alone', 'pair'])
def test_losses_are_within_a_hundredth_of_bf16s(world, request):
    for ranks in request.getfixturevalue(world)['losses']:
        (bf16, _), (f8, _) = ranks['bf16'], ranks['f8']
        assert not torch.equal(bf16, f8)
        assert bf16[-20:].mean() < 0.75 * bf16[:20].mean()  # it learns
        assert abs(f8[-20:].mean() / bf16[-20:].mean() - 1) < 0.01


@pytest.mark.parametrize('world', ['alone', 'pair'])
def test_bytes_are_half_of_bf16s(world, request):
    """From the servers, and between ranks."""
    ways = ['unit_pull_bytes'] if world == 'alone' else ['unit_pull_bytes', 'gather_bytes']
    for ranks in request.getfixturevalue(world)['losses']:
        (_, bf16), (_, f8) = ranks['bf16'], ranks['f8']
        assert f8['unit_pulls'] == bf16['unit_pulls']
        for way in ways:
            assert 0 < f8[way] <= 0.52 * bf16[way], way


def test_what_wants_no_gradient_keeps_its_state(pair):
    for losses in pair['frozen_state']:
        assert all(0 < loss < 20 for loss in losses)


@pytest.mark.parametrize(('name', 'words'), [
    ('name', ["expected None or 'f8'"]), ('gather', ['leave out gather']), ('frozen', ["'blocks.0.", "expected frozen='state'"]),
    ('beside TP', ['rows', 'Leave out tensor']), ('mixed', ['an optimizer of their own'])])
def test_refusals(name, words, pair):
    for said in pair['refused']:
        for word in words:
            assert word in said[name], said[name]
