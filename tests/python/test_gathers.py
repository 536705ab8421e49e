"""Ranks whose passes differ under shard(): an error that says who and what, where FSDP2 would hang, or mix units without a word."""
from test_shard import run


def test_units_in_another_order(tmp_path):
    for said, steps, losses in run(['another_order'], tmp_path, world=3, script='gathers_main.py')['another_order']:
        assert said.startswith('ranks [0, 1, 2] gathered different units together since the last step: '
                               "'blocks.0' on rank 0 where 'blocks.1' on rank 2, and computed with a mixture of both"), said
        assert steps == 0
        assert losses[:2] == losses[2:]


def test_a_rank_that_makes_no_pass(tmp_path):
    done = run(['absent'], tmp_path, world=3, script='gathers_main.py')['absent']
    for said, seconds in done[:-1]:
        assert said.startswith("a gather of unit 'model' ended on rank ") and 'ranks [2] did not come to it' in said, said
        assert seconds < 11
