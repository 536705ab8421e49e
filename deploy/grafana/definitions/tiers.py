"""What HBM, DRAM and NVMe hold, how full they are, and what moves between them."""

from board import JOBS, RATE, SERVERS, Board, rate

NVME = f'{SERVERS}, tier="nvme"'
STATE = 'ballast_tier_part_bytes{' + SERVERS + ', part="state"'
WRITES = SERVERS + ', op="write"'
TIERS = ('hbm', 'dram', 'nvme')


def board():
    b = Board('tiers', 'Memory tiers', 'What HBM, DRAM and NVMe hold, how full they are, and what moves between them.')
    for tier in TIERS:
        matchers = f'{SERVERS}, tier="{tier}"'
        b.stat(
            f'{tier.upper()} used',
            'Share of the budgets that is taken. Budgets are filled on purpose: near 100 % is as it should be.',
            'percentunit',
            [
                (
                    f'sum(ballast_tier_used_bytes{{{matchers}}}) / (sum(ballast_tier_capacity_bytes{{{matchers}}}) > 0)',
                    tier,
                )
            ],
            min=0,
            max=1,
        )
    b.stat(
        'State on NVMe',
        'All versions of state on the disks: state that lives there, and the durable copies of state that lives in memory.',
        'bytes',
        [(f'sum({STATE}, tier="nvme"}})', 'on NVMe')],
    )
    b.stat(
        'Chunks on the move',
        'Chunks that are not yet where new budgets want them.',
        'none',
        [(f'sum(ballast_job_moving_chunks{{{JOBS}}})', 'chunks')],
    )
    b.stat(
        'Servers with locked memory',
        'Memory that is not locked may be swapped out, and is copied once more on its way to the disk.',
        'none',
        [
            (f'count(ballast_server_info{{{SERVERS}, locked="true"}}) or vector(0)', 'locked'),
            (f'count(ballast_server_info{{{SERVERS}, locked="false"}}) or vector(0)', 'not locked'),
        ],
    )

    b.row('What is where')
    for tier in TIERS:
        matchers = f'{SERVERS}, tier="{tier}"'
        b.series(
            f'{tier.upper()} by part',
            'Parts of the tier add up to what is used; the dashed line is the budget.',
            'bytes',
            [
                (f'sum by (part) (ballast_tier_part_bytes{{{matchers}}})', '{{part}}'),
                (f'sum(ballast_tier_capacity_bytes{{{matchers}}})', 'budget'),
            ],
            stack=True,
            line='budget',
            h=9,
        )
    b.series(
        'State by tier',
        'Master weights and moments. NVMe also has the durable copies of state that lives in memory, and versions to come.',
        'bytes',
        [(f'sum by (tier) ({STATE}}})', '{{tier}}')],
        stack=True,
    )
    b.series(
        'Fullest server',
        'Used share of the budget on the fullest server. One server far above the others is worth a look.',
        'percentunit',
        [(f'max by (tier) (ballast_tier_used_bytes{{{SERVERS}}} / (ballast_tier_capacity_bytes{{{SERVERS}}} > 0))', '{{tier}}')],
        max=1,
    )
    b.series(
        'Spread of state',
        'State of the fullest server over the mean of servers: 1 is even.',
        'none',
        [
            (
                f'max by (tier) ({STATE}}}) / (avg by (tier) ({STATE}}}) > 0)',
                '{{tier}}',
            )
        ],
        decimals=2,
    )

    b.row('What moves')
    b.series(
        'Moved between tiers',
        'Bytes per second from tier to tier, and why.',
        'Bps',
        [(f'sum by (from, to, why) ({rate("ballast_moved_bytes_total")}) > 0', '{{from}} to {{to}}: {{why}}')],
        w=12,
    )
    b.series(
        'Chunks that moved',
        'Chunks that changed their tier because budgets changed, and chunks that still will.',
        'none',
        [
            (f'sum by (training_job) (ballast_job_moving_chunks{{{JOBS}}})', '{{training_job}} to move'),
            (f'sum by (training_job) (increase(ballast_job_moved_chunks_total{{{JOBS}}}[$__rate_interval]))', '{{training_job}} moved'),
        ],
        w=12,
    )
    b.series(
        'Copied between servers',
        'Whole chunks, in bytes per second, that servers take from each other for new copies, and those that they give.',
        'Bps',
        [
            (f'sum by (training_job) ({rate("ballast_job_imported_bytes_total", JOBS)})', '{{training_job}} taken'),
            (f'sum by (training_job) ({rate("ballast_job_exported_bytes_total", JOBS)})', '{{training_job}} given'),
        ],
        w=12,
    )
    b.series(
        'Chunks without all copies',
        'Chunks that a server still has to copy from the other servers of a job; and chunks with fewer copies than the job wants. '
        'Copies count once all of a change are made, and a group trains.',
        'none',
        [
            (f'sum by (training_job, instance) (ballast_job_unfilled_chunks{{{JOBS}}})', '{{training_job}} {{instance}} to copy'),
            (f'sum by (training_job) (ballast_job_short_chunks{{{JOBS}}})', '{{training_job}} with too few copies'),
        ],
        w=12,
    )
    b.series(
        'Copies that differ',
        'Chunks whose copies were found to differ, on each server that has one of them; and how often that was found. Training goes on; '
        'the alert BallastReplicasDiffer says what to do.',
        'none',
        [
            (f'sum by (training_job, instance) (ballast_job_differing_chunks{{{JOBS}}})', '{{training_job}} {{instance}}'),
            (
                f'sum by (training_job) (increase(ballast_job_replicas_differ_total{{{JOBS}}}{RATE}))',
                '{{training_job}} found within the interval',
            ),
        ],
        w=12,
    )
    b.series(
        'Damaged chunks',
        'Chunks whose state was found damaged, on the server that found it and copied them from another server of the job within the '
        'interval. The alert BallastChunksDamaged says what to do about the disk.',
        'none',
        [
            (
                f'sum by (training_job, instance) (increase(ballast_job_damaged_chunks_total{{{JOBS}}}{RATE}))',
                '{{training_job}} {{instance}}',
            )
        ],
        w=12,
    )
    b.series(
        'NVMe devices',
        'Part of its budget that each directory of the NVMe tier has in use.',
        'percentunit',
        [
            (
                (
                    f'sum by (instance, directory) (ballast_nvme_device_bytes{{{SERVERS}, kind="used"}})'
                    f' / (sum by (instance, directory) (ballast_nvme_device_bytes{{{SERVERS}, kind="budget"}}) > 0)'
                ),
                '{{instance}} {{directory}}',
            )
        ],
        w=12,
    )
    b.series(
        'Read from tiers',
        'Bytes per second that updates, recovery and pulls take from each tier.',
        'Bps',
        [(f'sum by (tier) ({rate("ballast_tier_read_bytes_total")})', '{{tier}}')],
        w=12,
    )
    b.series(
        'Written to tiers',
        'Bytes per second that updates, flushes and moves write to each tier.',
        'Bps',
        [(f'sum by (tier) ({rate("ballast_tier_written_bytes_total")})', '{{tier}}')],
    )
    steps = f'(max({rate("ballast_step_seconds_count", JOBS)}) > 0)'
    b.series(
        'NVMe bytes per step',
        'Cost of a step for the disks of all chosen servers.',
        'bytes',
        [(f'sum({rate(f"ballast_tier_{what}_bytes_total", NVME)}) / {steps}', what) for what in ('read', 'written')],
    )
    b.series(
        'Written per day',
        "Bytes that a day at this rate writes to each server's disk: compare with the endurance that its maker states.",
        'bytes',
        [(f'86400 * sum by (instance) ({rate("ballast_disk_bytes_total", WRITES)})', '{{instance}}')],
    )
    b.series(
        'Memory of the process',
        'Resident and mapped bytes of ballastd: the DRAM budget is part of them.',
        'bytes',
        [
            (f'sum by (instance) (process_resident_memory_bytes{{{SERVERS}}})', '{{instance}} resident'),
            (f'sum by (instance) (process_virtual_memory_bytes{{{SERVERS}}})', '{{instance}} mapped'),
        ],
    )
    return b
