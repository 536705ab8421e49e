"""The state server inside this process: one, shared by all of its optimizers."""

import atexit
import os
import re
import shutil
import threading

from ballast import _native, temporary
from ballast.errors import Error

_UNITS = {'': 1, 'b': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 't': 10**12}
# Without budgets: the part of what is free now that an embedded server may take.
_DEFAULT_SHARE = 0.8
_STAGING_BYTES = 48 << 20

_lock = threading.Lock()
_running = None


def parse_bytes(what, value):
    """Bytes of an int or of a string such as '512MiB' or '2GB'; None stays None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*', str(value).lower())
    if match is None or (match[3] and not match[2]):
        raise Error(f"{what}={value!r}: expected bytes, such as 536870912, '512MiB' or '2GB'", 'BAD_CONFIG')
    unit = _UNITS[match[2]]
    if match[3]:
        unit = 1024 ** 'bkmgt'.index(match[2])
    return int(float(match[1]) * unit)


def _free_memory():
    with open('/proc/meminfo') as lines:
        for line in lines:
            if line.startswith('MemAvailable:'):
                return int(line.split()[1]) * 1024
    raise Error("/proc/meminfo does not say MemAvailable; give a budget: dram='...'", 'BAD_CONFIG')


def budgets(directory, dram, nvme):
    """Bytes of (dram, nvme). None: 0.8 of what is free there; no NVMe without a directory to stay."""
    dram, nvme = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if dram is None:
        dram = int(_DEFAULT_SHARE * _free_memory())
    if nvme is None:
        # What its jobs hold already is theirs: the same line must find room for them again.
        nvme = 0 if directory is None else int(_DEFAULT_SHARE * (shutil.disk_usage(directory).free + _held(directory)))
    return dram, nvme


def _held(directory):
    """Bytes of the disk that files below `directory` take."""
    held = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                held += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                pass  # gone meanwhile
    return held


class _Embedded:
    def __init__(self, directory, dram, nvme, threads):
        self.pid = os.getpid()
        self.stopped = False
        self.opening = 0  # optimizers that are about to have a job on it
        self.used = False  # one had
        self._owners = {}
        self.asked = (directory, dram, nvme, threads)
        self.temporary = directory is None
        self.directory = temporary.make() if self.temporary else os.path.abspath(directory)
        if not self.temporary:
            os.makedirs(self.directory, exist_ok=True)
        dram, nvme = budgets(None if self.temporary else self.directory, dram, nvme)
        staging = _STAGING_BYTES if nvme > 0 else 0
        try:
            self.server = _native.Server(self.directory, dram, nvme, staging, threads or os.cpu_count() or 1)
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
        if self.temporary:
            temporary.remove(self.directory)


def server(directory=None, dram=None, nvme=None, threads=None):
    """The process's server, started at the first call. Later calls take it as it is, and must not ask for another.

    directory: what jobs leave on the disk; None: a temporary one that goes with the process. dram, nvme: budgets in
    bytes; None: 0.8 of the memory that is available, and of the disk that is free (nothing in a temporary directory).
    """
    global _running
    dram, nvme = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if directory is not None:
        if not os.fspath(directory):
            raise Error("directory='': expected a folder, such as 'state'", 'BAD_CONFIG')
        directory = os.path.abspath(directory)
    asked = (directory, dram, nvme, threads)
    with _lock:
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
    global _running
    with _lock:
        if _running is not None and _running.pid == os.getpid():
            _running.stop()
            _running = None


def directory():
    """Where the process's server keeps what stays; None: there is none yet, or its directory goes with the process."""
    return None if _running is None or _running.temporary else _running.directory
