"""The training jobs: a table of all, and a row for each."""

from board import JOBS, SERVERS, Board, rate, thresholds


def every_job(metric, by='training_job', matchers=JOBS):
    return f'max by ({by}) ({metric}{{{matchers}}})'


def board():
    b = Board('jobs', 'Jobs', 'The training jobs: a table of all, and a row for each.')
    b.table(
        'Jobs',
        'Durability, members, copies and versions of each job.',
        {
            'training_job': 'Training job',
            'durability': 'Durability',
            'Value #B': ('Version', 'none'),
            'Value #C': ('Oldest chunk', 'none'),
            'Value #D': ('Ranks', 'none'),
            'Value #E': ('Servers', 'none'),
            'Value #F': ('Parameters', 'short'),
            'Value #G': ('Chunks', 'none'),
            'Value #H': ('Copies', 'none'),
            'Value #I': ('Too few copies', 'none'),
            'Value #J': ('Skipped', 'none'),
            'Value #K': ('Pins', 'none'),
            'Value #L': ('Kept version', 'none'),
            'Value #M': ('Failed', 'none'),
            'Value #N': ('State lost', 'none'),
        },
        [
            every_job('ballast_job_info', 'training_job, durability'),
            every_job('ballast_job_committed_version'),
            f'min by (training_job) (ballast_job_oldest_chunk_version{{{JOBS}}})',
            every_job('ballast_job_world_size'),
            every_job('ballast_job_servers'),
            every_job('ballast_job_parameters'),
            f'sum by (training_job) (ballast_job_chunks{{{JOBS}}})',
            every_job('ballast_job_copies'),
            f'sum by (training_job) (ballast_job_short_chunks{{{JOBS}}})',
            every_job('ballast_job_skipped_steps_total'),
            f'max by (training_job) (sum by (training_job, instance) (ballast_job_pins{{{JOBS}}}))',
            f'min by (training_job) (ballast_job_newest_durable_pin_version{{{JOBS}}})',
            every_job('ballast_job_failed'),
            every_job('ballast_job_state_lost'),
        ],
        sort='Training job',
        h=7,
    )
    b.series(
        'Jobs',
        'Jobs on the fullest server, and its bound.',
        'none',
        [(f'max(ballast_jobs{{{SERVERS}}})', 'jobs'), (f'min(ballast_jobs_limit{{{SERVERS}}})', 'limit')],
        line='limit',
        h=6,
    )
    b.series(
        'Versions', 'The last decided step of each job.', 'none', [(every_job('ballast_job_committed_version'), '{{training_job}}')], h=6
    )
    b.series(
        'Groups',
        'Epochs of each job: a new group of trainers takes the job with a new epoch.',
        'none',
        [(every_job('ballast_job_epoch'), '{{training_job}}')],
        h=6,
    )

    b.row('$training_job', repeat='training_job')
    b.series(
        'Steps per minute',
        'Decided steps of the job.',
        'none',
        [(f'60 * max({rate("ballast_step_seconds_count", JOBS)})', 'steps')],
        w=6,
        decimals=1,
    )
    b.series(
        'Payloads',
        'Bytes per second of gradients and of parameters, over all servers.',
        'Bps',
        [(f'sum({rate("ballast_received_bytes_total", JOBS)})', 'pushed'), (f'sum({rate("ballast_sent_bytes_total", JOBS)})', 'pulled')],
        w=6,
    )
    b.series(
        'Pins', 'Versions that are kept, for readers and on the disks.', 'none', [(every_job('ballast_job_pins', 'kind'), '{{kind}}')], w=6
    )
    b.stat(
        'Fences',
        'New groups, and attempts at a step that were dropped, within the time range.',
        'none',
        [
            (f'max(increase(ballast_fences_total{{{JOBS}}}[$__range]))', 'fences'),
            (f'max(increase(ballast_dropped_attempts_total{{{JOBS}}}[$__range]))', 'dropped attempts'),
        ],
        steps=thresholds((None, 'green'), (1, 'orange')),
        w=6,
        h=8,
        decimals=0,
    )
    return b
