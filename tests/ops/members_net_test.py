"""Jobs with two copies of each chunk whose machines lose each other on the network, with a real etcd.

Machines are network namespaces. Whoever is cut off is not told so: packets are lost. Each run must end with the bits of the same training
in one process, without a step lost or made twice.
"""
import json
import pathlib
import re
import shutil
import signal
import time

import network
import ops

MODEL = ['--steps', '100000', '--layers', '2', '--width', '64', '--heads', '4', '--batch', '1', '--micro-batches', '2', '--chunk-elements',
         '65536', '--digest', '--log-every', '1']
JOB = 'cut'
PORT = 7070
CUT_SECONDS = 10
WAIT_SECONDS = 60
LEASE_SECONDS = 11  # an entry of a server that nobody renews has gone by then


class Cluster:
    """`etcds`, state servers and trainers, each on the machine of its name."""

    def __init__(self, etcds, servers, trainers):
        ops.need('etcd', 'etcdctl', ops.BIN / 'train_bytes_lm')
        self.net, self.etcds, self.servers = network.Network(*etcds, *servers, *trainers), {}, {}
        peers = ','.join(f'{name}=http://{self.net.address(name)}:2380' for name in etcds)
        for name in etcds:
            address = self.net.address(name)
            self.etcds[name] = self.net.start(
                name, 'etcd', '--name', name, '--data-dir', name, '--listen-client-urls', f'http://{address}:2379',
                '--advertise-client-urls', f'http://{address}:2379', '--listen-peer-urls', f'http://{address}:2380',
                '--initial-advertise-peer-urls', f'http://{address}:2380', '--initial-cluster', peers, log=f'{name}.log')
        self.endpoints = ','.join(f'{self.net.address(name)}:2379' for name in etcds)
        self.url = f'etcd://{self.endpoints}/net'
        ops.wait_for(lambda: self.ctl('endpoint', 'health'), 'etcd answers')
        for name in servers:
            self.serve(name)
        ops.wait_for(lambda: sorted(self.registered()) == sorted(servers), 'the servers are registered')

    def serve(self, name):
        self.servers[name] = self.net.start(
            name, ops.BIN / 'ballastd', '--listen', f'{self.net.address(name)}:{PORT}', '--metrics_listen', '127.0.0.1:0',
            '--data_directory', f'data-{name}', '--server_id', name, '--budget.dram', '128MiB', '--budget.nvme', '256MiB',
            '--discovery', self.url, log=f'{name}.log')

    def ctl(self, *words):
        return ops.run('etcdctl', '--endpoints', self.endpoints, *words, env={'ETCDCTL_API': '3', 'PATH': '/usr/bin:/bin'})

    def kill_leader(self):
        told = json.loads(self.ctl('endpoint', 'status', '-w', 'json'))
        leader = next(each['Endpoint'] for each in told if each['Status']['leader'] == each['Status']['header']['member_id'])
        ops.kill(next(process for name, process in self.etcds.items() if leader.startswith(self.net.address(name) + ':')))

    def registered(self):
        return [pathlib.PurePath(key).name for key in self.ctl('get', '--prefix', '--keys-only', '/net/servers/').split()]

    def table(self):
        return json.loads(self.ctl('get', '--print-value-only', f'/net/jobs/{JOB}'))['table']

    def members(self):
        return ''.join(sorted(member['server_id'] for member in self.table()['members']))

    def is_settled(self, servers):
        """Whether they hold two copies of each chunk, and nobody copies any more."""
        table = self.table()
        return self.members() == servers and all(len(shard['holders']) == 2 and not shard.get('fillers') and not shard.get('leaving')
                                                 for shard in table['shards'])

    def group(self, *machines, name, servers=''):
        """Ranks of a group, one on each machine. servers: how many it waits for, of a new job."""
        ranks = []
        for rank, machine in enumerate(machines):
            log = f'{name}{rank}.log'
            ranks.append(Trainer(self.net.start(
                machine, ops.BIN / 'train_bytes_lm', *MODEL, '--servers', self.url + servers, '--job', JOB, '--resume', 'auto',
                '--replicas', '2', '--failover-after', '1', '--host', self.net.address(machine), '--rendezvous', f'meet-{name}',
                '--rank', rank, '--world-size', len(machines), log=log), log))
        return ranks

    def check_bits(self, ranks, first=1):
        """Ends the group. It made each step once, from step `first` on, and the job has the bits of undisturbed training."""
        for rank in ranks:
            rank.process.send_signal(signal.SIGTERM)
        for rank in ranks:
            rank.process.wait(60)
            assert 'stopped by signal 15 after step' in ranks[0].text(), ranks[0].end()
        steps = ranks[0].steps()
        assert steps == list(range(first, first + len(steps))), f'each step once, without a gap: {steps}'
        model = [*MODEL, '--stop-at', str(steps[-1] + 2)]
        text = ops.run(ops.BIN / 'train_bytes_lm', *model, '--servers', self.url, '--job', JOB, '--resume', 'must')
        assert digest(text) == digest(ops.run(ops.BIN / 'train_bytes_lm', *model, '--reference'))


class Trainer:
    def __init__(self, process, log):
        self.process, self.log = process, pathlib.Path(log)

    def text(self):
        return self.log.read_text()

    def steps(self):
        return [int(step) for step in re.findall(r'^step +(\d+)/', self.text(), re.MULTILINE)]

    def end(self):
        """Of what it said, for messages."""
        return f'{self.log}:\n' + self.text()[-4000:]

    def reaches(self, step):
        self._wait(lambda: step in self.steps(), f'step {step}')

    def goes_on(self, steps=3):
        goal = len(self.steps()) + steps
        self._wait(lambda: len(self.steps()) >= goal, f'{goal} steps')

    def says(self, line):
        self._wait(lambda: re.search(line, self.text()), line)

    def _wait(self, condition, what):
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.process.poll() is None, f'{what}: ended with {self.process.returncode}: {self.end()}'
            assert time.monotonic() < end, f'not within {WAIT_SECONDS} s: {what}; {self.end()}'
            time.sleep(0.05)


def digest(text):
    return re.search(r'master weights CRC32C ([0-9a-f]{8})', text)[1]


def test_one_link():
    """Rank 0 loses one server, which all others reach: it is left out, and comes back by itself."""
    cluster = Cluster(('e',), 'abc', ('rank0', 'rank1'))
    ranks = cluster.group('rank0', 'rank1', name='group', servers='?servers=3')
    ranks[0].reaches(4)
    cluster.net.cut(['rank0'], ['b'])
    end = time.monotonic() + CUT_SECONDS
    ranks[0].says("goes on without 'b'")
    assert cluster.net.reaches('rank1', 'b', PORT) and not cluster.net.reaches('rank0', 'b', PORT)
    assert cluster.members() == 'ac', cluster.table()['members']
    ranks[0].goes_on()
    time.sleep(max(0, end - time.monotonic()))
    assert sorted(cluster.registered()) == ['a', 'b', 'c'] and cluster.members() == 'ac', 'b lives, and rank 0 does not reach it'
    cluster.net.join(['rank0'], ['b'])
    ranks[0].says(r"server 'b' has copied \d+ of 1024 shards and holds them now")
    ops.wait_for(lambda: cluster.is_settled('abc'), 'all have their share again')
    cluster.check_bits(ranks)


def test_one_machine():
    """A server is cut off from all, and comes back with its old state."""
    cluster = Cluster(('e',), 'abc', ('rank0', 'rank1'))
    ranks = cluster.group('rank0', 'rank1', name='group', servers='?servers=3')
    ranks[0].reaches(4)
    cluster.net.cut(['b'], ['e', 'a', 'c', 'rank0', 'rank1'])
    ranks[0].says("goes on without 'b'")
    ranks[0].goes_on()
    cluster.net.join(['b'], ['e', 'a', 'c', 'rank0', 'rank1'])
    ranks[0].says(r"server 'b' joins and copies \d+ of 1024 shards")
    ranks[0].says(r"server 'b' has copied \d+ of 1024 shards and holds them now")
    assert cluster.servers['b'].poll() is None, pathlib.Path('b.log').read_text()
    # What it copied is what the others have: they are not needed any more.
    cluster.net.cut(['a'], ['e', 'b', 'c', 'rank0', 'rank1'])
    ranks[0].says("goes on without 'a'")
    ranks[0].goes_on()
    cluster.check_bits(ranks)


def test_two_halves():
    """A group at work keeps one server. etcd is on the other side, with the other server, and a new group there: that one goes on."""
    cluster = Cluster(('e',), 'ab', ('left', 'right'))
    left, = cluster.group('left', name='left', servers='?servers=2')
    left.reaches(4)
    cluster.net.cut(['left', 'b'], ['e', 'a', 'right'])
    left.says("cannot go on without 'a' yet")
    right, = cluster.group('right', name='right')
    right.says("goes on without 'b'")
    right.goes_on()
    assert left.process.poll() is None and cluster.members() == 'a', left.end()
    # A step that both servers had prepared counts, though nobody told the group that made it.
    first = right.steps()[0]
    assert first - left.steps()[-1] in (1, 2), (left.steps(), right.steps())
    cluster.net.join(['left', 'b'], ['e', 'a', 'right'])
    assert left.process.wait(WAIT_SECONDS) == 1, left.end()
    assert '[STALE_EPOCH]' in left.text() and left.steps()[-1] < first, left.end()
    right.says(r"server 'b' has copied 1024 of 1024 shards and holds them now")
    cluster.check_bits([right], first)


def test_three_etcds():
    """The leader of three is killed: training and servers go on as if nothing were, and a server may be lost after that."""
    cluster = Cluster(('e0', 'e1', 'e2'), 'abc', ('rank0', 'rank1'))
    ranks = cluster.group('rank0', 'rank1', name='group', servers='?servers=3')
    ranks[0].reaches(4)
    cluster.kill_leader()
    before = ranks[0].text()
    time.sleep(LEASE_SECONDS)
    ranks[0].goes_on()
    assert sorted(cluster.registered()) == ['a', 'b', 'c'] and cluster.members() == 'abc', cluster.table()['members']
    since = ranks[0].text().removeprefix(before).splitlines()[1:]
    assert since and all(re.match(r'step +\d+/', line) for line in since), 'nobody says anything but steps:\n' + '\n'.join(since)
    ops.kill(cluster.servers['b'])
    shutil.rmtree('data-b')
    ranks[0].says("goes on without 'b'")
    ranks[0].goes_on()
    cluster.check_bits(ranks)
