"""Every query of every board against a live Prometheus that scrapes two state servers in training, one of which is killed meanwhile."""

import re
import time

import board_checks
import ops
import watched

SPAN, RATE_INTERVAL = 25, '6s'
RATE_SAMPLES = 5  # of a scrape each second

# Families that panels or rules name and that these servers do not export, and why.
NOT_HERE = dict.fromkeys(
    ['ballast_tls_not_after_timestamp_seconds', 'ballast_tls_reloads_total', 'ballast_auth_denied_total'],
    'servers with TLS, tokens or rights alone export them; alerts_live_test has a server with TLS')

# Families that no panel shows, and why.
NOT_SHOWN = {
}  # fmt: skip

# Queries without a number in this test, by a part of the query, and why.
MAY_BE_EMPTY = {
    'tier="hbm"': 'no budget of HBM: the build for tests has no GPU',
}  # fmt: skip


class Training:
    """Two servers; a job of two ranks with state on NVMe, another of one rank."""

    def __init__(self):
        ops.need(ops.BIN / 'train_bytes_lm')
        self.servers = [watched.Server(number).start() for number in range(2)]
        self.monitoring = watched.Monitoring(self.servers, watched.fast_rules())
        self.trainers = []
        for rank in range(2):
            self.trainers.append(watched.trainer(self.servers, 'demo', rank=rank, ranks=2))
        self.wait_step(1, ['demo'])
        # What the first job leaves of the DRAM is too little for all of its state.
        self.start_other()
        self.wait_step(20)

    def start_other(self):
        self.trainers[2:] = [watched.trainer(self.servers, 'other', '--durability', 'every-K', '--pin-interval', '10')]

    def wait_step(self, more, jobs=('demo', 'other')):
        for job in jobs:
            goal = max(0, self.version(job)) + more
            ops.wait_for(lambda job=job, goal=goal: self.version(job) >= goal, f'step {goal} of {job}')

    def wait_rates(self):
        """Waits until each rate interval of the younger job is full of scrapes that saw it step."""
        samples = 'min(count_over_time(ballast_job_committed_version{training_job="other"}[RATE]))'.replace('RATE', RATE_INTERVAL)
        ops.wait_for(lambda: (self.monitoring.value(samples) or 0) >= RATE_SAMPLES, 'a rate interval of scrapes of the job "other"')

    def version(self, job):
        watched.check_alive(*self.trainers)
        version = self.monitoring.value(f'min(ballast_job_committed_version{{training_job="{job}"}})')
        return -1 if version is None else version

    def ask(self, boards):
        """Queries with and without a number."""
        full, empty = set(), set()
        for board in boards.values():
            here = board_checks.live(self.monitoring.prometheus, board, SPAN, RATE_INTERVAL)
            full |= here[0]
            empty |= here[1]
        return full, empty


def excuse(query):
    for family in board_checks.FAMILY.findall(query):
        if re.sub(r'_(bucket|sum|count)$', '', family) in NOT_HERE:
            return family
    return next((part for part in MAY_BE_EMPTY if part in query), None)


def unknown(boards, exported):
    return board_checks.shown(boards) - exported - NOT_HERE.keys()


def test_every_query():
    boards = board_checks.all_boards()
    training = Training()
    training.wait_rates()
    exported = training.servers[0].families() | training.servers[1].families()
    began = time.monotonic()
    full, empty = training.ask(boards)
    print(f'{len(full | empty)} queries in {time.monotonic() - began:.1f} s; {len(empty)} without a number in training')

    training.servers[1].kill()
    ops.wait_for(lambda: training.monitoring.value('ALERTS{alertname="BallastServerDown", alertstate="firing"}'), 'the alert fires')
    full_killed, empty_killed = training.ask(boards)
    assert full_killed | empty_killed == full | empty, 'other queries while a server is killed'
    lost = {query for query in full - full_killed if 'step' not in query[2]}
    print(f'{len(empty_killed)} without a number while a server is killed')
    assert len(lost) < len(full) / 3, f'the boards are blind while a server is down: {lost}'
    training.servers[1].start()
    # With every-K a group ends with a server.
    watched.end(training.trainers[2])
    training.start_other()
    training.wait_step(3)
    full_again, _ = training.ask(boards)

    never = (full | empty) - full - full_killed - full_again
    wrong = [f'{board}, {panel}: no number from {query}' for board, panel, query in sorted(never) if not excuse(query)]
    unused = MAY_BE_EMPTY.keys() - {excuse(query) for _, _, query in never}
    wrong += [f'MAY_BE_EMPTY: {part}: every query with it has numbers' for part in sorted(unused)]
    every = list(boards.values())
    wrong += [f'{family} is on a panel, and no server exports it' for family in sorted(unknown(every, exported))]
    wrong += [f'{family} is exported, and no panel shows it' for family in sorted(exported - board_checks.shown(every) - NOT_SHOWN.keys())]
    wrong += [f'{family} is exported now: take it off NOT_HERE' for family in sorted(exported & NOT_HERE.keys())]
    wrong += [f'{family} is shown now: take it off NOT_SHOWN' for family in sorted(board_checks.shown(every) & NOT_SHOWN.keys())]
    expressions = re.sub(r'#.*|alert: .*|summary: .*|runbook.*', '', (watched.PROMETHEUS / 'ballast.rules.yml').read_text())
    named = {re.sub(r'_(bucket|sum|count)$', '', family) for family in board_checks.FAMILY.findall(expressions)}
    wrong += [f'{family} is in a rule, and no server exports it' for family in sorted(named - exported - NOT_HERE.keys())]
    assert not wrong, '\n'.join(wrong)

    watched.end(*training.trainers)

    # The mistake that needs a server to be found.
    every[1]['panels'][0]['targets'][0]['expr'] = 'sum(ballast_tier_usd_bytes{job=~"$job", instance=~"$instance"})'
    assert unknown(every, exported) == {'ballast_tier_usd_bytes'}
