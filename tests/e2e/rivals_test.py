#!/usr/bin/env python3
"""Two groups open one job with two copies of each chunk at once, again and again, with a real etcd.

Usage: rivals_test.py BIN [--rounds N]     BIN: folder of the programs. Exit 77: no etcd here.
In each round one group goes on, and the other ends and says that another has the job; the next round finds the job as the first left it,
killed. No step is decided twice, the claimed epoch only rises, and the job has the bits of undisturbed training in the end.
"""
import json
import re
import signal
import sys

# etcd_jobs reads the second argument as names of tests.
ROUNDS = int(sys.argv[sys.argv.index('--rounds') + 1]) if '--rounds' in sys.argv else 4
sys.argv[2:] = ['rivals']

from etcd_jobs import BIN, MODEL, Training, digest_of, job_key, main, reference, run, several, start, wait_for  # noqa: E402

LONG = ['--steps', '100000', *MODEL[2:]]
STEPS = 2  # of the group that goes on, in a round


class Rival(Training):
    def __init__(self, etcd, folder, name):
        super().__init__(f'{etcd.url("two")}?servers=3', 'two', folder / name, '--replicas', '2', '--resume', 'auto', model=LONG)

    def steps(self):
        return [int(step) for step in re.findall(r'^step +(\d+)/', self.log.read_text(), re.MULTILINE)]


def ended(rivals):
    return [rival for rival in rivals if rival.process.poll() is not None]


def round_of(etcd, folder, number):
    """The steps that the group made which went on, and those of the other."""
    rivals = []
    for name in (f'{number}a', f'{number}b'):
        (folder / name).mkdir()
        rivals.append(Rival(etcd, folder, name))
    wait_for(lambda: ended(rivals), f'round {number}: one group ends')
    loser = ended(rivals)[0]
    winner = rivals[1 - rivals.index(loser)]
    text = loser.log.read_text()
    assert loser.process.poll() == 1 and '[STALE_EPOCH]' in text, f'round {number}: {text}'
    before = len(winner.steps())
    wait_for(lambda: len(winner.steps()) >= before + STEPS or winner.process.poll() is not None, f'round {number}: steps')
    assert winner.process.poll() is None, f'round {number}: both ended\n{text}\n---\n{winner.log.read_text()}'
    winner.process.send_signal(signal.SIGKILL)
    winner.process.wait()
    return winner.steps(), loser.steps()


def claimed(etcd):
    return int(job_key(etcd, 'two', 'two')['claimed']['counter'])


def claims(log):
    """Counters of the epochs that were claimed, in etcd's order, from the output of etcdctl's watch."""
    return [int(json.loads(line)['claimed']['counter']) for line in log.read_text().splitlines() if line.startswith('{')]


def test_rivals(etcd, folder, bits):
    several(etcd, 'two', folder)
    watched = folder / 'watched'
    start('env', 'ETCDCTL_API=3', 'etcdctl', '--endpoints', etcd.url('two').split('/')[2], 'watch', '--rev', '1', '/two/jobs/two',
          log=watched)
    decided = []
    for number in range(ROUNDS):
        winners, losers = round_of(etcd, folder, number)
        # The other may have trained before it lost the job; whose steps are the later ones is not said.
        decided += sorted([*losers, *winners])
        assert len(set(decided)) == len(decided) and decided == sorted(decided), f'round {number}: a step was decided twice: {decided}'
        print(f'round {number}: steps {losers} and {winners}, epoch {claimed(etcd)}', flush=True)
    model = [*LONG, '--stop-at', str(decided[-1] + 2)]
    code, text = run(BIN / 'train_bytes_lm', *model, '--servers', etcd.url('two'), '--job', 'two', '--resume', 'must')
    assert code == 0 and digest_of(text) == reference(model), text
    wait_for(lambda: claims(watched) and claims(watched)[-1] == claimed(etcd), 'the watch has seen the last claim')
    counters = claims(watched)
    assert counters == sorted(counters), f'the claimed epoch only rises: {counters}'
    assert len(set(counters)) >= 2 * ROUNDS, f'each group claimed: {counters}'


sys.exit(main({'rivals': test_rivals}))
