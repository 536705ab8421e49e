"""Cases for promtool: what each alert fires on, and what looks like it.

A case: the alert, seconds between samples, series as promtool writes them (of a server `a`, or of several), then at each time in
minutes the labels that fire.
"""

DAY = 86400


def series(name, values, **labels):
    labels = {'job': 'ballast', 'instance': 'a', **labels}
    return {'series': name + '{' + ','.join(f'{key}="{value}"' for key, value in labels.items()) + '}', 'values': values}


def job(name, values, **labels):
    return series(name, values, training_job='demo', **labels)


SERVER = {'job': 'ballast', 'instance': 'a'}
DEMO = {'job': 'ballast', 'training_job': 'demo'}

# (alert, interval in seconds, series, {minutes: [labels that fire]})
CASES = [
    (
        'BallastServerDown',
        30,
        [series('up', '1x4 0x10 1x4'), series('up', '0x20', job='node')],
        {2: [], 2.5: [], 3.5: [{'severity': 'critical', **SERVER}], 8: []},
    ),
    (
        'BallastServerRecovering',
        30,
        [series('ballast_server_state', '1x60', state='recovering'), series('ballast_server_state', '1x60', state='ready', instance='b')],
        {9: [], 11: [{'severity': 'info', 'state': 'recovering', **SERVER}]},
    ),
    (
        'BallastIoFallback',
        30,
        [series('ballast_server_info', '1x60', io='threads'), series('ballast_server_info', '1x60', io='io_uring', instance='b')],
        {4: [], 6: [{'severity': 'warning', 'io': 'threads', **SERVER}]},
    ),
    (
        'BallastMemoryNotLocked',
        30,
        [series('ballast_server_info', '1x60', locked='false'), series('ballast_server_info', '1x60', locked='true', instance='b')],
        {4: [], 6: [{'severity': 'info', 'locked': 'false', **SERVER}]},
    ),
    (
        'BallastVersionSkew',
        60,
        [series('ballast_server_info', '1x90', version='1.0'), series('ballast_server_info', '1x90', version='1.1', instance='b')],
        {50: [], 62: [{'severity': 'info', 'job': 'ballast'}]},
    ),
    (
        'BallastVersionSkew',
        60,
        [series('ballast_server_info', '1x90', version='1.0'), series('ballast_server_info', '1x90', version='1.0', instance='b')],
        {62: []},
    ),
    (
        'BallastLimitNear',
        30,
        [series('process_open_fds', '81x40'), series('process_max_fds', '100x40')],
        {4: [], 6: [{'severity': 'warning', 'limit': 'descriptors', **SERVER}]},
    ),
    (
        'BallastLimitNear',
        30,
        [series('process_threads', '81x40'), series('ballast_threads_limit', '100x40')],
        {6: [{'severity': 'warning', 'limit': 'threads', **SERVER}]},
    ),
    (
        'BallastLimitNear',
        30,
        [series('ballast_connections', '81x40'), series('ballast_connections_limit', '100x40')],
        {6: [{'severity': 'warning', 'limit': 'connections', **SERVER}]},
    ),
    (
        'BallastLimitNear',
        30,
        [
            series('process_open_fds', '79x40'),
            series('process_max_fds', '100x40'),
            series('process_threads', '79x40'),
            series('ballast_threads_limit', '100x40'),
            series('ballast_connections', '79x40'),
            series('ballast_connections_limit', '100x40'),
        ],
        {6: []},
    ),
    (
        'BallastLogLinesDropped',
        30,
        [
            series('ballast_log_lines_dropped_total', '0x4 1x30', log='audit'),
            series('ballast_log_lines_dropped_total', '7x40', log='program'),
        ],
        {1: [], 5: [{'severity': 'warning', 'log': 'audit', **SERVER}]},
    ),
    # Every bound of BallastBusy by itself, and just below.
    (
        'BallastBusy',
        30,
        [series('ballast_waiting_requests', '51x40'), series('ballast_waiting_requests_limit', '100x40')],
        {4: [], 6: [{'severity': 'warning', **SERVER}]},
    ),
    (
        'BallastBusy',
        30,
        [
            series('ballast_waiting_bytes', '51x40', what='pushes'),
            series('ballast_waiting_bytes_limit', '100x40', what='pushes'),
            series('ballast_waiting_bytes', '10x40', what='requests'),
            series('ballast_waiting_bytes_limit', '100x40', what='requests'),
        ],
        {6: [{'severity': 'warning', **SERVER}]},
    ),
    (
        'BallastBusy',
        30,
        [series('ballast_unsent_bytes', '51x40'), series('ballast_unsent_bytes_limit', '100x40')],
        {6: [{'severity': 'warning', **SERVER}]},
    ),
    (
        'BallastBusy',
        30,
        [series('ballast_rpc_errors_total', '0+1x40', reason='BUSY', method='Push')],
        {6: [{'severity': 'warning', **SERVER}]},
    ),
    (
        'BallastBusy',
        30,
        [
            series('ballast_waiting_requests', '49x40'),
            series('ballast_waiting_requests_limit', '100x40'),
            series('ballast_unsent_bytes', '0x40'),
            series('ballast_unsent_bytes_limit', '0x40'),
            series('ballast_rpc_errors_total', '5x40', reason='BUSY', method='Push'),
        ],
        {10: []},
    ),
    (
        'BallastErrors',
        30,
        [
            series('ballast_rpc_errors_total', '0+2x60', reason='DISK_FULL', method='Push'),
            series('ballast_rpc_duration_seconds_count', '0+100x60', method='Push'),
        ],
        {4: [], 10: [{'severity': 'warning', 'job': 'ballast', 'method': 'Push'}]},
    ),
    # What clients provoke, and less than 1 %.
    (
        'BallastErrors',
        30,
        [
            series('ballast_rpc_errors_total', '0+50x60', reason='STALE_EPOCH', method='Push'),
            series('ballast_rpc_errors_total', '0+0.5x60', reason='IO', method='Push'),
            series('ballast_rpc_duration_seconds_count', '0+100x60', method='Push'),
        ],
        {20: []},
    ),
    (
        'BallastJobFailed',
        30,
        [job('ballast_job_failed', '0x4 1x4 0x4'), job('ballast_job_state_lost', '0x12')],
        {1: [], 3: [{'severity': 'critical', **SERVER, **DEMO}], 6: []},
    ),
    ('BallastJobFailed', 30, [job('ballast_job_failed', '1x9'), job('ballast_job_state_lost', '1x9')], {3: []}),
    ('BallastStateLost', 30, [job('ballast_job_state_lost', '0x4 1x4')], {1: [], 3: [{'severity': 'critical', **SERVER, **DEMO}]}),
    (
        'BallastVersionsApart',
        30,
        [job('ballast_job_committed_version', '0+10x20'), job('ballast_job_committed_version', '0x20', instance='b')],
        {1: [], 5: [{'severity': 'critical', **DEMO}]},
    ),
    # Fast steps, and scrapes half an interval apart.
    (
        'BallastVersionsApart',
        30,
        [job('ballast_job_committed_version', '0+100x20'), job('ballast_job_committed_version', '50+100x20', instance='b')],
        {5: [], 9: []},
    ),
    # A job that was dropped and begins anew.
    (
        'BallastVersionsApart',
        30,
        [job('ballast_job_committed_version', '900+1x6 0+1x20'), job('ballast_job_committed_version', '900+1x6 0+1x20', instance='b')],
        {4: [], 5: [], 9: []},
    ),
    # A server that a job with copies went on without, back with what it had; and, of a job without copies, an old directory.
    *[
        (
            'BallastVersionsApart',
            30,
            [
                job('ballast_job_committed_version', '900+10x20'),
                job('ballast_job_epoch', '4x20'),
                job('ballast_job_copies', f'{copies}x20'),
                job('ballast_job_committed_version', '7x20', instance='b'),
                job('ballast_job_epoch', '3x20', instance='b'),
                job('ballast_job_copies', f'{copies}x20', instance='b'),
            ],
            {5: [{'severity': 'critical', **DEMO}] if copies < 2 else []},
        )
        for copies in (0, 1, 2)
    ],
    # 3 chunks on one server and 4 on the other; then the group has started again, and all have their copies.
    (
        'BallastCopiesMissing',
        30,
        [
            job('ballast_job_short_chunks', '0x9 3x140 0x10'),
            job('ballast_job_short_chunks', '0x9 4x140 0x10', instance='b'),
            series('ballast_job_short_chunks', '0x160', training_job='other'),
        ],
        {
            4: [],
            14: [],
            15.5: [{'severity': 'warning', **DEMO}],
            64: [{'severity': 'warning', **DEMO}],
            65.5: [{'severity': 'critical', **DEMO}, {'severity': 'warning', **DEMO}],
            77: [],
        },
    ),
    # A server that the job went on without still counts by its old table.
    (
        'BallastCopiesMissing',
        30,
        [
            job('ballast_job_short_chunks', '0x60'),
            job('ballast_job_epoch', '4x60'),
            job('ballast_job_short_chunks', '5x60', instance='b'),
            job('ballast_job_epoch', '3x60', instance='b'),
        ],
        {25: []},
    ),
    # Two servers tell of the same three chunks, until one of them has copied these anew.
    (
        'BallastReplicasDiffer',
        30,
        [
            job('ballast_job_differing_chunks', '0x9 3x20 0x10'),
            job('ballast_job_differing_chunks', '0x10 3x20 0x10', instance='b'),
            series('ballast_job_differing_chunks', '0x40', training_job='other'),
        ],
        {4: [], 5.5: [{'severity': 'critical', **DEMO}], 14: [{'severity': 'critical', **DEMO}], 17: []},
    ),
    # A server that the job went on without still tells of what it had.
    (
        'BallastReplicasDiffer',
        30,
        [
            job('ballast_job_differing_chunks', '0x60'),
            job('ballast_job_epoch', '4x60'),
            job('ballast_job_differing_chunks', '3x60', instance='b'),
            job('ballast_job_epoch', '3x60', instance='b'),
        ],
        {25: []},
    ),
    # The last chunk comes after 5 minutes.
    (
        'BallastFillStuck',
        30,
        [job('ballast_job_unfilled_chunks', '40-1x10 30x50'), job('ballast_job_imported_bytes_total', '0+1000x10 10000x50')],
        {19: [], 21: [{'severity': 'warning', **SERVER, **DEMO}]},
    ),
    # None comes at all.
    (
        'BallastFillStuck',
        30,
        [job('ballast_job_unfilled_chunks', '40x40'), job('ballast_job_imported_bytes_total', '0x40')],
        {10: [], 11: [{'severity': 'warning', **SERVER, **DEMO}]},
    ),
    # Slow, but they come; all are there; a server that the job went on without.
    (
        'BallastFillStuck',
        30,
        [
            job('ballast_job_unfilled_chunks', '40x60'),
            job('ballast_job_imported_bytes_total', '0x7 1000x8 2000x8 3000x8 4000x8 5000x8 6000x10'),
            job('ballast_job_unfilled_chunks', '0x60', instance='b'),
            job('ballast_job_imported_bytes_total', '9000x60', instance='b'),
            job('ballast_job_unfilled_chunks', '40x60', instance='c'),
            job('ballast_job_imported_bytes_total', '0x60', instance='c'),
            job('ballast_job_epoch', '4x60'),
            job('ballast_job_epoch', '4x60', instance='b'),
            job('ballast_job_epoch', '3x60', instance='c'),
        ],
        {12: [], 25: []},
    ),
    (
        'BallastTrainingStalled',
        30,
        [job('ballast_job_committed_version', '0+1x40 40x1000'), job('ballast_job_committed_version', '0+1x40 40x1000', instance='b')],
        {25: [], 33: [{'severity': 'warning', **DEMO}], 300: [{'severity': 'warning', **DEMO}], 400: []},
    ),
    ('BallastTrainingStalled', 30, [job('ballast_job_committed_version', '7x100')], {40: []}),
    # A step of 8 minutes.
    ('BallastTrainingStalled', 30, [job('ballast_job_committed_version', '0x15 1x15 2x15 3x15 4x15 5x15')], {20: [], 30: [], 40: []}),
    (
        'BallastStraggler',
        30,
        [
            job('ballast_seal_spread_seconds', '0.5x80'),
            job('ballast_step_seconds_sum', '0+30x80'),
            job('ballast_step_seconds_count', '0+15x80'),
        ],
        {9: [], 22: [{'severity': 'warning', **DEMO}]},
    ),
    (
        'BallastStraggler',
        30,
        [
            job('ballast_seal_spread_seconds', '0.3x80'),
            job('ballast_step_seconds_sum', '0+30x80'),
            job('ballast_step_seconds_count', '0+15x80'),
        ],
        {35: []},
    ),
    # Of four ranks one waits for its pushes for 18 of 30 seconds, the others for 9; then 14 and 9.
    *[
        (
            'BallastStraggler',
            30,
            [
                job('ballast_trainer_seconds_total', f'0+{slowest}x80', what='push_wait', of='max'),
                job('ballast_trainer_seconds_total', f'0+{slowest + 27}x80', what='push_wait', of='sum'),
                job('ballast_trainer_seconds_total', '0+20x80', what='gather', of='max'),
                job('ballast_trainer_seconds_total', '0+20x80', what='gather', of='sum'),
                job('ballast_job_world_size', '4x80'),
            ],
            {9: [], 22: [{'severity': 'warning', 'what': 'push_wait', **DEMO}] if slowest == 18 else []},
        )
        for slowest in (18, 14)
    ],
    (
        'BallastSkippedSteps',
        30,
        [job('ballast_job_skipped_steps_total', '0x10 0+1x10 10x60')],
        {5: [], 12: [{'severity': 'warning', **DEMO}], 35: []},
    ),
    ('BallastSkippedSteps', 30, [job('ballast_job_skipped_steps_total', '0x10 4x60')], {12: []}),
    (
        'BallastSlowerThanPlanned',
        30,
        [
            job('ballast_step_stage_seconds_total', '0+30x90', stage='state_read'),
            job('ballast_step_stage_seconds_total', '0+300x90', stage='idle'),
            job('ballast_step_seconds_count', '0+10x90'),
            job('ballast_job_predicted_step_seconds', '1.4x90', resource='total'),
        ],
        {3: [], 25: [{'severity': 'warning', **DEMO}]},
    ),
    (
        'BallastSlowerThanPlanned',
        30,
        [
            job('ballast_step_stage_seconds_total', '0+30x90', stage='state_read'),
            job('ballast_step_stage_seconds_total', '0+300x90', stage='idle'),
            job('ballast_step_seconds_count', '0+10x90'),
            job('ballast_job_predicted_step_seconds', '1.6x90', resource='total'),
        ],
        {40: []},
    ),
    (
        'BallastUneven',
        60,
        [
            series('ballast_tier_part_bytes', '130x90', tier='dram', part='state'),
            series('ballast_tier_part_bytes', '900x90', tier='dram', part='log'),
            series('ballast_tier_part_bytes', '70x90', tier='dram', part='state', instance='b'),
        ],
        {50: [], 62: [{'severity': 'warning', 'job': 'ballast'}]},
    ),
    (
        'BallastUneven',
        60,
        [
            series('ballast_tier_part_bytes', '60x90', tier='dram', part='state'),
            series('ballast_tier_part_bytes', '60x90', tier='nvme', part='state'),
            series('ballast_tier_part_bytes', '80x90', tier='dram', part='state', instance='b'),
        ],
        {62: []},
    ),
    ('BallastLogFull', 30, [job('ballast_log_wait_seconds_total', '0+3x60')], {3: [], 12: [{'severity': 'warning', **SERVER, **DEMO}]}),
    (
        'BallastLogFull',
        30,
        [job('ballast_log_wait_seconds_total', '0+20x60')],
        {12: [{'severity': 'critical', **SERVER, **DEMO}, {'severity': 'warning', **SERVER, **DEMO}]},
    ),
    ('BallastLogFull', 30, [job('ballast_log_wait_seconds_total', '0+1x60')], {25: []}),
    (
        'BallastDiskSlow',
        30,
        [
            series('ballast_disk_operation_seconds_sum', '0+4x90', op='sync'),
            series('ballast_disk_operation_seconds_count', '0+100x90', op='sync'),
            job('ballast_job_predicted_step_seconds', '0.03x90', resource='sync'),
        ],
        {9: [], 22: [{'severity': 'warning', **SERVER}]},
    ),
    (
        'BallastDiskSlow',
        30,
        [
            series('ballast_disk_operation_seconds_sum', '0+2x90', op='sync'),
            series('ballast_disk_operation_seconds_count', '0+100x90', op='sync'),
            series('ballast_disk_operation_seconds_sum', '0+9x90', op='read'),
            series('ballast_disk_operation_seconds_count', '0+1x90', op='read'),
            job('ballast_job_predicted_step_seconds', '0.03x90', resource='sync'),
        ],
        {22: []},
    ),
    (
        'BallastDiskFull',
        60,
        [series('ballast_file_system_bytes', '1000-5x150', kind='free'), series('ballast_file_system_bytes', '5200x150', kind='size')],
        {3: [], 30: [{'severity': 'critical', 'kind': 'free', **SERVER}]},
    ),
    # A new server takes its space at once: most of the disk is free still.
    (
        'BallastDiskFull',
        60,
        [series('ballast_file_system_bytes', '1000x10 600x100', kind='free'), series('ballast_file_system_bytes', '1000x150', kind='size')],
        {12: [], 20: [], 40: []},
    ),
    (
        'BallastDiskFull',
        60,
        [series('ballast_file_system_bytes', '100x100', kind='free'), series('ballast_file_system_bytes', '1000x100', kind='size')],
        {60: []},
    ),
    (
        'BallastDataRepaired',
        60,
        [series('ballast_repaired_total', '0x90 1x90', what='log_block')],
        {89: [], 93: [{'severity': 'warning', 'what': 'log_block', **SERVER}], 170: []},
    ),
    # Repaired while the server recovered: in its first sample.
    (
        'BallastDataRepaired',
        60,
        [series('ballast_repaired_total', '_x5 2x90', what='log_block')],
        {7: [{'severity': 'warning', 'what': 'log_block', **SERVER}], 70: []},
    ),
    ('BallastDataRepaired', 60, [series('ballast_repaired_total', '_x5 0x90', what='log_block')], {7: [], 40: []}),
    (
        'BallastChunksDamaged',
        60,
        [job('ballast_job_damaged_chunks_total', '0x60 3x60')],
        {59: [], 63: [{'severity': 'warning', **SERVER, **DEMO}], 95: []},
    ),
    # A restart found it.
    (
        'BallastChunksDamaged',
        60,
        [job('ballast_job_damaged_chunks_total', '_x5 2x90')],
        {7: [{'severity': 'warning', **SERVER, **DEMO}], 70: []},
    ),
    ('BallastChunksDamaged', 60, [job('ballast_job_damaged_chunks_total', '_x5 0x90')], {7: [], 40: []}),
    (
        'BallastScrubDamage',
        60,
        [job('ballast_scrub_damaged_states', '0x10 2x10 0x10')],
        {5: [], 15: [{'severity': 'critical', **SERVER, **DEMO}], 25: []},
    ),
    (
        'BallastCertificateExpires',
        60,
        [
            series('ballast_tls_not_after_timestamp_seconds', f'{14 * DAY + 1200}x60', what='certificate'),
            series('ballast_tls_not_after_timestamp_seconds', f'{7 * DAY}x60', what='crl'),
        ],
        {1: [], 15: [], 35: [{'severity': 'warning', 'what': 'certificate', **SERVER}]},
    ),
    (
        'BallastCertificateExpires',
        60,
        [series('ballast_tls_not_after_timestamp_seconds', f'{DAY}x60', what='certificate')],
        {15: [{'severity': 'critical', 'what': 'certificate', **SERVER}, {'severity': 'warning', 'what': 'certificate', **SERVER}]},
    ),
    (
        'BallastTlsReloadFailed',
        60,
        [
            series('ballast_tls_reloads_total', '0x10 1x100', result='refused'),
            series('ballast_tls_reloads_total', '0+1x100', result='taken'),
        ],
        {9: [], 15: [{'severity': 'warning', **SERVER}], 80: []},
    ),
]

# Texts as people read them: alert, series, minutes, labels, summary, description.
TEXTS = [
    (
        'BallastServerDown',
        [series('up', '0x10')],
        4,
        SERVER,
        'State server a does not answer.',
        'Training waits for it. With durability step nothing is lost; start it again on its data directory.',
    ),
    (
        'BallastServerRecovering',
        [
            series('ballast_server_state', '1x30', state='recovering'),
            series('ballast_recovery_bytes', '1073741824x30', kind='done'),
            series('ballast_recovery_bytes', '2147483648x30', kind='total'),
        ],
        14,
        {'state': 'recovering', **SERVER},
        'State server a has been recovering for 10 minutes.',
        'Training waits for it. 1GiB of 2GiB are read. Do not restart it: recovery would begin again.',
    ),
    (
        'BallastErrors',
        [
            series('ballast_rpc_errors_total', '0+2x60', reason='IO', method='Push'),
            series('ballast_rpc_duration_seconds_count', '0+100x60', method='Push'),
        ],
        30,
        {'job': 'ballast', 'method': 'Push'},
        '2% of the answers to Push are errors of the servers.',
        'Trainers may stop. The board "Wire" shows the reasons.',
    ),
    (
        'BallastCopiesMissing',
        [
            job('ballast_job_short_chunks', '3x40'),
            job('ballast_job_short_chunks', '4x40', instance='b'),
            job('ballast_job_unfilled_chunks', '0x40'),
            job('ballast_job_unfilled_chunks', '12x40', instance='b'),
        ],
        12,
        DEMO,
        'Job demo has 7 chunks with too few copies.',
        'A chunk with one copy is lost with its server. Servers have 12 chunks still to copy. Copies count once all of a change are made, '
        'and a group trains.',
    ),
    (
        'BallastReplicasDiffer',
        [job('ballast_job_differing_chunks', '3x40'), job('ballast_job_differing_chunks', '3x40', instance='b')],
        5,
        DEMO,
        'Copies of 3 chunks of job demo differ.',
        'Training goes on, and one server has damaged state. With two copies nobody knows which. `ballastctl members` names the chunks and '
        'servers.',
    ),
    (
        'BallastFillStuck',
        [job('ballast_job_unfilled_chunks', '40x40'), job('ballast_job_imported_bytes_total', '0x40')],
        12,
        {**SERVER, **DEMO},
        'State server a lacks 40 chunks of job demo, and has copied none for 10 minutes.',
        "Until it has them, these chunks have one copy less. The server's log says what it waits for.",
    ),
    (
        'BallastStraggler',
        [
            job('ballast_seal_spread_seconds', '0.5x80'),
            job('ballast_slowest_rank', '3x80'),
            job('ballast_step_seconds_sum', '0+30x80'),
            job('ballast_step_seconds_count', '0+15x80'),
        ],
        30,
        DEMO,
        'All ranks of job demo wait for a slow one, for 25% of the time.',
        'The last rank to seal is 3 now. The board "Steps" shows whether one rank is always last.',
    ),
]
