"""Starts processes, starts them again when they die, and kills them when the schedule says so: what a cluster's supervisor does, small.

The same for every system: the group of trainers is one command line. When a trainer dies, the others are killed at once and the
command line is run again."""

import contextlib
import ctypes
import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

from fire.events import Events

ETCD_S = 60  # for its first answer, after its first syncs
PARTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_living: list['Process'] = []  # of all runs: what an interruption has to end


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listening:
        listening.bind(('127.0.0.1', 0))
        return listening.getsockname()[1]


class Process:
    def __init__(self, command: list[str], log: str, environment: dict[str, str]) -> None:
        _living.append(self)
        self._process: subprocess.Popen | None = None
        with open(log, 'ab') as file:
            self._process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                             preexec_fn=_die_with_parent)

    def ended(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
        if self in _living:
            _living.remove(self)


class Etcd:
    """The key-value store that knows where the servers are, and who has which copy. On machines of its own: no fault meets it."""

    def __init__(self, directory: str) -> None:
        client, peer = (f'http://127.0.0.1:{free_port()}' for _ in range(2))
        self._address = client.removeprefix('http://')
        self._process = Process(['etcd', '--name', 'e', '--data-dir', os.path.join(directory, 'etcd'), '--listen-client-urls', client,
                                 '--advertise-client-urls', client, '--listen-peer-urls', peer, '--initial-advertise-peer-urls', peer,
                                 '--initial-cluster', f'e={peer}'], os.path.join(directory, 'etcd.log'), {})
        end = time.monotonic() + ETCD_S
        while not self._answers():
            if time.monotonic() > end:
                raise TimeoutError(f'etcd did not answer at {client} within {ETCD_S} s; see {directory}/etcd.log')
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f'http://{self._address}/health', timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f'etcd://{self._address}/fire'

    def stop(self) -> None:
        self._process.kill()


class Servers:
    """Two state servers under a supervisor: one that dies is started again at once, by the same command line. With `etcd` they are
    found there, else by their addresses."""

    def __init__(self, daemon: str, directory: str, events: Events, etcd: Etcd | None) -> None:
        self._events, self._starting, self._etcd = events, set[int](), etcd
        self._ports = [free_port() for _ in range(2)]
        self.directories = [os.path.join(directory, f'server{i}') for i in range(2)]
        registered = [] if etcd is None else ['--discovery', etcd.url]
        self._commands = [[daemon, '--listen', f'127.0.0.1:{port}', '--metrics_listen', '127.0.0.1:0', '--data_directory', folder,
                           '--server_id', f'server{i}', '--budget.dram', '1GiB', '--budget.nvme', '2GiB', *registered]
                          for i, (port, folder) in enumerate(zip(self._ports, self.directories))]
        for folder in self.directories:
            os.makedirs(folder)
        self._processes: list[Process] = []
        self._deletions: list[Process] = []

    def start(self) -> None:
        for i in range(2):
            self._processes.append(self._start(i))

    @property
    def addresses(self) -> str:
        if self._etcd is not None:
            return f'{self._etcd.url}?servers={len(self._ports)}'
        return ','.join(f'127.0.0.1:{port}' for port in self._ports)

    def _start(self, i: int) -> Process:
        self._events.tell('server_spawned', server=i)
        self._starting.add(i)
        return Process(self._commands[i], self.directories[i] + '.log', {})

    def supervise(self) -> None:
        for i, process in enumerate(self._processes):
            if process.ended() is not None:
                self._events.tell('server_ended', server=i, code=process.ended())
                self._processes[i].kill()
                self._processes[i] = self._start(i)
            elif i in self._starting:
                with contextlib.closing(socket.socket()) as probe:
                    if probe.connect_ex(('127.0.0.1', self._ports[i])) == 0:
                        self._starting.remove(i)
                        self._events.tell('server_ready', server=i)

    def signal(self, i: int, number: int) -> None:
        self._processes[i].signal(number)

    def lose(self, i: int) -> None:
        """The machine of server i is lost with its disk. An empty one takes its place, and its name, as soon as somebody supervises."""
        self._processes[i].signal(signal.SIGKILL)
        while self._processes[i].ended() is None:
            time.sleep(0.001)
        lost = self.directories[i] + '.lost'
        os.rename(self.directories[i], lost)  # a disk is gone at once
        os.makedirs(self.directories[i])
        self._deletions.append(Process(['rm', '-rf', lost], lost + '.log', {}))

    def stop(self) -> None:
        for process in self._processes + self._deletions:
            process.kill()


class Trainers:
    """The group of trainers of one command line, `world` of them."""

    def __init__(self, arguments: list[str], directory: str, events: Events) -> None:
        self._arguments, self._directory, self._events = arguments, directory, events
        self.world = 2
        self.generation = 0
        self._processes: list[Process] = []
        from torch.distributed import TCPStore  # not at the top: under_fire itself says what to do where torch is missing
        self._make_store = TCPStore

    def start(self) -> None:
        self.generation += 1
        self._events.tell('spawned', generation=self.generation, world=self.world)
        # The store of the rendezvous is here, as torchrun's is in its agent: a rank that comes before rank 0 would wait half a second.
        self._store = self._make_store('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        for lock in glob.glob(os.path.join(os.environ.get('TORCH_EXTENSIONS_DIR', 'none'), '**', 'lock'), recursive=True):
            os.unlink(lock)  # of a process that was killed while it loaded DeepSpeed's kernel; nobody else uses the directory
        # Neither torchrun nor the deepspeed command: they notice a death by polling, later than this loop.
        self._processes = [
            Process([sys.executable, '-m', 'fire.trainer', *self._arguments], os.path.join(self._directory, f'trainer{rank}.log'),
                    {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(self.world), 'LOCAL_WORLD_SIZE': str(self.world),
                     'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(self._store.port), 'GENERATION': str(self.generation),
                     'TORCHELASTIC_USE_AGENT_STORE': 'True', 'TORCHELASTIC_RESTART_COUNT': str(self.generation),
                     'OMP_NUM_THREADS': str(max(1, len(os.sched_getaffinity(0)) // self.world)), 'DS_ACCELERATOR': 'cpu',
                     'PYTHONPATH': os.pathsep.join([PARTS, os.environ.get('PYTHONPATH', '')]),
                     'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH']})
            for rank in range(self.world)]

    def codes(self) -> list[int | None]:
        return [process.ended() for process in self._processes]

    def signal(self, rank: int, number: int) -> None:
        self._processes[rank].signal(number)

    def signal_all(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)
        for process in self._processes:
            process.kill()


@contextlib.contextmanager
def scratch(parent: str | None) -> Iterator[str]:
    """A directory that is gone afterwards, like all processes, also after SIGINT, SIGTERM and SIGHUP."""
    directory = tempfile.mkdtemp(prefix='under_fire.', dir=parent)
    try:
        yield directory
    finally:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        for process in list(_living):
            process.kill()
        shutil.rmtree(directory)
