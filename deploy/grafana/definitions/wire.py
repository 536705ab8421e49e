"""What trainers send and ask, how long it takes, and how near the bounds are."""

from board import JOBS, RATE, SERVERS, Board, mean, quantile, rate, thresholds

READ_BACK = SERVERS + ', why="read_back"'
CALLS = 'ballast_rpc_duration_seconds'
BOUND = thresholds((None, 'green'), (0.5, 'orange'), (0.9, 'red'))


def share(metric, what=''):
    matchers = SERVERS + (f', what="{what}"' if what else '')
    return f'max by (instance) ({metric}{{{matchers}}} / ({metric}_limit{{{matchers}}} > 0))'


def board():
    b = Board('wire', 'Wire', 'What trainers send and ask, how long it takes, and how near the bounds are.')
    b.stat('Pushed', 'Payload bytes of gradients.', 'Bps', [(f'sum({rate("ballast_received_bytes_total", JOBS)})', 'pushed')])
    b.stat('Pulled', 'Payload bytes of parameters.', 'Bps', [(f'sum({rate("ballast_sent_bytes_total", JOBS)})', 'pulled')])
    b.stat('Requests', 'Requests of all methods.', 'reqps', [(f'sum({rate(CALLS + "_count")})', 'requests')])
    b.stat(
        'Error answers',
        'Share of requests that were answered with an error.',
        'percentunit',
        [(f'sum({rate("ballast_rpc_errors_total")}) / (sum({rate(CALLS + "_count")}) > 0)', 'errors')],
        steps=thresholds((None, 'green'), (0.01, 'red')),
    )
    b.stat(
        'Denied',
        "Calls refused for the caller's identity, rights or quota, within the time range.",
        'none',
        [(f'sum(increase(ballast_auth_denied_total{{{SERVERS}}}[$__range]))', 'denied')],
        steps=thresholds((None, 'green'), (1, 'orange')),
        decimals=0,
    )
    b.stat(
        'Certificate',
        'Days until the first certificate of the chosen servers ends.',
        'd',
        [(f'(min(ballast_tls_not_after_timestamp_seconds{{{SERVERS}}}) - time()) / 86400', 'left')],
        steps=thresholds((None, 'red'), (2, 'orange'), (14, 'green')),
        decimals=0,
    )

    b.row('Traffic')
    b.series(
        'Payloads by job',
        "Bytes per second of gradients and of parameters. In place: gradients that a server read in its trainer's memory, and did not copy.",
        'Bps',
        [
            (f'sum by (training_job) ({rate("ballast_received_bytes_total", JOBS)})', '{{training_job}} pushed'),
            (f'sum by (training_job) ({rate("ballast_received_in_place_bytes_total", JOBS)})', '{{training_job}} in place'),
            (f'sum by (training_job) ({rate("ballast_sent_bytes_total", JOBS)})', '{{training_job}} pulled'),
        ],
    )
    b.series(
        'Through shared memory',
        "Payload bytes per second of trainers on the servers' own hosts, which go through shared memory and not over the network.",
        'Bps',
        [(f'sum by (instance, direction) ({rate("ballast_shared_memory_bytes_total")})', '{{instance}} {{direction}}')],
    )
    b.series(
        'Shared memory',
        "Memory that trainers on the servers' own hosts share with them, as a share of its bound.",
        'percentunit',
        [(share('ballast_shared_memory_mapped_bytes'), '{{instance}}')],
        steps=BOUND,
    )
    b.series(
        'Read back',
        'Bytes per second of slices that found no room in memory: read back from the disk for the update.',
        'Bps',
        [(f'sum by (instance) ({rate("ballast_moved_bytes_total", READ_BACK)})', '{{instance}}')],
    )
    b.series(
        'Duplicate pushes',
        'Pushes per second of slices that had arrived already: retries of trainers.',
        'none',
        [(f'sum by (training_job) ({rate("ballast_duplicate_pushes_total", JOBS)})', '{{training_job}}')],
    )

    b.row('Requests')
    b.series('Requests', 'Requests per second by method.', 'reqps', [(f'sum by (method) ({rate(CALLS + "_count")}) > 0', '{{method}}')])
    b.series(
        'Request time, mean', "From a request's arrival to its answer, waiting included.", 's', [(mean(CALLS, 'method'), '{{method}}')]
    )
    b.series(
        'Request time, 99 %',
        "From a request's arrival to its answer, waiting included.",
        's',
        [(quantile(0.99, CALLS, 'method'), '{{method}}')],
    )
    errors = rate('ballast_rpc_errors_total')
    b.series(
        'Errors',
        'Answers per second that are errors, by method and reason.',
        'reqps',
        [
            (
                f'sum by (method, reason) ({errors}) > 0 or label_replace(sum({errors}) == 0, "method", "none", "", "")',
                '{{method}} {{reason}}',
            )
        ],
        w=16,
    )
    b.series(
        'Denied calls',
        'Calls refused for identity, rights or quota, by cause; and changed files of certificates, tokens and rights, taken or refused.',
        'none',
        [
            (f'sum by (why) (increase(ballast_auth_denied_total{{{SERVERS}}}{RATE}))', '{{why}}'),
            (f'sum by (what, result) (increase(ballast_tls_reloads_total{{{SERVERS}}}{RATE})) > 0', '{{what}} {{result}}'),
        ],
    )

    b.row('Bounds')
    b.series(
        'Waiting requests',
        'Requests that wait for a version, a slice or a sync, as a share of their bound.',
        'percentunit',
        [(share('ballast_waiting_requests'), '{{instance}}')],
        steps=BOUND,
        w=6,
    )
    b.series(
        'Waiting bytes',
        'Memory of waiting requests and pushes, as a share of its bound.',
        'percentunit',
        [
            (share('ballast_waiting_bytes', 'requests'), '{{instance}} requests'),
            (share('ballast_waiting_bytes', 'pushes'), '{{instance}} pushes'),
        ],
        steps=BOUND,
        w=6,
    )
    b.series(
        'Unsent bytes',
        'Answers that trainers have not taken, as a share of their bound.',
        'percentunit',
        [(share('ballast_unsent_bytes'), '{{instance}}')],
        steps=BOUND,
        w=6,
    )
    b.series(
        'Open files',
        'Files and connections of the process, as a share of its limit.',
        'percentunit',
        [(f'max by (instance) (process_open_fds{{{SERVERS}}} / process_max_fds{{{SERVERS}}})', '{{instance}}')],
        steps=BOUND,
        w=6,
    )
    b.series(
        'Connections',
        'Connections of the rpc port, as a share of their bound.',
        'percentunit',
        [(share('ballast_connections'), '{{instance}}')],
        steps=BOUND,
    )
    b.series(
        'Threads allowed',
        'Threads of the process, as a share of what the system allows it.',
        'percentunit',
        [(f'max by (instance) (process_threads{{{SERVERS}}} / ballast_threads_limit{{{SERVERS}}})', '{{instance}}')],
        steps=BOUND,
    )
    b.series(
        'Given up',
        'Connections ended because they made no call that was let in, and lines of logs dropped because nobody read them.',
        'none',
        [
            (f'sum by (instance) (increase(ballast_connections_ended_total{{{SERVERS}}}{RATE}))', '{{instance}} connections'),
            (f'sum by (instance, log) (increase(ballast_log_lines_dropped_total{{{SERVERS}}}{RATE}))', '{{instance}} lines: {{log}}'),
        ],
    )

    b.row('Process')
    b.series(
        'Processors',
        'Processors that the process keeps busy.',
        'none',
        [(f'sum by (instance) ({rate("process_cpu_seconds_total")})', '{{instance}}')],
        w=12,
        decimals=2,
    )
    b.series('Threads', 'Threads of the process.', 'none', [(f'sum by (instance) (process_threads{{{SERVERS}}})', '{{instance}}')], w=12)
    return b
