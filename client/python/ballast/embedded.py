"""The state server inside this process: one, shared by all of its optimizers."""

import atexit
import contextlib
import os
import threading

from ballast import _native, place, temporary
from ballast.errors import Error

_lock = threading.Lock()
_running = None


class _Embedded:
    def __init__(self, directory, dram, nvme, threads):
        self.pid = os.getpid()
        self.stopped = False
        self.opening = 0  # optimizers that are about to have a job on it
        self.used = False  # one had
        self._owners = {}
        self.asked = (directory, dram, nvme, threads)
        self.place = place.make(directory, dram, nvme)
        try:
            self.server = _native.Server(self.place.directory, self.place.dram, self.place.nvme, threads or place.processors())
        except BaseException:
            self._remove()
            raise

    def own(self, job):
        """Who opened the job last: a token for drop()."""
        self._owners[job] = object()
        return self._owners[job]

    def drop(self, job, owner):
        """The job and all that it has, unless somebody else opened it since; a server that has stopped keeps it."""
        if not self.stopped and self._owners.get(job) is owner:
            del self._owners[job]
            self.server.drop(job)

    def stop(self):
        if os.getpid() != self.pid:
            return
        self.stopped = True
        self.server.stop()
        self._remove()

    def _remove(self):
        if self.place.is_temporary:
            temporary.remove(self.place.directory)


def server(directory=None, dram=None, nvme=None, threads=None):
    """The process's server, started at the first call. Later calls take it as it is, and must not ask for another.

    directory: what jobs leave on the disk; None: a temporary one that goes with the process. dram, nvme: budgets in
    bytes; None: 0.8 of the memory that is available, and of the disk that is free (nothing in a temporary directory).
    """
    with _lock:
        return _start(directory, dram, nvme, threads)


@contextlib.contextmanager
def opening(**budgets):
    """server(), for the one who is about to have a job on it. When that fails and nobody has one, the server ends: its
    budgets may be what was wrong, and the next attempt may ask for others."""
    with _lock:
        running = _start(**budgets)
        running.opening += 1
    try:
        yield running
        running.used = True
    finally:
        with _lock:
            running.opening -= 1
            if running is _running and not running.used and not running.opening:
                _stop()


def _start(directory, dram, nvme, threads):
    global _running
    dram, nvme = place.parse_bytes('dram', dram), place.parse_bytes('nvme', nvme)
    if directory is not None:
        if not os.fspath(directory):
            raise Error("directory='': expected a folder, such as 'state'", 'BAD_CONFIG')
        directory = os.path.abspath(directory)
    asked = (directory, dram, nvme, threads)
    if _running is not None and _running.pid != os.getpid():
        raise Error(
            'this process was forked from one that has an embedded state server, whose threads are not here; '
            'make the optimizer after the fork, or start worker processes with spawn', 'UNSUPPORTED')
    if _running is None:
        _running = _Embedded(*asked)
        atexit.register(stop)
    for name, mine, there in zip(('directory', 'dram', 'nvme', 'threads'), asked, _running.asked):
        if mine is not None and mine != there:
            raise Error(
                f'{name}={mine!r}: this process already has an embedded state server with {name}={there!r}, and '
                f'optimizers of one process share it; leave {name} out here', 'BAD_CONFIG')
    return _running


def stop():
    """Ends the process's server, after its sessions; what is durable stays in its directory."""
    with _lock:
        _stop()


def _stop():
    global _running
    if _running is not None and _running.pid == os.getpid():
        _running.stop()
        _running = None


def directory():
    """Where the process's server keeps what stays; None: there is none yet, or its directory goes with the process."""
    running = _running
    return None if running is None or running.place.is_temporary else running.place.directory


def _renew_lock():
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it
