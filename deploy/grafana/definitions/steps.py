"""Where the time of a step goes: servers, trainers, and the plan beside the measurement."""

from board import (
    JOBS,
    RATE,
    SERVERS,
    Board,
    mean,
    per_server,
    per_step,
    rate,
    stages,
    thresholds,
)

# Stages of the servers that a resource of the prediction stands for.
RESOURCES = {'compute': 'kernel', 'disk': 'state_read|state_write', 'sync': 'log_sync'}


def trainers(of):
    """Seconds of a step on the trainers by what they do; every server has the same figures, from the seals."""
    family = rate('ballast_trainer_seconds_total', f'{JOBS}, of="{of}"')
    return per_step(f'max by (training_job, what) ({family})')


def board():
    b = Board('steps', 'Steps', 'Where the time of a step goes: on servers, on trainers, and beside the plan.')
    b.stat(
        'Last step',
        'Seconds between the last two decisions.',
        's',
        [(f'max by (training_job) (ballast_last_step_seconds{{{JOBS}}})', '{{training_job}}')],
    )
    b.stat(
        'Since the last step',
        'Seconds since the last decision.',
        's',
        [(f'time() - max by (training_job) (ballast_last_decision_timestamp_seconds{{{JOBS}}} > 0)', '{{training_job}}')],
        decimals=0,
    )
    b.stat(
        'Slowest rank',
        'The rank that sealed the last step last.',
        'none',
        [(f'max by (training_job) (ballast_slowest_rank{{{JOBS}}})', '{{training_job}}')],
    )
    b.stat(
        'Seal spread',
        "From the first rank's seal of the last step to the last rank's.",
        's',
        [(f'max by (training_job) (ballast_seal_spread_seconds{{{JOBS}}})', '{{training_job}}')],
    )
    b.stat(
        'Versions behind',
        'Decided steps whose update has not reached every chunk.',
        'none',
        [
            (
                f'max by (training_job) (ballast_job_committed_version{{{JOBS}}} - ballast_job_oldest_chunk_version{{{JOBS}}})',
                '{{training_job}}',
            )
        ],
    )
    b.stat(
        'Processors busy',
        'Share of the compute threads that work on updates, on the busiest server.',
        'percentunit',
        [(f'max({rate("ballast_compute_busy_seconds_total")} / ballast_compute_threads{{{SERVERS}}})', 'busy')],
        min=0,
        max=1,
    )

    b.row('Where a step goes')
    b.series(
        'On the servers',
        "Seconds of a step by stage, mean over servers. Stages add up to the step; `idle` is the trainers' own time.",
        's',
        [(stages(), '{{training_job}} {{stage}}')],
        stack=True,
        w=12,
        h=10,
    )
    b.series(
        'On the slowest trainer',
        'Seconds of a step on the rank that took longest in each: computing, waiting for pulls, among ranks, waiting for pushes.',
        's',
        [(trainers('max'), '{{training_job}} {{what}}')],
        stack=True,
        w=12,
        h=10,
    )
    b.series(
        'On all trainers',
        'Seconds of a step summed over ranks. Far more on the slowest rank than on its share of this sum is a straggler.',
        's',
        [(trainers('sum'), '{{training_job}} {{what}}')],
        stack=True,
    )
    b.series(
        'Seal spread',
        "From the first rank's seal of a step to the last rank's, beside the step.",
        's',
        [
            (f'max by (training_job) (ballast_seal_spread_seconds{{{JOBS}}})', '{{training_job}} spread'),
            (f'max by (training_job) (ballast_last_step_seconds{{{JOBS}}})', '{{training_job}} step'),
        ],
    )
    b.series(
        'Slowest rank',
        'The rank that sealed last, step by step: a level line is one slow rank.',
        'none',
        [(f'max by (training_job) (ballast_slowest_rank{{{JOBS}}})', '{{training_job}}')],
    )

    b.row('How long, and how even')
    b.heatmap('Step time', 'Steps by their time.', 's', f'sum by (le) (increase(ballast_step_seconds_bucket{{{JOBS}}}{RATE}))', w=12)
    b.series(
        'Predicted and measured',
        "The plan's prediction beside the measurement: total, kernels, reads and writes of state, syncs of the log.",
        's',
        [
            (f'max by (resource) (ballast_job_predicted_step_seconds{{{JOBS}}})', '{{resource}} predicted'),
            (mean('ballast_step_seconds', matchers=JOBS), 'total measured'),
        ]
        + [
            (
                f'max({per_server("ballast_step_stage_seconds_total", names)} / ({per_server("ballast_step_seconds_count")} > 0))',
                f'{resource} measured',
            )
            for resource, names in RESOURCES.items()
        ],
        w=12,
    )
    b.series(
        'Versions behind',
        'Decided steps whose update has not reached every chunk, by server.',
        'none',
        [(f'max by (instance) (ballast_job_committed_version{{{JOBS}}} - ballast_job_oldest_chunk_version{{{JOBS}}})', '{{instance}}')],
    )
    b.series(
        'Queued steps',
        'Decided steps that wait for their update; at the limit the next step waits.',
        'none',
        [
            (f'max by (training_job) (ballast_queued_steps{{{JOBS}}})', '{{training_job}}'),
            (f'max(ballast_queued_steps_limit{{{JOBS}}})', 'limit'),
        ],
        line='limit',
    )
    b.series(
        'Skipped steps',
        'Steps that were skipped because a gradient was not finite.',
        'none',
        [(f'max by (training_job) (increase(ballast_job_skipped_steps_total{{{JOBS}}}{RATE}))', '{{training_job}}')],
        steps=thresholds((None, 'green'), (1, 'orange')),
    )
    return b
