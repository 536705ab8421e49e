"""Servers and trainers that find each other by a real etcd: what tests of them share. A test's first argument is the folder of the
programs."""
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

BIN = pathlib.Path(sys.argv[1])
MODEL = ['--steps', '40', '--layers', '2', '--width', '64', '--heads', '4', '--batch', '1', '--micro-batches', '2', '--chunk-elements',
         '65536', '--digest']
# An address of this test alone: nobody takes a port there between its choice and its use, nor while its owner is dead.
HOST = f'127.{1 + (os.getpid() >> 16) % 128}.{(os.getpid() >> 8) % 256}.{os.getpid() % 256}'
running = []


def start(*command, log):
    with open(log, 'ab') as output:
        process = subprocess.Popen([str(word) for word in command], stdout=output, stderr=subprocess.STDOUT)
    running.append(process)
    return process


def run(*command, seconds=300):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
    return done.returncode, done.stdout


def wait_for(condition, what, seconds=120):
    end, last = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except Exception as error:  # noqa: BLE001
            last = error
        time.sleep(0.05)
    raise AssertionError(f'not within {seconds} s: {what} ({last})')


def two_free_ports():
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind((HOST, 0))
        return first.getsockname()[1], second.getsockname()[1]


class Etcd:
    """`tls`: the options of its client port; `access`: those of etcdctl; `query`: behind the URL's '?'."""

    def __init__(self, folder, tls=(), access=(), query=''):
        self.folder, (self.port, peers) = folder, two_free_ports()
        self.access, self.query = list(access), query
        client = f'{"https" if tls else "http"}://{HOST}:{self.port}'
        self.command = ['etcd', '--name', 'e', '--data-dir', folder / 'etcd', '--listen-client-urls', client,
                        '--advertise-client-urls', client, '--listen-peer-urls', f'http://{HOST}:{peers}',
                        '--initial-advertise-peer-urls', f'http://{HOST}:{peers}', '--initial-cluster', f'e=http://{HOST}:{peers}',
                        *tls]
        self.start()

    def start(self):
        self.process = start(*self.command, log=self.folder / 'etcd.log')
        wait_for(lambda: self.ctl('endpoint', 'health'), 'etcd answers', seconds=240)  # its first syncs, beside other tests' disks

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ctl(self, *words):
        code, text = run('env', 'ETCDCTL_API=3', 'etcdctl', '--endpoints', f'{HOST}:{self.port}', *self.access, *words)
        assert code == 0, text
        return text

    def url(self, prefix):
        return f'etcd://{HOST}:{self.port}/{prefix}' + (f'?{self.query}' if self.query else '')

    def entries(self, prefix):
        """{server id: entry}"""
        lines = self.ctl('get', '--prefix', f'/{prefix}/servers/').splitlines()
        return {pathlib.PurePath(key).name: json.loads(value) for key, value in zip(lines[::2], lines[1::2])}


class Server:
    """A ballastd; a further process takes the place of one that was killed, at another port. host: HOST for one that comes back at its
    own."""

    def __init__(self, etcd, prefix, name, folder, *more, host='127.0.0.1', dram='128MiB', nvme='256MiB'):
        self.log, self.process = folder / f'{name}.log', None
        self.command = [BIN / 'ballastd', '--listen', f'{host}:0', '--metrics_listen', '127.0.0.1:0', '--data_directory', folder / name,
                        '--server_id', name, '--budget.dram', dram, '--budget.nvme', nvme, '--discovery', etcd.url(prefix), *more]
        self.start()

    def start(self, awaited=True):
        """`awaited`: until it is ready. A server under a name that another data directory had waits before for the end of that lease."""
        seen = len(re.findall('ballastd ready', self.text()))
        self.process = start(*self.command, log=self.log)
        if not awaited:
            return
        wait_for(lambda: len(re.findall('ballastd ready', self.text())) > seen, f'{self.log} ready')
        self.address = re.findall(r'ballastd ready listen=(\S+)', self.text())[-1]

    def text(self):
        return self.log.read_text() if self.log.exists() else ''

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait()


class Training:
    def __init__(self, servers, job, folder, *more, model=tuple(MODEL)):
        self.log = folder / f'{job}.trainer.log'
        self.process = start(BIN / 'train_bytes_lm', *model, '--servers', servers, '--job', job, '--log-every', '1', *more, log=self.log)

    def step(self, number):
        wait_for(lambda: re.search(rf'step +{number}\b', self.log.read_text()) or self.process.poll() is not None, f'step {number}')
        assert self.process.poll() is None, f'ended early:\n{self.log.read_text()}'

    def says(self, line):
        wait_for(lambda: re.search(line, self.log.read_text()) or self.process.poll() is not None, line)
        assert re.search(line, self.log.read_text()), f'ended without {line}:\n{self.log.read_text()}'

    def digest(self):
        code = self.process.wait(300)
        text = self.log.read_text()
        assert code == 0, f'exit code {code}\n{text}'
        return digest_of(text)


def several(etcd, prefix, folder, names=('a', 'b', 'c')):
    servers = [Server(etcd, prefix, name, folder, host=HOST) for name in names]
    for server in servers:  # at its own address a server that is killed is back before its lease ends
        server.command[server.command.index('--listen') + 1] = server.address
    wait_for(lambda: len(etcd.entries(prefix)) == len(servers), 'all are registered')
    return servers


def open_again(url, job, *more, seconds=120):
    """seconds: for each thing that the trainer waits for."""
    return run(BIN / 'train_bytes_lm', *MODEL, '--servers', url, '--job', job, '--resume', 'must', '--timeout', seconds, *more)


def digest_of(text):
    return re.search(r'master weights CRC32C ([0-9a-f]{8})', text).group(1)


def reference(model=tuple(MODEL)):
    code, text = run(BIN / 'train_bytes_lm', *model, '--reference')
    assert code == 0, text
    return digest_of(text)


def job_key(etcd, prefix, job):
    lines = etcd.ctl('get', f'/{prefix}/jobs/{job}').splitlines()
    return json.loads(lines[1]) if lines else None


def jobs(etcd, prefix):
    """{name: addresses of its servers} of the servers that are registered"""
    code, text = run(BIN / 'ballastctl', 'status', '--json', '--servers', etcd.url(prefix))
    return {job['name']: job['servers'] for job in json.loads(text)['jobs']}


def main(tests):
    """Runs tests, {name: function of etcd, folder, bits of the reference}; the second argument is a part of the names of those to run."""
    for program in ('etcd', 'etcdctl'):
        if shutil.which(program) is None:
            print(f'SKIPPED: no {program}; apt-get install etcd-server etcd-client')
            return 77
    if len(sys.argv) < 3:
        # Most of the time leases are waited for, so one half goes on beside the other.
        halves = [subprocess.Popen([sys.executable, sys.argv[0], BIN, ','.join(list(tests)[half::2])]) for half in range(2)]
        return max(abs(half.wait()) for half in halves)
    bits = reference()
    for name, test in tests.items():
        if not any(part in name for part in sys.argv[2].split(',')):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                test(Etcd(pathlib.Path(scratch)), pathlib.Path(scratch), bits)
            except BaseException:
                for log in sorted(pathlib.Path(scratch).glob('*.log')):
                    if log.name != 'etcd.log':
                        print(f'--- {log.name}\n{log.read_text()[-3000:]}')
                raise
            finally:
                while running:
                    process = running.pop()
                    process.kill()
                    process.wait()
        print(f'{name} passed, {time.monotonic() - began:.1f} s', flush=True)
    return 0

