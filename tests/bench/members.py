#!/usr/bin/env python3
"""Servers of a job come and go while it trains: how much slower training is meanwhile, and how long nothing is decided.

Usage: members.py BIN [--only ROW,...] [--rounds N] [--seconds S] [--wipes N] [--json FILE]
  BIN          folder of the programs (build/release/bin). etcd and etcdctl are needed too
  --only       some of the rows; default: all
  --rounds N   how often a thing is repeated in rows that repeat it (3)
  --seconds S  without etcd, in rows etcd_stopped and etcd_killed (60)
  --wipes N    of row wipes, one every 20 s (15: five minutes, and as long again for the reference)

Real processes on this machine: three or four ballastd, etcd, and train_bytes_lm with 19 million parameters, two threads and 512 tokens a
step. Ratios are within one run. A row fails if its trainer ends. Rows:
  drain, add    3 servers -> 2 -> 3, several times. From the wish until the table in etcd has it:
                  speed     steps a second over those of the undisturbed seconds before and after
                  longest   step, over the median of undisturbed ones
                  imported  bytes of state that servers copied, over the state of the chunks that moved
                  moved     elements of chunks that got another holder, over the least possible
  replace       one of 3 servers by a fourth, to and fro
  replicas      two copies of each chunk against one, on the same 3 servers, by turns: steps a second; CPU seconds of all processes a step
  key           one copy, servers named by etcd against by host:port, by turns: steps a second; the same bits
  etcd_stopped  SIGSTOP of etcd for S seconds: the longest step over the median. At the end of that time kill -9 of a server: seconds until a
                line names it; once etcd is back, seconds until the next decided step
  etcd_killed   the same with kill -9 of etcd
  restarts      kill -9 of each of 3 servers in turn, started again at once, --failover-after 5: servers left out; seconds until the next step
  wipes         kill -9 of a server and loss of its disk every 20 s, started again at once, --failover-after 1: seconds until the next step,
                and until all chunks have two copies; goodput: steps over those that undisturbed seconds would have made; the same bits
  claim_100, claim_10000, claim_100000
                a job of so many chunks of 256 elements, of which each step changes one: seconds from the claim of a change, as etcd tells it,
                until the step is decided that the fence interrupted
Each row says how many processors other programs kept busy meanwhile.
"""
import argparse
import collections
import functools
import json
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
import time

if len(sys.argv) < 2 or sys.argv[1].startswith('-'):
    sys.exit(__doc__)
from training_cluster import (BIN, JOB, MODEL, STATE_BYTES, Cluster, Trainer, busy_seconds, children_seconds, chunk_sizes,  # noqa: E402
                              digest_of, held, moved, run, running)

# Row, figure: what is wanted, and what was predicted before anything was measured.
BARS = {
    ('drain', 'speed'): ('>=', 0.90, 0.93), ('drain', 'longest'): ('<=', 2, 1.6), ('drain', 'imported'): ('<=', 1.05, 1.00),
    ('drain', 'moved'): ('<=', 1.05, 1.00),
    ('add', 'speed'): ('>=', 0.90, 0.93), ('add', 'longest'): ('<=', 2, 1.6), ('add', 'imported'): ('<=', 1.05, 1.00),
    ('add', 'moved'): ('<=', 1.05, 1.02),
    ('replace', 'speed'): ('>=', 0.90, 0.93), ('replace', 'longest'): ('<=', 2, 1.6), ('replace', 'imported'): ('<=', 1.05, 1.00),
    ('replace', 'moved'): ('<=', 1.05, 1.00),
    ('replicas', 'speed'): ('>=', 0.85, 0.90), ('replicas', 'cpu'): ('<=', 1.25, 1.10), ('replicas', 'same bits'): ('>=', 1, 1),
    ('key', 'speed'): ('>=', 0.99, 1.00), ('key', 'same bits'): ('>=', 1, 1),
    ('etcd_stopped', 'longest'): ('<=', 2, 1.3), ('etcd_stopped', 'line s'): ('<=', 3, 2.5), ('etcd_stopped', 'next step s'): ('<=', 3, 1.5),
    ('etcd_killed', 'longest'): ('<=', 2, 1.3), ('etcd_killed', 'line s'): ('<=', 3, 2.5), ('etcd_killed', 'next step s'): ('<=', 3, 1.5),
    ('restarts', 'left out'): ('<=', 0, 0), ('restarts', 'next step s'): ('<=', 1.5, 0.65),
    ('wipes', 'next step s'): ('<=', 3, 1.6), ('wipes', 'two copies s'): ('<=', 12, 6), ('wipes', 'goodput'): ('>=', 0.80, 0.88),
    ('wipes', 'same bits'): ('>=', 1, 1),
    ('claim_10000', 'claim to step s'): ('<=', 0.15, 0.2), ('claim_100000', 'claim to step s'): ('<=', 0.6, 1.5),
}


CALM = 10  # undisturbed steps on either side of a change
CLAIM_WITHIN = 2  # seconds from a claim until its fence has interrupted a step, at most


def change(cluster, trainer, words, after, least):
    """Figures of a wish. `least`: {holders before: elements that have to move}"""
    before, had = cluster.holders(), cluster.imported()
    calm_from = trainer.more(1)
    trainer.more(CALM)
    is_done = cluster.once_written(lambda: cluster.members() == after and cluster.holders())
    asked = time.monotonic()
    cluster.wish(*words)
    trainer.wait(is_done, f'{words[0]} is done')
    done, holders = time.monotonic(), cluster.holders()
    has = cluster.imported()
    again = trainer.more(3)  # who left gives back its memory
    calm_to = trainer.more(CALM)
    trainer.more(1)
    calm = statistics.median(trainer.seconds(calm_from, asked)[:-1] + trainer.seconds(again, calm_to))
    copied = sum(has[name] - (had[name] if has[name] >= had[name] else 0) for name in after)
    return {'speed': trainer.rate(asked, done) * calm, 'longest': max(trainer.seconds(asked, done)) / calm,
            'imported': copied / STATE_BYTES / moved(before, holders), 'moved': moved(before, holders) / least(before),
            'seconds': done - asked, 'step s': calm}


def resize(args, folder):
    cluster = Cluster(folder, 'abc')
    trainer = cluster.train(3, '--replicas', '2')
    trainer.more(6)
    rounds = collections.defaultdict(list)
    for name in ('cba' * args.rounds)[:args.rounds]:
        others = sorted(set('abc') - {name})
        rounds['drain'].append(change(cluster, trainer, ('drain', '--server', name), others, lambda holders: held(holders, name)))
        rounds['add'].append(change(cluster, trainer, ('add', '--server', name), sorted('abc'),
                                    lambda _: 2 * sum(chunk_sizes()) / 3))
    return {row: summary(each) for row, each in rounds.items()}


def replace(args, folder):
    cluster = Cluster(folder, 'abc')
    trainer = cluster.train(3, '--replicas', '2')
    trainer.more(6)
    cluster.add('d')  # the job has its servers, and does not take it by itself
    rounds = []
    for old, new in (('ad', 'da', 'bd', 'db') * args.rounds)[:2 * args.rounds]:
        after = sorted(set(cluster.members()) - {old} | {new})
        rounds.append(change(cluster, trainer, ('replace', '--server', old, '--by', new), after, lambda holders: held(holders, old)))
    return {'replace': summary(rounds)}


def summary(rounds):
    """Medians; of what has to hold each time the worst."""
    return {figure: max(each[figure] for each in rounds) if figure in ('longest', 'imported', 'moved')
            else statistics.median(each[figure] for each in rounds) for figure in rounds[0]} | {
                'each': [round(each['speed'], 3) for each in rounds]}


def by_turns(runs, rounds, steps):
    """Runs {name: function from options to a Trainer} for `steps` steps each, in turns. {name: [(steps a second, CPU seconds a step)]}, and
    {name: last digest}."""
    figures, digests = collections.defaultdict(list), {}
    for number in range(rounds):
        for name in (list(runs) if number % 2 == 0 else reversed(runs)):
            trainer = runs[name]('--stop-at', (number + 1) * steps)
            digests[name] = trainer.finish()
            running.remove(trainer.process)
            (begin, _, cpu_before), (end, _, cpu_after) = trainer.ends[3], trainer.ends[-1]
            count = len(trainer.ends) - 4
            figures[name].append((count / (end - begin), (cpu_after - cpu_before) / count))
            print(f'  {name}: {figures[name][-1][0]:.3f} steps/s, {figures[name][-1][1]:.3f} CPU s a step', file=sys.stderr)
    return figures, digests


def ratio(figures, one, other, which):
    return statistics.median(a[which] / b[which] for a, b in zip(figures[one], figures[other]))


def replicas(args, folder):
    cluster = Cluster(folder, 'abc')
    figures, digests = by_turns({'one': lambda *more: cluster.train(3, *more, job='one'),
                                 'two': lambda *more: cluster.train(3, '--replicas', '2', *more, job='two')}, rounds=2 * args.rounds, steps=22)
    return {'replicas': {'speed': ratio(figures, 'two', 'one', 0), 'cpu': ratio(figures, 'two', 'one', 1),
                         'same bits': int(digests['one'] == digests['two']), 'each': [round(a[0] / b[0], 3) for a, b in
                                                                                     zip(figures['two'], figures['one'])]}}


def key(args, folder):
    cluster = Cluster(folder, 'abc')
    addresses = ','.join(server.address for server in cluster.servers.values())
    figures, digests = by_turns({'etcd': lambda *more: cluster.train(3, *more, job='etcd'),
                                 'named': lambda *more: Trainer(addresses, 'named', *more)}, rounds=3 * args.rounds, steps=22)
    return {'key': {'speed': ratio(figures, 'etcd', 'named', 0), 'same bits': int(digests['etcd'] == digests['named']),
                    'each': [round(a[0] / b[0], 3) for a, b in zip(figures['etcd'], figures['named'])]}}


def without_etcd(row, args, folder):
    cluster = Cluster(folder, 'abc')
    trainer = cluster.train(3, '--replicas', '2')
    trainer.more(6)
    calm_from = trainer.more(1)
    gone = trainer.more(20)
    if row == 'etcd_stopped':
        cluster.etcd.process.send_signal(signal.SIGSTOP)
    else:
        cluster.etcd.kill()
    trainer.wait(lambda: time.monotonic() > gone + args.seconds, 'etcd to be away long enough', args.seconds + 60)
    killed = time.monotonic()
    cluster.kill('c')
    address = cluster.servers['c'].address
    says = lambda: next((at for at, line in trainer.lines if at > killed and (address in line or "'c'" in line)), None)  # noqa: E731
    trainer.wait(says, 'a line that names the server', 30)
    trainer.wait(lambda: any(at > killed and 'etcd' in line for at, line in trainer.lines), 'a line that names etcd', 30)
    trainer.wait(lambda: time.monotonic() > killed + 15, '15 s without that server')
    waits = len(trainer.ends)
    if row == 'etcd_stopped':
        cluster.etcd.process.send_signal(signal.SIGCONT)
    else:
        cluster.etcd.start()
    back = time.monotonic()
    next_step = trainer.next_step(back)
    print('\n'.join('  ' + line for at, line in trainer.lines if at > killed), file=sys.stderr)
    assert trainer.ends[waits][0] >= back, 'steps were decided without the server, and without etcd'
    calm = statistics.median(trainer.seconds(calm_from, gone))
    return {row: {'longest': max(trainer.seconds(gone, killed)[:-1]) / calm, 'line s': says() - killed, 'next step s': next_step,
                  'step s': calm}}


def restarts(args, folder):
    cluster = Cluster(folder, 'abc')
    trainer = cluster.train(3, '--replicas', '2', '--failover-after', '5')
    trainer.more(6)
    calm = statistics.median(trainer.seconds(trainer.more(1), trainer.more(20)))
    waits, longest = [], []
    for number in range(3 * args.rounds):
        time.sleep(calm * number / (3 * args.rounds))  # at another moment of a step each time
        killed = time.monotonic()
        cluster.kill('abc'[number % 3])
        cluster.servers['abc'[number % 3]].start()
        waits.append(trainer.next_step(killed))
        longest.append(max(trainer.seconds(killed, trainer.more(3))))
    table = cluster.table()
    return {'restarts': {'left out': 3 - len(table['members']) + trainer.text().count('goes on without'), 'next step s': max(waits),
                         'longest step s': max(longest), 'step s': calm, 'each': [round(wait, 2) for wait in waits]}}


def wipes(args, folder):
    cluster = Cluster(folder, 'abc')
    trainer = cluster.train(3, '--replicas', '2', '--failover-after', '1')
    trainer.more(6)
    calm_from = trainer.more(1)
    fire = trainer.more(30)
    waits, copies = [], []
    for number in range(args.wipes):
        trainer.wait(lambda: time.monotonic() >= fire + 20 * number, 'the next kill')
        name, killed = 'abc'[number % 3], time.monotonic()
        cluster.kill(name, wipe=True)
        cluster.servers[name].start(awaited=False)
        waits.append(trainer.next_step(killed))
        trainer.wait(cluster.once_written(lambda: len(cluster.members()) == 2), f'the group goes on without {name}')
        trainer.wait(cluster.once_written(cluster.two_copies), 'two copies of each chunk')
        copies.append(time.monotonic() - killed)
        print(f'  {name}: next step after {waits[-1]:.2f} s, two copies after {copies[-1]:.2f} s', file=sys.stderr)
        # The server comes back when its name's lease has ended, and fills slowly: the next kill may find it amid that.
    trainer.wait(lambda: time.monotonic() >= fire + 20 * args.wipes, 'the last 20 s')
    ceased = trainer.more(1)
    calm_to = trainer.more(30)
    trainer.process.send_signal(signal.SIGTERM)
    trainer.process.wait(120)
    trainer.reader.join()
    calm = statistics.median(trainer.seconds(calm_from, fire) + trainer.seconds(ceased, calm_to)[:-1])
    model = ('--stop-at', trainer.last() + 3)
    bits = cluster.train(3, *model).finish()
    code, text = run(BIN / 'train_bytes_lm', *MODEL, *model, '--reference', seconds=3600)
    assert code == 0, text
    return {'wipes': {'next step s': max(waits), 'two copies s': max(copies), 'goodput': trainer.rate(fire, ceased) * calm,
                      'same bits': int(bits == digest_of(text)), 'median next step s': statistics.median(waits), 'step s': calm}}


def claims(row, args, folder):
    chunks = int(row.split('_')[1])
    cluster = Cluster(folder, 'abc', dram='4GiB')
    trainer = Trainer(f'{cluster.etcd.url(JOB)}?servers=3', JOB, '--chunks', chunks, program=('many_chunks_trainer',))
    trainer.wait(lambda: trainer.ends, 'the first step', 600)
    times = []
    for command, count in (('drain', 2), ('add', 3)) if chunks <= 10000 else (('drain', 2),):
        trainer.more(50)
        watched = cluster.watch()
        cluster.wish(command, '--server', 'c')
        if chunks <= 10000:
            trainer.wait(lambda count=count: len(cluster.members()) == count and cluster.holders(), f'{command} is done')
        else:  # so many copies take minutes
            trainer.wait(lambda watched=watched: any(claim for _, claim in watched), f'{command} begins')
        trainer.more(50)
        for at, claim in watched:
            if claim:  # the fence, after the claim, interrupted the longest of these
                ended = [(b[0], b[0] - a[0]) for a, b in zip(trainer.ends, trainer.ends[1:]) if at < b[0] < at + CLAIM_WITHIN]
                end, seconds = max(ended, key=lambda step: step[1])
                times.append(end - at)
                print(f'  {command}: {times[-1]:.3f} s from claim to step, which took {seconds:.3f} s', file=sys.stderr)
    calm = statistics.median(trainer.seconds(trainer.ends[20][0], trainer.ends[45][0]))
    return {row: {'claim to step s': max(times), 'step s': calm, 'each': [round(each, 3) for each in times]}}


ROWS = {'etcd_stopped': without_etcd, 'etcd_killed': without_etcd, 'restarts': restarts, 'drain': resize, 'add': resize, 'replace': replace,
        'replicas': replicas, 'key': key, 'claim_100': claims, 'claim_10000': claims, 'claim_100000': claims, 'wipes': wipes}


def measure(function, args, folder):
    try:
        return function(args, folder)
    except BaseException:
        print(f'--- trainer, after step {Trainer.newest.last()}\n{Trainer.newest.text()[-3000:]}', file=sys.stderr)
        for log in sorted(folder.glob('*.log')):
            if log.name != 'etcd.log':
                print(f'--- {log.name}\n{log.read_text()[-2000:]}', file=sys.stderr)
        raise
    finally:
        while running:
            process = running.pop()
            process.kill()
            process.wait()


def show(row, figures):
    for figure, value in figures.items():
        sense, bar, predicted = BARS.get((row, figure), ('', '', ''))
        shown = f'{value:.3f}' if isinstance(value, float) else str(value)
        short = sense and not (value >= bar if sense == '>=' else value <= bar)
        print(f'| {row} | {figure} | {sense} {bar} | {predicted} | {shown}{" SHORT" if short else ""} |', flush=True)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument('bin')
    parser.add_argument('--only', type=lambda text: text.split(','), default=list(ROWS))
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=60)
    parser.add_argument('--wipes', type=int, default=15)
    parser.add_argument('--json')
    args = parser.parse_args()
    if unknown := [row for row in args.only if row not in ROWS]:
        parser.error(f'--only {unknown[0]}: expected some of {", ".join(ROWS)}')
    for program in ('etcd', 'etcdctl'):
        if shutil.which(program) is None:
            sys.exit(f'members.py: no {program}; apt-get install etcd-server etcd-client')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started
    seen = {}
    for row in args.only:
        if row in seen:
            continue
        function = ROWS[row]
        if function in (without_etcd, claims):
            function = functools.partial(function, row)
        began, others = time.monotonic(), busy_seconds() - children_seconds()
        with tempfile.TemporaryDirectory() as folder:
            found = measure(function, args, pathlib.Path(folder))
        others = (busy_seconds() - children_seconds() - others) / (time.monotonic() - began)
        print(f'{row}: other programs kept {others:.2f} processors busy', flush=True)
        for name, figures in found.items():
            show(name, figures)
        seen |= found
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(seen, indent=1), encoding='utf-8')
    return 0


if __name__ == '__main__':
    sys.exit(main())
