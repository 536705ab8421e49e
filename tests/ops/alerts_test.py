"""Alert rules by promtool: each fires on its cause, and not on what looks like it. alerts_live_test.py causes the faults themselves."""

import json
import pathlib
import re

import ops
import watched
import yaml
from alert_cases import CASES, TEXTS

RULES = watched.PROMETHEUS / 'ballast.rules.yml'
RUNBOOK = watched.PROMETHEUS / 'runbook.md'


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())['groups'] for rule in group['rules']]


def test_check():
    """promtool reads rules and the example configuration; every alert has a severity, a summary, a consequence and its runbook."""
    ops.need('promtool')
    ops.run('promtool', 'check', 'rules', RULES)
    ops.run('promtool', 'check', 'config', watched.PROMETHEUS / 'prometheus.yml')
    sections = {heading.lower() for heading in re.findall(r'^## (\w+)$', RUNBOOK.read_text(), re.MULTILINE)}
    for rule in rules():
        name = rule['alert']
        assert rule['labels']['severity'] in ('critical', 'warning', 'info'), name
        notes = rule['annotations']
        assert notes['summary'].endswith('.') and notes['description'].endswith('.'), name
        assert notes['runbook_url'] == f'deploy/prometheus/runbook.md#{name.lower()}', name
        assert name.lower() in sections, f'no section of {name} in {RUNBOOK.name}'
    unknown = sections - {rule['alert'].lower() for rule in rules()}
    assert not unknown, f'sections without an alert: {unknown}'


def test_reasons():
    """BallastErrors knows every reason: either a fault of the servers, or provoked by clients."""
    known = set(re.findall(r'inline constexpr char k\w+\[\] = "([A-Z_]+)"', (ops.ROOT / 'proto/base/status.h').read_text()))
    expression = next(rule['expr'] for rule in rules() if rule['alert'] == 'BallastErrors')
    counted = set(re.search(r'reason=~"([A-Z_|]+)"', expression)[1].split('|'))
    provoked = {
        'STALE_EPOCH',
        'NOT_OPEN',
        'BEHIND',
        'OLD_STEP',
        'PLAN_MISMATCH',
        'STALE_ATTEMPT',
        'ALREADY_SEALED',
        'UNKNOWN_JOB',
        'UNKNOWN_UNIT',
        'UNKNOWN_TENSOR',
        'JOB_EXISTS',
        'JOB_MISSING',
        'BAD_RANGE',
        'OVERLAPPING_RANGES',
        'BAD_LENGTH',
        'BAD_DTYPE',
        'BAD_SPEC',
        'TENSORS_DIFFER',
        'BAD_REQUEST',
        'VERSIONS_DIFFER',
        'BAD_CONFIG',
        'INCOMPLETE',
        'VERSION_GONE',
        'SERVER_DOWN',
        'MEMORY_GONE',  # answered before the server counts; the client sends the same over the wire
        'RANK_MISSING',
        'RANK_TAKEN',
        'UNSUPPORTED',
        'BUSY',  # has its own alert
        'NOT_FILLED',  # the client asks the next holder
        'LIMIT',  # BallastLimitNear
        'OTHER_SERVER', 'TLS',  # a client at the wrong door
        'LATER_VERSION',  # ends a start
        'KEY_LOST',  # a client's, of etcd
        'NO_IDENTITY', 'NO_RIGHT', 'QUOTA',
    }
    assert counted <= known, counted - known
    assert known - counted - provoked == set(), f'new reasons: {known - counted - provoked}: fault of the servers, or provoked by clients?'


def firing_at(alert, minutes, firing):
    """promtool's test that exactly these alerts fire then."""
    samples = []
    for labels in firing:
        labels = {**labels, 'alertname': alert, 'alertstate': 'firing'}
        samples.append({'labels': 'ALERTS{' + ','.join(f'{name}="{value}"' for name, value in labels.items()) + '}', 'value': 1})
    return {'expr': f'ALERTS{{alertname="{alert}", alertstate="firing"}}', 'eval_time': f'{round(minutes * 60)}s', 'exp_samples': samples}


def text_of(alert, minutes, labels, summary, description):
    """promtool's test of an alert's texts."""
    rule = next(rule for rule in rules() if rule['alert'] == alert)
    notes = {'summary': summary, 'description': description, 'runbook_url': rule['annotations']['runbook_url']}
    return {'alertname': alert, 'eval_time': f'{minutes}m',
            'exp_alerts': [{'exp_labels': {'severity': rule['labels']['severity'], **labels}, 'exp_annotations': notes}]}  # fmt: skip


def test_cases():
    """Every alert is in a case that fires, and each case fires exactly then."""
    ops.need('promtool')
    tests = {}
    for alert, interval, given, times in CASES:
        tests.setdefault(alert, []).append({'interval': f'{interval}s', 'input_series': given, 'promql_expr_test': [
            firing_at(alert, minutes, firing) for minutes, firing in times.items()]})  # fmt: skip
    for alert, given, *expected in TEXTS:
        tests[alert].append({'interval': '30s', 'input_series': given, 'alert_rule_test': [text_of(alert, *expected)]})
    for alert, its in tests.items():
        # Only the rules of the alert: all together take four times as long.
        group = {'name': alert, 'rules': [rule for rule in rules() if rule['alert'] == alert]}
        pathlib.Path(f'{alert}.rules.yml').write_text(json.dumps({'groups': [group]}))
        case = {'rule_files': [f'{alert}.rules.yml'], 'evaluation_interval': '30s', 'tests': its}
        pathlib.Path(f'{alert}.yml').write_text(json.dumps(case))
    print(ops.run('promtool', 'test', 'rules', *(f'{alert}.yml' for alert in tests)))
    fired = {(alert, labels['severity']) for alert, _, _, times in CASES for firing in times.values() for labels in firing}
    wanted = {(rule['alert'], rule['labels']['severity']) for rule in rules()}
    assert fired == wanted, f'never fired in a case: {wanted - fired}'
