"""Grafana's boards: generated, within the linter's rules and Grafana 11.6's schema. board_live_test.py asks their queries."""

import copy
import sys

import board_checks
import ops
import watched


def test_generated():
    """The files are what the generator writes."""
    board_checks.need_schema()
    ops.run(sys.executable, watched.GRAFANA / 'generate.py', '--check')
    assert len(board_checks.all_boards()) == 6


def test_static():
    board_checks.need_schema()
    ops.need('promtool')
    wrong = [f'{name}: {text}' for name, board in board_checks.all_boards().items() for text in board_checks.static(board)]
    assert not wrong, '\n'.join(wrong)
    uids = [board['uid'] for board in board_checks.all_boards().values()]
    assert len(set(uids)) == len(uids)


def panel(board, kind='timeseries'):
    return next(panel for panel in board['panels'] if panel['type'] == kind)


def seed(name):
    """A board with the mistake `name`."""
    board = copy.deepcopy(board_checks.all_boards()['overview'])
    target, stat = panel(board)['targets'][0], panel(board, 'stat')
    defaults = panel(board)['fieldConfig']['defaults']
    if name == 'unit':
        defaults['unit'] = 'seconds'
    elif name == 'fixed range':
        target['expr'] = target['expr'].replace('$__rate_interval', '5m')
    elif name == 'syntax':
        target['expr'] += ')'
    elif name == 'overlap':
        panel(board)['gridPos']['y'] -= 1
    elif name == 'unknown field':
        defaults['colour'] = {'mode': 'thresholds'}
    elif name == 'unknown field of a panel type':
        defaults['custom']['lineWidht'] = 2
    elif name == 'wrong variable':
        target['expr'] = target['expr'].replace('$training_job', '$trainingjob')
    elif name == 'enum of a panel':
        stat['options']['colorMode'] = 'valeu'
    elif name == 'enum of a field':
        defaults['custom']['drawStyle'] = 'lines'
    elif name == 'enum of the board':
        board['templating']['list'][1]['sort'] = 9
    elif name == 'no description':
        del stat['description']
    elif name == 'no server matcher':
        target['expr'] = target['expr'].replace('instance=~"$instance"', 'instance="a"')
    elif name == 'counter without rate':
        stat['targets'][0]['expr'] = 'sum(ballast_fences_total{job=~"$job", instance=~"$instance"})'
    elif name == 'another data source':
        target['datasource'] = {'type': 'prometheus', 'uid': 'abc'}
    elif name == 'legend without label':
        target['legendFormat'] = '{{rank}}'
    elif name == 'id':
        board['id'] = 7
    return board


# Name of each mistake, and a part of the text that must be said of it.
MISTAKES = {
    'unit': 'unit seconds is not',
    'fixed range': 'range [5m] is fixed',
    'syntax': 'parse error',
    'overlap': 'lies over',
    'unknown field': '.colour is not in the schema',
    'unknown field of a panel type': '.lineWidht is not in the schema',
    'wrong variable': 'variable $trainingjob is not',
    'enum of a panel': "'valeu' is none of",
    'enum of a field': "'lines' is none of",
    'enum of the board': '9 is none of',
    'no description': 'has no description',
    'no server matcher': 'does not choose job and instance',
    'counter without rate': 'a counter without rate',
    'another data source': 'not the chosen data source',
    'legend without label': 'the query has no such label',
    'id': 'has an id',
}


def test_mistakes():
    """Each seeded mistake is found; board_live_test.py seeds an unknown metric."""
    board_checks.need_schema()
    ops.need('promtool')
    for name, said in MISTAKES.items():
        board = seed(name)
        assert board != board_checks.all_boards()['overview'], f'{name} changed nothing'
        wrong = board_checks.static(board)
        print(f'{name}: {wrong}')
        assert any(said in text for text in wrong), f'the mistake "{name}" is not found: {wrong}'
