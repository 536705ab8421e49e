"""Servers, etcd and a trainer as processes on this machine, and what members.py reads of them."""
import base64
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / 'e2e'))
from etcd_jobs import BIN, HOST, Etcd, Server, digest_of, run, running, wait_for  # noqa: E402

WIDTH, LAYERS, CHUNK = 512, 6, 1 << 18
MODEL = ['--steps', '100000', '--layers', LAYERS, '--width', WIDTH, '--heads', '8', '--batch', '2', '--micro-batches', '2', '--threads', '2',
         '--chunk-elements', CHUNK, '--digest']
STATE_BYTES = 12  # of an element: fp32 master and moments
JOB = 'bars'


class Trainer:
    """train_bytes_lm, with the time at which each of its lines came."""

    newest = None

    def __init__(self, servers, job, *more, program=('train_bytes_lm', *MODEL, '--log-every', '1', '--resume', 'auto')):
        Trainer.newest = self
        self.ends, self.lines = [], []  # (time, step, CPU seconds of all processes until then); (time, line)
        self.process = subprocess.Popen([str(word) for word in (BIN / program[0], *program[1:], '--servers', servers, '--job', job, *more)],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append(self.process)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            now = time.monotonic()
            if step := re.match(r'step +(\d+)/', line):
                self.ends.append((now, int(step.group(1)), cpu_seconds()))
            else:
                self.lines.append((now, line.rstrip()))

    def text(self):
        return '\n'.join(line for _, line in self.lines)

    def last(self):
        return self.ends[-1][1] if self.ends else 0

    def wait(self, condition, what, seconds=120):
        wait_for(lambda: condition() or self.process.poll() is not None, what, seconds)
        assert self.process.poll() is None, f'the trainer ended before {what}:\n{self.text()}'

    def more(self, steps):
        """Time after so many further steps."""
        count = len(self.ends) + steps
        self.wait(lambda: len(self.ends) >= count, f'{steps} more steps')
        return self.ends[count - 1][0]

    def done(self, at):
        """Steps until a time, with the part of the one under way."""
        for (begin, step, _), (end, _, _) in zip(self.ends, self.ends[1:]):
            if begin <= at < end:
                return step + (at - begin) / (end - begin)
        raise AssertionError('no step began before, and ended after that time')

    def rate(self, begin, end):
        return (self.done(end) - self.done(begin)) / (end - begin)

    def seconds(self, begin, end):
        """Of each step of which a part lies between."""
        return [after[0] - before[0] for before, after in zip(self.ends, self.ends[1:]) if after[0] > begin and before[0] < end]

    def next_step(self, since, seconds=60):
        """Seconds until a step is decided."""
        self.wait(lambda: self.ends[-1][0] > since, 'the next step', seconds)
        return next(end for end, _, _ in self.ends if end > since) - since

    def finish(self):
        """To the end, given by --stop-at. Returns the digest."""
        code = self.process.wait(600)
        self.reader.join()
        assert code == 0, self.text()
        return digest_of(self.text())


def busy_seconds():
    """Of all processors, by whomever."""
    fields = pathlib.Path('/proc/stat').read_text().splitlines()[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6, 7)) / os.sysconf('SC_CLK_TCK')  # all but idle, I/O's and guests' (counted in user)


def children_seconds():
    times = os.times()
    return sum(times[:4])


def cpu_seconds():
    """Of the processes that run here."""
    ticks = 0
    for process in list(running):
        try:
            fields = pathlib.Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except OSError:
            pass  # it has ended
    return ticks / os.sysconf('SC_CLK_TCK')


class Cluster:
    """An etcd and servers that it names."""
    options = ()  # of all servers

    def __init__(self, folder, names, dram='1GiB'):
        self.folder, self.etcd, self.servers, self.dram = folder, Etcd(folder), {}, dram
        self.writes = None  # of the job's key, once somebody waits for one
        for name in names:
            self.add(name)

    def add(self, name):
        server = Server(self.etcd, JOB, name, self.folder, *self.options, host=HOST, dram=self.dram, nvme='3GiB')
        server.command[server.command.index('--listen') + 1] = server.address  # when it starts again too
        self.servers[name] = server
        wait_for(lambda: name in self.etcd.entries(JOB), f'{name} is registered')

    def train(self, count, *more, job=JOB):
        return Trainer(f'{self.etcd.url(JOB)}?servers={count}', job, *more)

    def watch(self):
        """A list to which a thread adds (time, whether another epoch claimed the job) at each write of the job's key."""
        writes, claimed = [], [json.dumps(self.key()['claimed'])]
        connection = http.client.HTTPConnection(HOST, self.etcd.port)
        connection.request('POST', '/v3/watch', json.dumps({'create_request': {'key': self.name_of_key()}}))
        answer = connection.getresponse()

        def read():
            while line := answer.readline():
                for event in json.loads(line).get('result', {}).get('events', []):  # an error: etcd ends
                    at, claim = time.monotonic(), json.dumps(json.loads(base64.b64decode(event['kv']['value']))['claimed'])
                    writes.append((at, claim != claimed[-1]))
                    claimed.append(claim)
        threading.Thread(target=read, daemon=True).start()
        return writes

    def once_written(self, condition):
        """The condition, which looks at the key now and then only when it was written: to ask all the time would cost the training that is
        measured."""
        if self.writes is None:
            self.writes = self.watch()
        seen = -1

        def look():
            nonlocal seen
            if seen == len(self.writes):
                return None
            seen = len(self.writes)
            return condition()
        return look

    @staticmethod
    def name_of_key():
        return base64.b64encode(f'/{JOB}/jobs/{JOB}'.encode()).decode()

    def table(self):
        return self.key()['table']

    def key(self):
        """Without a process: it is asked for while others' time is measured."""
        connection = http.client.HTTPConnection(HOST, self.etcd.port, timeout=5)
        connection.request('POST', '/v3/kv/range', json.dumps({'key': self.name_of_key()}))
        found = json.loads(connection.getresponse().read())
        connection.close()
        return json.loads(base64.b64decode(found['kvs'][0]['value']))

    def holders(self):
        """[names] of each shard, or None while copies are made or missing."""
        table = self.table()
        names = [member['server_id'] for member in table['members']]
        if any(len(shard['holders']) < 2 or shard.get('fillers') or shard.get('leaving') for shard in table['shards']):
            return None
        return [{names[place] for place in shard['holders']} for shard in table['shards']]

    def two_copies(self):
        return all(len(shard['holders']) >= 2 for shard in self.table()['shards'])

    def members(self):
        return sorted(member['server_id'] for member in self.table()['members'])

    def wish(self, *words):
        code, text = run(BIN / 'ballastctl', words[0], '--job', JOB, *words[1:], '--servers', self.etcd.url(JOB))
        assert code == 0, text

    def imported(self):
        """{server: bytes that it has copied}"""
        figures = {}
        for name, server in self.servers.items():
            url = re.findall(r'HTTP on (\S+?):? ', server.text())[-1]
            text = urllib.request.urlopen(f'http://{url}/metrics', timeout=5).read().decode()
            found = re.search(r'^ballast_job_imported_bytes_total\{[^}]*\} (\S+)', text, re.M)
            figures[name] = float(found.group(1)) if found else 0
        return figures

    def kill(self, name, wipe=False):
        self.servers[name].end(signal.SIGKILL)
        if wipe:
            shutil.rmtree(self.folder / name)


def chunk_sizes():
    """Elements of each chunk of the model, in the order of their indices."""
    hidden = (WIDTH * 8 // 3 + 15) // 16 * 16
    units = [256 * WIDTH + WIDTH] + LAYERS * [(4 * WIDTH + 3 * hidden + 2) * WIDTH]
    return [min(CHUNK, unit - begin) for unit in units for begin in range(0, unit, CHUNK)]


def moved(before, after):
    return sum(size * len(after[chunk] - before[chunk]) for chunk, size in enumerate(chunk_sizes()))


def held(holders, name):
    return sum(size for chunk, size in enumerate(chunk_sizes()) if name in holders[chunk])
