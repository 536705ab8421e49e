"""Whether the gradient log has room and the disks keep up."""

from board import (
    JOBS,
    RATE,
    RED_FROM_1,
    SERVERS,
    Board,
    mean,
    quantile,
    rate,
    thresholds,
)

RECOVERY = 'ballast_recovery_bytes{' + SERVERS
SPACE = 'ballast_file_system_bytes{' + SERVERS
DISK = 'ballast_disk_operation_seconds'


def board():
    b = Board('disk', 'Disk and log', 'Whether the gradient log has room, the disks keep up, and the bytes are right.')
    b.stat(
        'Log used',
        'Share of the fullest gradient log that waits to be flushed.',
        'percentunit',
        [(f'max(ballast_log_used_bytes{{{JOBS}}} / (ballast_log_capacity_bytes{{{JOBS}}} > 0))', 'used')],
        steps=thresholds((None, 'green'), (0.8, 'orange'), (0.95, 'red')),
        min=0,
        max=1,
    )
    b.stat(
        'Waiting for room',
        'Share of the time in which pushes wait for room in the log.',
        'percentunit',
        [(f'max({rate("ballast_log_wait_seconds_total", JOBS)})', 'waiting')],
        steps=thresholds((None, 'green'), (0.05, 'orange'), (0.5, 'red')),
    )
    b.stat(
        'Disk free',
        'Free share of the fullest file system that holds a data directory.',
        'percentunit',
        [
            (
                f'min({SPACE}, kind="free"}} / ignoring (kind) {SPACE}, kind="size"}})',
                'free',
            )
        ],
        steps=thresholds((None, 'red'), (0.05, 'orange'), (0.1, 'green')),
        min=0,
        max=1,
    )
    b.stat('Sync', 'Mean seconds of a sync.', 's', [(mean(DISK, matchers=f'{SERVERS}, op="sync"'), 'sync')])
    b.stat(
        'Damage found',
        'Checksums that did not match within the time range, and what was repaired.',
        'none',
        [
            (f'sum(increase(ballast_checksum_mismatches_total{{{SERVERS}}}[$__range]))', 'found'),
            (f'sum(increase(ballast_repaired_total{{{SERVERS}}}[$__range]))', 'repaired'),
        ],
        steps=RED_FROM_1,
        decimals=0,
    )
    b.stat(
        'Disk errors',
        'Reads, writes and syncs that the disk refused within the time range.',
        'none',
        [(f'sum(increase(ballast_disk_errors_total{{{SERVERS}}}[$__range]))', 'errors')],
        steps=RED_FROM_1,
        decimals=0,
    )

    b.row('Gradient log')
    b.series(
        'Log used',
        'Bytes of the log that wait to be flushed, by server; the dashed line is the smallest log.',
        'bytes',
        [
            (f'sum by (training_job, instance) (ballast_log_used_bytes{{{JOBS}}})', '{{training_job}} {{instance}}'),
            (f'min(ballast_log_capacity_bytes{{{JOBS}}} > 0)', 'capacity'),
        ],
        line='capacity',
    )
    b.series(
        'Waiting for room',
        'Seconds per second that pushes wait for room in the log.',
        'percentunit',
        [(f'sum by (training_job, instance) ({rate("ballast_log_wait_seconds_total", JOBS)})', '{{training_job}} {{instance}}')],
        steps=thresholds((None, 'green'), (0.05, 'orange')),
    )
    b.series(
        'Chunks flushed',
        'Chunks per second whose new state went to the disk, so that the log behind them is free.',
        'none',
        [(f'sum by (training_job, instance) ({rate("ballast_flushed_chunks_total", JOBS)})', '{{training_job}} {{instance}}')],
    )

    b.row('Disk')
    b.series(
        'Sync time',
        'Seconds of a sync.',
        's',
        [
            (quantile(q, DISK, 'instance', f'{SERVERS}, op="sync"'), f'{{{{instance}}}} {name}')
            for q, name in ((0.5, 'median'), (0.99, '99 %'))
        ],
    )
    b.series(
        'Read and write time',
        'Seconds of a read and of a write, mean and 99 %.',
        's',
        [
            (mean(DISK, 'op', f'{SERVERS}, op=~"read|write"'), '{{op}} mean'),
            (quantile(0.99, DISK, 'op', f'{SERVERS}, op=~"read|write"'), '{{op}} 99 %'),
        ],
    )
    b.series(
        'Operations in flight',
        'Reads and writes that the disk has not answered.',
        'none',
        [(f'sum by (instance) (ballast_disk_inflight{{{SERVERS}}})', '{{instance}}')],
    )
    b.series('Throughput', 'Bytes per second, read and written.', 'Bps', [(f'sum by (op) ({rate("ballast_disk_bytes_total")})', '{{op}}')])
    b.series(
        'Space',
        'Free bytes of the file system that holds the data directory, and its size.',
        'bytes',
        [
            (f'min by (instance) (ballast_file_system_bytes{{{SERVERS}, kind="free"}})', '{{instance}} free'),
            (f'max(ballast_file_system_bytes{{{SERVERS}, kind="size"}})', 'size'),
        ],
        line='size',
    )
    b.series('Operations', 'Reads, writes and syncs per second.', 'ops', [(f'sum by (op) ({rate(DISK + "_count")})', '{{op}}')])

    b.row('Damage and recovery')
    b.series(
        'Checksums that did not match',
        'By place: on the wire a slice is sent again; in log and extents it is repaired or refused.',
        'none',
        [
            (f'sum by (where) (increase(ballast_checksum_mismatches_total{{{SERVERS}}}{RATE}))', '{{where}}'),
            (f'sum by (what) (increase(ballast_repaired_total{{{SERVERS}}}{RATE}))', 'repaired: {{what}}'),
        ],
    )
    b.series(
        'Scrub',
        'States on the disk that the scrub found damaged: those that nothing can mend, and those that were written anew.',
        'none',
        [
            (f'sum by (training_job, instance) (ballast_scrub_damaged_states{{{JOBS}}})', '{{training_job}} {{instance}} damaged'),
            (f'sum by (training_job, instance) (increase(ballast_scrub_mended_states_total{{{JOBS}}}{RATE}))', '{{training_job}} {{instance}} mended'),
        ],
    )
    b.series(
        'Scrub, this pass',
        'Share of the states on the disk that the pass under way has read; an hour lies between two passes at least.',
        'percentunit',
        [
            (
                f'ballast_scrub_pass_bytes{{{JOBS}, kind="done"}} / ignoring (kind) (ballast_scrub_pass_bytes{{{JOBS}, kind="total"}} > 0)',
                '{{training_job}} {{instance}}',
            )
        ],
        max=1,
    )
    b.series(
        'Scrub, last pass',
        'Time since the end of the last complete pass.',
        's',
        [
            (
                f'time() - (ballast_scrub_last_pass_timestamp_seconds{{{JOBS}}} > 0)',
                '{{training_job}} {{instance}}',
            )
        ],
    )
    b.series(
        'Scrub reads',
        'Bytes of states that the scrub reads per second.',
        'Bps',
        [(f'sum by (instance) ({rate("ballast_scrub_read_bytes_total", JOBS)})', '{{instance}}')],
    )
    b.series(
        'Disk errors',
        'Reads, writes and syncs that the disk refused.',
        'none',
        [(f'sum by (op) (increase(ballast_disk_errors_total{{{SERVERS}}}{RATE}))', '{{op}}')],
    )
    b.series(
        'Recovery',
        "Share of a restarted server's states and slices that are back. The server answers trainers at 100 %.",
        'percentunit',
        [
            (
                f'max by (instance) ({RECOVERY}, kind="done"}} / ignoring (kind) ({RECOVERY}, kind="total"}} > 0))',
                '{{instance}}',
            )
        ],
        max=1,
    )
    return b
