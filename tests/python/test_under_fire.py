"""What tests/bench/peers/under_fire.py counts: events written by hand, and figures that can be checked on paper."""

import json
import os
import sys
from dataclasses import asdict

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'bench', 'peers'))

from fire import flip  # noqa: E402
from fire.report import Row, curve, read_row, table  # noqa: E402
from fire.run import Setting, schedule_of  # noqa: E402
from fire.score import Return, Swept, score, step_seconds, sweep  # noqa: E402


def run(*events):
    """(t, what, fields): of rank 0, or of the launcher where a field says rank -1."""
    return [{'t': t, 'what': what, 'rank': 0, **fields} for t, what, fields in events]


def group(t, generation, step, world=1):
    """A group that needs a second to import torch and another to find its state."""
    return [(t, 'spawned', {'rank': -1, 'generation': generation, 'world': world}),
            *((t + 1, 'imported', {'rank': rank, 'generation': generation}) for rank in range(world)),
            (t + 2, 'opened', {'generation': generation, 'step': step})]


def steps(t, generation, first, count):
    return [(t + i + 1, 'step', {'generation': generation, 'step': first + i}) for i in range(count)]


BEGIN = (0.0, 'begin', {'rank': -1})


def died(t, by_itself=False):
    return (t, 'ended_badly', {'rank': -1, 'by_itself': by_itself})


def test_steps_that_the_next_group_does_not_have_are_lost():
    events = run(BEGIN, *group(0, 1, 0), *steps(2, 1, 1, 5), (7.5, 'fault', {'rank': -1, 'fault': 'trainer'}), died(7.6), *group(8, 2, 3),
                 *steps(10, 2, 4, 4), (14.5, 'fault', {'rank': -1, 'fault': 'flip'}))
    found = score(events, 15)
    assert (found.steps, found.lost_steps, found.starts_s, found.deaths) == (7, 2, 2.0, 0)
    assert [back.lost_steps for back in found.returns] == [2, 0]
    assert found.returns[0].seconds == pytest.approx(13 - 7.5), 'step 6 is the first that was not there before'
    stages = {'noticed': 0.5, 'process start, import torch': 1, 'state': 1, 'steps until one counts': 3}
    assert found.returns[0].stages == pytest.approx(stages)
    assert found.returns[1].seconds is None


def test_a_step_after_the_end_does_not_count():
    events = run(BEGIN, *group(0, 1, 0), *steps(2, 1, 1, 5))
    assert score(events, 6.5).steps == 4


def test_what_the_last_group_never_found_does_not_count():
    before = [BEGIN, *group(0, 1, 0), *steps(2, 1, 1, 5), (7.5, 'fault', {'rank': -1, 'fault': 'flip'}), died(7.6)]
    late = score(run(*before, *group(9.5, 2, 4)), 10)
    assert (late.steps, late.lost_steps, late.returns[0].lost_steps) == (4, 1, 1)
    never = score(run(*before, (9.5, 'spawned', {'rank': -1, 'generation': 2, 'world': 1})), 10)
    assert (never.steps, never.lost_steps, never.returns[0].lost_steps) == (0, 5, 5)


def test_a_machine_is_lost_where_its_disk_is_not_all_there_is():
    assert [fault for _, fault, _ in schedule_of(Setting('peer', checkpoints=True))].count('machine') == 1
    assert [fault for _, fault, _ in schedule_of(Setting('two', servers=True, copies=2))].count('machine') == 1
    assert 'machine' not in [fault for _, fault, _ in schedule_of(Setting('one', servers=True))]


def test_a_row_is_read_as_it_was_written():
    points = curve(run(BEGIN, *group(0, 1, 0), *steps(2, 1, 1, 2), *group(5, 2, 1)), 10, 1000)
    assert points == ([0, 2, 2, 3, 4, 7, 7, 10], [0, 0, 0, 1, 2, 2, 1, 1]), 'it falls where work is lost'
    row = Row('a', 'a 1', [1.0, 2.0], 1.0, 0.5, 0.6, 1, 1000, None, 0, [], 'repaired', 1, 0, [Return('flip', 1.0, None, {}, 1)], 2,
              [Swept(2, 1.0, 0.5, 0.9)], points)
    again = read_row(json.loads(json.dumps(asdict(row))))
    assert again.returns == row.returns and again.sweep == row.sweep and table([again]) == table([row])


def test_a_start_that_a_fault_cuts_off_is_a_start_no_longer():
    events = run(BEGIN, (0, 'spawned', {'rank': -1, 'generation': 1, 'world': 1}), (0.5, 'fault', {'rank': -1, 'fault': 'trainer'}),
                 died(0.6, by_itself=True), *group(4, 2, 0))
    found = score(events, 10)
    assert found.starts_s == pytest.approx(0.5 + 1)
    assert found.deaths == 1


def test_an_interval_is_judged_by_its_cost_and_by_what_it_loses():
    saving = [(10 + t, 'step', {'step': 10 + i + 1}) for i, t in enumerate((2, 3, 5, 6))]
    events = run(*steps(0, 1, 1, 10), (10, 'sweep', {'interval': 2}), *saving,
                 (11, 'saved', {'step': 10}), (14, 'saved', {'step': 12}), (16, 'swept', {'interval': 2}))
    assert step_seconds(events, last=10) == (1.0, 7)
    found, = sweep(events, 10, kills=2, seconds=60)
    assert (found.step_s, found.lag_s) == (1.5, 1.0)
    assert found.goodput == pytest.approx(1 / 1.5 * (1 - 2 * (1.5 + 1) / 60))


def test_a_checkpoint_that_is_being_written_is_not_the_newest(tmp_path):
    for step, whole in ((4, True), (8, True), (12, False)):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / 'data').write_bytes(bytes(100))
        if whole:
            (tmp_path / str(step) / '.metadata').write_bytes(b'')
    assert flip.newest(str(tmp_path)) == '8'
    flipped = flip.of_checkpoints(str(tmp_path))
    assert flipped['step'] == 8
    assert sum((tmp_path / '8' / 'data').read_bytes()) > 0
    (tmp_path / 'latest').write_text('4')
    assert flip.newest(str(tmp_path)) == '4', 'DeepSpeed names it'
