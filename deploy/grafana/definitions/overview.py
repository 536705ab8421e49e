"""Whether training goes on, how fast, and what would stop it."""

from board import (
    JOBS,
    RED_FROM_1,
    SERVERS,
    Board,
    mean,
    per_server,
    quantile,
    rate,
    stages,
    thresholds,
)

ALERTS = 'ALERTS{alertname=~"Ballast.*", alertstate="firing"}'
# Stages that the plan predicts.
PLANNED = 'log_sync|state_read|kernel|state_write'


def board():
    b = Board('overview', 'Overview', 'Whether training goes on, how fast, and what would stop it.')
    b.stat(
        'Servers up',
        'Servers that answer the scrape, and servers that do not.',
        'none',
        [(f'sum(up{{{SERVERS}}})', 'up'), (f'count(up{{{SERVERS}}} == 0) or vector(0)', 'down')],
    )
    b.stat(
        'Jobs failed',
        'Jobs that take no steps on some server: failed, or without their state.',
        'none',
        [
            (f'sum(max by (training_job) (ballast_job_failed{{{JOBS}}}))', 'failed'),
            (f'sum(max by (training_job) (ballast_job_state_lost{{{JOBS}}}))', 'state lost'),
        ],
        steps=RED_FROM_1,
    )
    b.stat(
        'Version',
        'The last decided step, by job.',
        'none',
        [(f'max by (training_job) (ballast_job_committed_version{{{JOBS}}})', '{{training_job}}')],
    )
    b.stat(
        'Steps per minute',
        'Decided steps, by job.',
        'none',
        [(f'60 * max by (training_job) ({rate("ballast_step_seconds_count", JOBS)})', '{{training_job}}')],
        decimals=1,
    )
    b.stat(
        'Bound by',
        "The stage in which servers spend most of a step. `idle` is the trainers' own time.",
        'none',
        [(f'topk(1, sum by (stage) ({rate("ballast_step_stage_seconds_total", JOBS)}))', '{{stage}}')],
        name=True,
    )
    b.stat(
        'Alerts that fire',
        "Ballast's alerts by Prometheus; the table below names each.",
        'none',
        [(f'count({ALERTS}) or vector(0)', 'alerts')],
        steps=RED_FROM_1,
    )
    b.stat(
        'Error answers',
        'Share of requests that were answered with an error.',
        'percentunit',
        [(f'sum({rate("ballast_rpc_errors_total")}) / (sum({rate("ballast_rpc_duration_seconds_count")}) > 0)', 'errors')],
        steps=thresholds((None, 'green'), (0.01, 'red')),
    )
    b.stat(
        'Log room',
        'Free share of the fullest gradient log. Pushes wait when it ends.',
        'percentunit',
        [(f'1 - max(ballast_log_used_bytes{{{JOBS}}} / (ballast_log_capacity_bytes{{{JOBS}}} > 0))', 'free')],
        steps=thresholds((None, 'red'), (0.05, 'orange'), (0.2, 'green')),
        min=0,
        max=1,
    )
    b.stat(
        'State held',
        'Master weights and moments on the chosen servers.',
        'bytes',
        [(f'sum(ballast_tier_part_bytes{{{SERVERS}, part="state"}})', 'state')],
    )
    b.stat(
        'Parameters', 'Parameters of the jobs.', 'short', [(f'sum(max by (training_job) (ballast_job_parameters{{{JOBS}}}))', 'parameters')]
    )
    b.stat(
        'Waiting',
        'Requests that wait for a version, a slice or a sync, as a share of their bound, on the fullest server.',
        'percentunit',
        [(f'max(ballast_waiting_requests{{{SERVERS}}} / (ballast_waiting_requests_limit{{{SERVERS}}} > 0))', 'of the bound')],
        steps=thresholds((None, 'green'), (0.5, 'orange'), (0.9, 'red')),
        min=0,
        max=1,
    )
    b.stat(
        'Skipped steps',
        'Steps within the time range that were skipped because a gradient was not finite.',
        'none',
        [(f'max(increase(ballast_job_skipped_steps_total{{{JOBS}}}[$__range]))', 'skipped')],
        steps=thresholds((None, 'green'), (1, 'orange')),
        decimals=0,
    )

    b.row('Steps')
    b.series(
        'Step time',
        'From one decision to the next. The mean is exact; quantiles have 8 buckets per decade.',
        's',
        [
            (mean('ballast_step_seconds', matchers=JOBS), 'mean'),
            (quantile(0.5, 'ballast_step_seconds', matchers=JOBS), 'median'),
            (quantile(0.99, 'ballast_step_seconds', matchers=JOBS), '99 %'),
        ],
    )
    b.series(
        'Where a step goes',
        'Seconds of a step by stage, mean over servers; stages add up to the step.',
        's',
        [(stages(), '{{training_job}} {{stage}}')],
        stack=True,
    )
    b.series(
        'Measured over predicted',
        "The servers' part of a step (log syncs, reads and writes of state, kernels) over the plan's prediction: 1 is as planned. "
        'Servers without a machine profile predict nothing.',
        'none',
        [
            (
                f'max by (training_job) ({per_server("ballast_step_stage_seconds_total", PLANNED)} / '
                + f'({per_server("ballast_step_seconds_count")} > 0)) / '
                + f'max by (training_job) (ballast_job_predicted_step_seconds{{{JOBS}, resource="total"}})',
                '{{training_job}}',
            )
        ],
        steps=thresholds((None, 'green'), (2, 'orange')),
        decimals=2,
    )

    b.row('Servers and alerts')
    b.table(
        'Servers',
        'State, version, disk interface, locked memory, processor and memory of each server.',
        {
            'instance': 'Server',
            'server_id': 'Id',
            'state': 'State',
            'version': 'Version',
            'io': 'I/O',
            'locked': 'Memory locked',
            'cpu': 'Instructions',
            'Value #A': ('Answers', 'none'),
            'Value #D': ('Up for', 's'),
            'Value #E': ('Resident', 'bytes'),
            'Value #F': ('Processor', 'percentunit'),
        },
        [
            f'sum by (instance) (up{{{SERVERS}}})',
            f'sum by (instance, state) (ballast_server_state{{{SERVERS}}} == 1)',
            f'sum by (instance, server_id, version, io, locked, cpu) (ballast_server_info{{{SERVERS}}})',
            f'sum by (instance) (ballast_uptime_seconds{{{SERVERS}}})',
            f'sum by (instance) (process_resident_memory_bytes{{{SERVERS}}})',
            f'sum by (instance) ({rate("process_cpu_seconds_total")})',
        ],
        sort='Server',
        mappings={
            'Value #A': [
                {
                    'type': 'value',
                    'options': {'0': {'text': 'no', 'color': 'red', 'index': 0}, '1': {'text': 'yes', 'color': 'green', 'index': 1}},
                }
            ]
        },
    )
    b.table(
        'Firing alerts',
        "Each alert's runbook is in deploy/prometheus/runbook.md.",
        {
            'alertname': 'Alert',
            'severity': 'Severity',
            'instance': 'Server',
            'training_job': 'Training job',
            'method': 'Method',
            'tier': 'Tier',
            'Value': ('Fires', 'none'),
        },
        [f'sum by (alertname, severity, instance, training_job, method, tier) ({ALERTS})'],
        sort='Alert',
    )
    return b
