"""Gradients of shard() on their way to the servers in backward: copies as from a GPU, and failures; the server of a single rank."""
import pytest
import torch
from test_shard import check_early, run

SCRIPTS = ['early_copied', 'push_failed', 'only_push_failed', 'step_not_begun']


@pytest.fixture(scope='module')
def pushed(tmp_path_factory):
    return run(SCRIPTS, tmp_path_factory.mktemp('pushed'), script='pushes_main.py')


def test_gradients_that_are_copied(pushed):
    check_early('early_copied', pushed)


def test_a_push_that_fails_behind_backward(pushed):
    """The step is refused, and gradients that come again are taken."""
    for refusal, losses in pushed['push_failed']:
        assert 'the push failed' in refusal
        torch.testing.assert_close(losses[:, 1], losses[:, 0], rtol=0, atol=1e-5)


def test_a_step_that_does_not_begin(pushed):
    """It leaves no gradient on the servers."""
    for refusal, losses in pushed['step_not_begun']:
        assert 'no memory' in refusal
        torch.testing.assert_close(losses[:, 1], losses[:, 0], rtol=0, atol=1e-5)


def test_the_only_push_fails(pushed):
    for refusal, steps in pushed['only_push_failed']:
        assert 'the push failed' in refusal
        assert steps == 2


def test_a_folder_that_another_server_of_the_process_had(tmp_path):
    [(durability, steps)] = run(['own_folder'], tmp_path, world=1, script='pushes_main.py')['own_folder']
    assert durability == 'none', 'its server has no folder that stays'
    assert steps == [0, 1]
