"""Ranks that come apart: an error of one of them within a call, and different calls. All are told the same at once, and go on."""
import pytest
import torch
from apart_main import CASES
from test_agreement import both, run_main


@pytest.fixture(scope='module')
def ranks(tmp_path_factory):
    return run_main('apart_main.py', 'apart', tmp_path_factory.mktemp('apart'))


# An error on rank 1, or what both are told; then the same call and a step are accepted.
TOLD = {
    'a_load_of_another_dtype': "parameter '3.bias': torch.float64 is not supported",
    'a_load_where_one_rank_wants_a_gradient': "rank 0 trains parameter '3.bias', but on rank 1 it wants no gradient",
    'an_entry_beside_another_shape': "parameter '3.bias' has shape [5] on this rank, but registered with [4]",
    'a_rollback_into_another_shape': "parameter '3.bias' has shape [5] on this rank, but registered with [4]",
    'an_edit_whose_master_one_rank_cannot_read': 'no server answers [SERVER_DOWN]',
    'a_load_whose_master_one_rank_cannot_read': 'no server answers [SERVER_DOWN]',
    'an_export_that_one_rank_has_not': "'",
    'a_registration_that_one_rank_could_not_end': 'no memory [BUDGET]',
    'a_rollback_on_one_rank_of_a_job_that_was_found': "rank 0 is in rollback() of job 'found_resume' and rank 1 in the opening of a job; "
                                                      'expected',
    'a_rollback_beside_a_step_of_a_job_that_was_found': "rank 0 is in rollback() of job 'found_step' and rank 1 in the opening of a job; "
                                                        'expected',
    'a_rollback_that_was_refused': "the servers do not keep version 77 of job 'found_refused' (any more). Of the newest ",
    'sync_on_one_rank': 'rank 0 is in sync_from_params() and rank 1 in step(); expected the same calls on all ranks, in one order '
                        '[RANKS_DIFFER]',
    'a_load_on_one_rank': 'rank 0 is in step() and rank 1 in load_state_dict(); expected the same calls on all ranks',
    'a_load_on_one_rank_before_the_job_is_open': "rank 0 is in the opening of a job and rank 1 in load_state_dict() of job '",
    'a_rollback_on_one_rank': 'rank 0 is in step() and rank 1 in rollback(); expected the same calls on all ranks',
    'entries_of_different_parameters': 'what is loaded is the state of 1 parameters after 0 steps (digest ',
}


@pytest.mark.parametrize('name', TOLD)
def test_all_ranks_are_told_the_same_and_go_on(name, ranks):
    (told, *after), (told_other, *after_other) = both(ranks, name)
    assert told.removeprefix('rank 1: ') == told_other.removeprefix('rank 0: ') and told.removeprefix('rank 1: ').startswith(TOLD[name])
    assert after == after_other == ['accepted', 'accepted']
    assert max(rank[name][1] for rank in ranks) < 55  # none waited for step_timeout


def test_the_export_is_named(ranks):
    for told, *_ in both(ranks, 'an_export_that_one_rank_has_not'):
        assert told.endswith('does not exist: the folder has no export, or the export did not end [BAD_CONFIG]')


def test_a_registration_that_was_cut_off_is_resumed(ranks):
    for told, result, off in both(ranks, 'a_registration_that_was_cut_off'):
        assert told.startswith("parameter 'late' has different values on rank 1 and on rank 0")
        assert result == (3, True, True)
        torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=1e-5)


def test_an_edit_that_one_rank_could_not_write_is_in_nobodys_way(ranks):
    for results in both(ranks, 'an_edit_that_one_rank_could_not_write'):
        assert [each.removeprefix('rank 1: ') for each in results] == ['no server answers [SERVER_DOWN]', 'accepted', 'accepted'] * 5


def test_debug_on_one_rank_is_for_all(ranks):
    for same, apart, after in both(ranks, 'debug_on_one_rank'):
        assert same == ['accepted'] * 3 and after == 'accepted'
        assert apart.startswith("parameter '0.weight' has different gradients on rank 1 and on rank 0")


def test_an_inf_is_a_skip_where_all_have_it(ranks):
    results = both(ranks, 'an_inf_among_gradients')
    for (inf, nan, alone), after, _ in results:
        assert inf == nan == ('accepted', True)
        assert alone[0].startswith("parameter '0.weight' has an Inf or a NaN in its gradient on rank 1 and none on rank 0. Gradients must "
                                   'be reduced before step()')
        assert after == 'accepted'
    assert torch.equal(results[0][2], results[1][2])


def test_a_store_that_is_gone_is_a_rank_that_is_missing(ranks):
    for told in both(ranks, 'no_store'):
        assert len(told) == 3
        for each in told:
            assert each.startswith("torch.distributed's store does not answer. The process of the first rank keeps it")
            assert 'RANK_MISSING' in each


def test_every_case_is_looked_at(ranks):
    here = open(__file__, encoding='utf-8').read()
    assert [name for name in CASES if f"'{name}'" not in here] == []
    assert set(ranks[0]) == set(CASES)
