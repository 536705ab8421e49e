"""What changes a model of shard() behind the optimizer's back: every way of changes.py at every moment counts, or is refused by the
parameter's name; passes that exceptions cut off, loads, passes within gathered(), models that nothing trains, and units."""
import collections
import os

import pytest
import torch
from changes_sharded_main import MOMENTS, ways_at
from conftest import two_state_servers
from test_shard import run

SCRIPTS = ['cut_off_passes', 'loads', 'forward_within', 'held']
# By number of ranks: with gradients that go in backward, or with the step.
TABLES = {1: ['early', 'late'], 2: ['early', 'late']} if os.environ.get('TEST_ROUNDS') == 'full' else {1: ['late'], 2: ['early']}


@pytest.fixture(scope='module', params=[1, 2], ids=['alone', 'pair'])
def done(request, tmp_path_factory):
    world = request.param
    came = run([*TABLES[world], *SCRIPTS], tmp_path_factory.mktemp('changes'), world=world, script='changes_sharded_main.py')
    return {'world': world, **came}


def test_each_change_counts_or_is_refused_by_name(done):
    for came in [came for script in TABLES[done['world']] for came in done[script]]:
        wrong = {cell: outcome for cell, outcome in came.items() if outcome[0] not in ('counts', 'refused')}
        assert not wrong
        assert len(came) == sum(len(ways_at(moment, done['world'])) for moment in MOMENTS)
        counted = collections.Counter(moment for (moment, _), (what, _) in came.items() if what == 'counts')
        # In-place, through .data and numpy, by another Parameter: all that leave modules and shapes as they are.
        assert counted['gathered to write'] > (30 if done['world'] == 1 else 4)
        least = 2 if done['world'] == 1 else 1
        assert counted.keys() == set(MOMENTS) and min(counted.values()) >= least, counted


def test_a_pass_that_an_exception_cuts_off_leaves_no_gradient(done):
    for came in done['cut_off_passes']:
        for (undisturbed, broken), (right_after, among_others) in came.values():
            assert torch.equal(undisturbed, broken)
            assert 'a backward pass was cut off by an exception' in right_after
            assert 'a backward pass was cut off by an exception' in among_others


def test_a_load_is_taken_whole_or_not_at_all(done):
    for said, stayed, came in done['loads']:
        assert "missing keys ['head.weight']" in said[0] and "unexpected keys ['more']" in said[1]
        assert all('size mismatch for head.weight' in each for each in said[2:])  # the last on one rank alone
        assert stayed and came


def test_a_forward_pass_within_gathered(done):
    for (outside, within), (written, after), refused, steps in done['forward_within']:
        assert outside == pytest.approx(within, abs=1e-6) and written == pytest.approx(after, abs=1e-6)
        assert abs(written - within) > 1e-4
        assert "a forward pass within gathered(), with copies of parameters such as 'embed.weight': no step takes" in refused
        assert steps == 2


def test_a_model_that_nothing_trains_needs_no_optimizer(done):
    for before, losses in done['held']:
        assert losses == pytest.approx([before, before], abs=1e-6)


def test_units(tmp_path):
    with two_state_servers(tmp_path / 'servers') as servers:
        done = run(['units'], tmp_path, script='changes_sharded_main.py', BALLAST_SERVERS=servers)
    for names, losses, whole, said in done['units']:
        assert names['dict'] == names['sequential'] == ['(root)', 'blocks.0', 'blocks.1', 'blocks.2']
        assert names['named'] == ['(root)', 'blocks.first', 'blocks.second', 'blocks.third']
        assert losses == pytest.approx(whole, abs=1e-5) and len(losses) == 6
        assert len(said) == 1 and "unit '(root)' has 128 of the model's 128 MiB" in said[0] and 'units=[' in said[0]
