"""What ranks of one job compare, and what each is told: two processes run all cases of agreement_main.py, once."""
import pytest
import torch
from agreement_main import CASES
from test_ranks import WORLD, run_pair

REDUCE = '. Gradients must be reduced before step(): wrap the model in DistributedDataParallel'


def run_main(script, name, folder, anew=False):
    """By rank: results by case, and seconds."""
    run_pair(script, folder, folder, anew=anew)
    return [torch.load(folder / f'{name}-{rank}.pt') for rank in range(WORLD)]


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    return run_main('agreement_main.py', 'agreement', tmp_path_factory.mktemp('agreement'), anew=True)


def both(ranks, name):
    (mine, _), (other, _) = ranks[0][name], ranks[1][name]
    return mine, other


# What both ranks were told, in the same words.
REFUSED = {
    'ignored_by_ddp': "parameter '3.bias' has different gradients on rank 1 and on rank 0" + REDUCE,
    'other_values_before_a_load': "parameter '0.weight' has different values on rank 1 and on rank 0",
    'megatron': "parameter '0.weight' has Megatron's attribute tensor_model_parallel",
    'fsdp2_beside_a_scalar': "parameter 'scale' has different gradients on rank 1 and on rank 0" + REDUCE,
    'a_mesh_smaller_than_the_world': "parameter '0.weight' has different gradients on rank 1 and on rank 0" + REDUCE,
    'stages_that_number_their_layers_anew': "parameter '0.weight' has different values on rank 1 and on rank 0",
    'stages_with_one_seed': "parameter '0.weight' has different gradients on rank 1 and on rank 0" + REDUCE,
    'frozen_on_one_rank': "rank 1 trains parameter '3.bias', but on rank 0 it wants no gradient",
    'another_shape': "parameter 'weight' is f32 [4, 4] in group 0 and unit 'weight' on rank 0 and f32 [5, 4] in",
    'another_name': "the job's name is 'job0' on rank 0 and 'job1' on rank 1",
    'servers_on_one_rank': 'the list of servers is none on rank 0 and one of 1 on rank 1',
    'a_rank_that_does_not_come': 'the opening of a job: rank 0 waited 2 s (step_timeout) for rank 1; expected all ranks to make this call, '
                                 'the same number of times [RANK_MISSING]',
}
# Of one rank alone, or of each rank's own part: the first one's error is everybody's.
REFUSED_THERE = {
    'fsdp1_flat': "parameter '_fsdp_wrapped_module._flat_param' belongs to FullyShardedDataParallel (FSDP1)",
    'fsdp1_original_parameters': "parameter '_fsdp_wrapped_module.0.weight' belongs to FullyShardedDataParallel (FSDP1)",
    'an_error_on_one_rank': "parameter '3.bias': torch.float64 is not supported",
    'other_data_on_one_rank': "parameter '3.bias' has shape [5], but its gradient has [4]: was .data set to another tensor",
}


@pytest.mark.parametrize('name', REFUSED)
def test_all_ranks_are_told_the_same(name, ranks):
    mine, other = both(ranks, name)
    assert mine == other and mine.startswith(REFUSED[name])
    assert max(rank[name][1] for rank in ranks) < 55  # none waited for step_timeout


@pytest.mark.parametrize('name', REFUSED_THERE)
def test_an_error_on_one_rank_is_everybodys(name, ranks):
    mine, other = (told.removeprefix('rank 0: ').removeprefix('rank 1: ') for told in both(ranks, name))
    assert mine == other and mine.startswith(REFUSED_THERE[name])
    assert max(rank[name][1] for rank in ranks) < 55  # none waited for step_timeout


def test_many_parameters_that_differ_are_told_in_parts(ranks):
    for told, longest in both(ranks, 'many_parameters_that_differ'):
        assert ' is f32 [1] in group 0 ' in told and ' on rank 0 and f32 [2] in group 0 ' in told
        assert longest < 70000


def test_values_that_differ(ranks):
    for told, after in both(ranks, 'values'):
        assert told.startswith("parameter '0.weight' has different values on rank 1 and on rank 0, but ranks that hold the same part")
        assert 'RANKS_DIFFER' in told
        assert after == 'accepted'


def test_gradients_that_differ(ranks):
    results = both(ranks, 'gradients')
    for told, after, _ in results:
        assert told.startswith("parameter '0.weight' has different gradients on rank 1 and on rank 0" + REDUCE)
        assert after == 'accepted'
    assert torch.equal(results[0][2], results[1][2])


def test_large_gradients_are_compared_now_and_then_and_small_ones_and_with_debug_all_always(ranks):
    for unseen, seen, small, with_debug in both(ranks, 'gradients_of_a_later_step'):
        assert unseen == 'accepted'
        assert seen.startswith("parameter '0.weight' has different gradients")
        assert small.startswith("parameter '0.bias' has different gradients")
        assert with_debug.startswith("parameter '0.weight' has different gradients")


def test_a_last_bit_of_a_gradient_may_differ(ranks):
    for rounded, scaled in both(ranks, 'gradients_that_round_otherwise'):
        assert rounded == 'accepted'
        assert scaled.startswith("parameter '3.weight' has different gradients")


def test_edits_that_differ(ranks):
    for alike, apart in both(ranks, 'edits'):
        assert alike == 'accepted'
        assert apart.startswith("parameter '2.weight' has different values on rank 1 and on rank 0")


def test_late_parameters_that_differ(ranks):
    for told, after in both(ranks, 'late_parameters'):
        assert told.startswith("parameter 'late' has different values on rank 1 and on rank 0")
        assert after == 'accepted'


def test_a_resumed_job_brings_its_values(ranks):
    for told, same, step in both(ranks, 'a_resumed_job'):
        assert (told, same) == ('accepted', True)
        assert step.startswith("parameter '0.weight' has different gradients on rank 1")


def test_a_job_with_other_tensors_is_opened_twice(ranks):
    for rank in both(ranks, 'unknown_and_frozen'):
        assert rank == (1, 2, 6)


def test_gradients_go_where_their_parameters_are(ranks):
    for placements, off in both(ranks, 'a_gradient_that_is_replicated'):
        assert placements == ['(Replicate(),)', '(Partial(sum),)'] * 2
        torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=1e-6)


def test_a_gradient_of_another_kind_is_refused(ranks):
    for plain, distributed in both(ranks, 'a_gradient_of_another_kind'):
        assert plain.startswith("parameter 'weight' is a DTensor, but its gradient is a plain tensor")
        assert distributed.startswith("parameter 'weight' is a plain tensor, but its gradient is a DTensor")


def test_every_case_is_looked_at(ranks):
    here = open(__file__, encoding='utf-8').read()
    assert [name for name in CASES if f"'{name}'" not in here] == []
    assert set(ranks[0]) == set(CASES)
