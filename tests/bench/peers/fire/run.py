"""One run of one system: undisturbed, or under a schedule of faults."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from fire import flip
from fire.events import Events, read
from fire.launcher import Etcd, Servers, Trainers

_STOP_S = 60  # a group that was asked to stop has so long for its last step and its parameters
_ALONE_S = 300  # an undisturbed run ends by itself before
_TRIES = 2  # a group that dies so often by itself, without a step, waits for its operator


@dataclass(frozen=True)
class Setting:
    """What a run needs to know of its system."""
    name: str  # a module of fire.systems
    servers: bool = False  # the state is on state servers
    copies: int = 1  # of each chunk of it; with more than one the servers are found through etcd
    apart: bool = False  # servers are on machines of their own; else each is on the machine of a trainer
    checkpoints: bool = False  # the state is in checkpoints of the trainers
    converts: bool = False  # another number of trainers needs a conversion by hand
    interval: int = 0  # steps between two checkpoints, or of every-K
    sweep: tuple[int, ...] = ()  # intervals to choose from
    variant: str = ''

    @property
    def label(self) -> str:
        return self.name + self.variant


# When, as part of the run; what; and how it is called in tables and pictures.
SCHEDULE = ((0.125, 'trainer', 'kill -9 of a trainer'),
            (0.265, 'server', 'kill -9 of a state server (peers: of both trainers)'),
            (0.4, 'shrink', 'all trainers are killed: the group comes back with one trainer'),
            (0.535, 'grow', 'all trainers are killed: the group comes back with two trainers'),
            (0.675, 'machine', 'a machine is lost with its disk, and an empty one takes its place'),
            (0.85, 'flip', 'a byte flips in the newest state on disk, then everything is killed'))


def schedule_of(setting: Setting) -> tuple:
    """Servers with one copy of each chunk lose the job with a disk: they are not asked to."""
    return tuple(fault for fault in SCHEDULE if fault[1] != 'machine' or not setting.servers or setting.copies > 1)


@dataclass
class Outcome:
    events: list[dict]
    parameters: str  # file
    operator: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)  # the last lines of each process


class Run:
    def __init__(self, setting: Setting, directory: str, daemon: str, arguments: tuple[str, ...] = ()) -> None:
        self._setting, self._directory = setting, directory
        os.makedirs(directory)
        self._path = os.path.join(directory, 'events.jsonl')
        self._events = Events(self._path, rank=-1)
        self._etcd = Etcd(directory) if setting.copies > 1 else None
        self._servers = Servers(daemon, directory, self._events, self._etcd) if setting.servers else None
        line = ['--system', setting.name, '--directory', directory, *arguments]
        if setting.interval:
            line += ['--interval', str(setting.interval)]
        if self._servers is not None:
            line += ['--servers', self._servers.addresses, '--copies', str(setting.copies)]
        self._trainers = Trainers(line, directory, self._events)
        self._killed = False  # the present group, by the schedule
        self._operator: list[str] = []
        self._idle = 0  # groups in a row that died by themselves without a step
        self._given_up = False

    @property
    def _checkpoints(self) -> str:
        return os.path.join(self._directory, 'checkpoints')

    def go(self, seconds: float = float('inf'), schedule: tuple = ()) -> Outcome:
        """Until the trainers end by themselves, or for so many seconds, which count from the start of the first process. Without a
        schedule no group may die."""
        try:
            if self._servers is not None:
                self._servers.start()
            self._events.tell('begin', seconds=seconds)
            begin = time.monotonic()
            self._trainers.start()
            waiting = list(schedule)
            while True:
                past = time.monotonic() - begin
                if waiting and past >= waiting[0][0] * seconds:
                    self._strike(waiting.pop(0)[1])
                if past >= seconds and not os.path.exists(os.path.join(self._directory, 'stop')):
                    self._events.tell('end')
                    open(os.path.join(self._directory, 'stop'), 'w', encoding='ascii').close()
                if past >= (seconds + _STOP_S if schedule else _ALONE_S):
                    self._events.tell('not_stopped')
                    break
                if self._servers is not None:
                    self._servers.supervise()
                codes = self._trainers.codes()
                if all(code == 0 for code in codes):
                    break
                if any(code not in (None, 0) for code in codes) and not self._given_up:
                    if not schedule or past >= seconds:
                        break
                    self._restart(codes)
                if self._given_up and past >= seconds:
                    break
                time.sleep(0.005)
        finally:
            self._trainers.kill()
            if self._servers is not None:
                self._servers.stop()
            if self._etcd is not None:
                self._etcd.stop()
        return Outcome(read(self._path), os.path.join(self._directory, 'parameters.pt'), self._operator)

    # --- faults

    def _strike(self, what: str) -> None:
        self._events.tell('fault', fault=what)
        self._killed = self._servers is None or not (what == 'server' or (what == 'machine' and self._setting.apart))
        if what == 'machine' and self._servers is not None:
            self._servers.lose(1)
        if what == 'trainer' or (what == 'machine' and not self._setting.apart):
            self._trainers.signal(1, signal.SIGKILL)
        elif what == 'server' and self._servers is not None:
            self._servers.signal(0, signal.SIGKILL)
        elif what == 'server':
            self._trainers.signal_all(signal.SIGKILL)
        elif what in ('shrink', 'grow'):
            self._trainers.world = 1 if what == 'shrink' else 2
            self._trainers.signal_all(signal.SIGKILL)
            if self._setting.converts:
                self._convert()
        elif what == 'flip':
            self._stand_still()
            flipped = flip.of_checkpoints(self._checkpoints) if self._servers is None else flip.of_server(self._servers.directories[0])
            if flipped is not None:
                self._events.tell('flipped', **flipped)
            if self._servers is not None:
                for i in range(2):
                    self._servers.signal(i, signal.SIGKILL)
            self._trainers.signal_all(signal.SIGKILL)

    def _stand_still(self) -> None:
        self._trainers.signal_all(signal.SIGSTOP)
        if self._servers is not None:
            for i in range(2):
                self._servers.signal(i, signal.SIGSTOP)

    # --- after them

    def _restart(self, codes: list[int | None]) -> None:
        self._trainers.kill()
        generation = self._trainers.generation
        made = any(event['what'] == 'step' and event['generation'] == generation for event in read(self._path))
        self._events.tell('ended_badly', generation=generation, codes=codes, by_itself=not self._killed)
        self._idle = self._idle + 1 if not self._killed and not made else 0
        self._killed = False
        if self._idle >= _TRIES:
            self._idle = 0
            self._given_up = not self._operate()
        if not self._given_up:
            self._trainers.start()

    def _operate(self) -> bool:
        """What a person does about a job that does not start any more: takes the newest whole checkpoint away. Returns whether there
        was anything to do."""
        newest = flip.newest(self._checkpoints) if self._setting.checkpoints else None
        if newest is None:
            self._events.tell('given_up')
            return False
        shutil.rmtree(os.path.join(self._checkpoints, newest))
        latest, older = os.path.join(self._checkpoints, 'latest'), self._older(int(newest))
        if os.path.exists(latest) and older is None:
            os.unlink(latest)
        elif os.path.exists(latest):
            with open(latest, 'w', encoding='ascii') as file:
                file.write(older)
        self._act(f'deleted checkpoint {newest}')
        return True

    def _older(self, step: int) -> str | None:
        return max((entry for entry in os.listdir(self._checkpoints) if entry.isdigit() and int(entry) < step), key=int, default=None)

    def _convert(self) -> None:
        """DeepSpeed's own way to another number of ranks."""
        self._trainers.kill()
        latest = os.path.join(self._checkpoints, 'latest')
        if not os.path.exists(latest):  # nothing to convert: the group begins anew
            return
        with open(latest, encoding='ascii') as file:
            newest = file.read().strip()
        source = os.path.join(self._checkpoints, newest)
        with open(os.path.join(self._directory, 'convert.log'), 'ab') as log:
            # One worker: a pool's would outlive an interruption, and start no sooner on two processors.
            line = [sys.executable, '-m', 'deepspeed.checkpoint.ds_to_universal', '--input_folder', source,
                    '--output_folder', source + '_universal', '--no_strict', '--inject_missing_state',
                    '--num_extract_workers', '1', '--num_merge_workers', '1']
            done = subprocess.run(line, stdout=log, stderr=log, check=False, env={**os.environ, 'DS_ACCELERATOR': 'cpu'})
        if done.returncode == 0:
            with open(os.path.join(self._checkpoints, 'latest_universal'), 'w', encoding='ascii') as file:
                file.write(newest + '_universal')
        self._act(f'converted checkpoint {newest}' + ('' if done.returncode == 0 else ', in vain'))

    def _act(self, what: str) -> None:
        self._operator.append(what)
        self._events.tell('operator', did=what)
