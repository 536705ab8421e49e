"""Ranks whose passes differ under shard(): an error that says who and what, where FSDP2 would hang, or mix units without a word."""
import pytest
from test_shard import run


def test_units_in_another_order(tmp_path):
    for said, steps, losses in run(['another_order'], tmp_path, world=3, script='gathers_main.py')['another_order']:
        assert said.startswith("ranks [0, 1, 2] gathered different units since the last step: rank 0 gathered 'model 0: blocks.0' where "
                               "rank 2 gathered 'model 0: blocks.1', so they computed with a mixture of both"), said
        assert steps == 0
        assert losses[:2] == losses[2:]


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return run(['two_models', 'late', 'gone_on_some', 'inference_first', 'no_values'], tmp_path_factory.mktemp('pair'),
               script='gathers_main.py')


def test_second_partition_of_a_mixture_is_not_kept(tmp_path):
    for said, losses in run(['second_of_a_mixture'], tmp_path, world=4, script='gathers_main.py')['second_of_a_mixture']:
        assert 'computed with a mixture of both' in said
        assert losses[0] == losses[1]


def test_units_of_two_models(pair):
    for said in pair['two_models']:
        assert 'computed with a mixture of both' in said, said


def test_a_rank_that_is_late(pair):
    for losses in pair['late']:
        assert len(losses) == 40 and len(set(losses)) == 1


def test_gradients_that_went_on_some_ranks_only(pair):
    """The last rank does not see that others let theirs go: its own went to the step that they left."""
    for expected, came, said in pair['gone_on_some']:
        assert came == pytest.approx(expected, rel=1e-4)
        refused = [each for each in said if each != 'nothing']
        assert len(refused) == 1 and 'gradients of rank 1 went to the servers in a pass that other ranks have dropped' in refused[0]


def test_values_that_one_rank_cannot_make(pair):
    (first, loss), (second, same) = pair['no_values']
    assert 'rank 1: no values came of tensor' in first and 'division by zero' in first, first
    assert second == 'division by zero'
    assert loss == same


def test_inference_before_training(pair):
    for first, (one, two, three, four) in pair['inference_first']:
        assert first == one == three
        assert four == pytest.approx(two, abs=1e-5)


def test_a_rank_that_makes_no_pass(tmp_path):
    done = run(['absent'], tmp_path, world=3, script='gathers_main.py')['absent']
    for said, seconds in done[:-1]:
        assert said.startswith("a gather of unit '(root)' ended on rank ") and 'ranks [2] did not come to it' in said, said
        assert seconds < 100  # step_timeout is 4 s, and 120 s unless it is told
