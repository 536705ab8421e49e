"""State servers inside this process: one that its optimizers share; and for models of shard(), whose parameters the trainer has not, one
that keeps parameters too, for each directory. All optimizers of a directory share its server."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ballast import _native, place, temporary
from ballast.errors import Error

_lock = threading.Lock()
_running: _Embedded | None = None
_apart: dict[str, _Embedded] = {}  # servers that keep parameters, by directory
# Folders of optimizers that have left their jobs, as after a refused load, and will come back: by whoever wants one, while it lives.
_wanted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Folders of optimizers whose models live on their servers, by optimizer's connection: whoever comes first starts a server that will do.
_apart_wanted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class _Embedded:
    def __init__(self, directory: str | None, dram: int | None, nvme: int | None, threads: int | None, keeps_parameters: bool) -> None:
        self.pid = os.getpid()
        self.keeps_parameters = keeps_parameters
        self.stopped = False
        self.uses: set[Use] = set()  # of optimizers that are about to have a job on it, or have one
        self.began: dict[str, list[Use]] = {}  # job -> uses that have it open, the newest last
        self.lasting: set[str] = set()  # jobs that stay when nobody uses them
        self.masters: dict[str, Any] = {}  # job -> whose parameters are the masters of its tensors, where the server has none
        self.asked = {'directory': directory, 'dram': dram, 'nvme': nvme, 'threads': threads}
        self.place = place.make(directory, dram, nvme)
        try:
            self.server = _native.Server(self.place.directory, self.place.dram, self.place.nvme, threads or place.processors(),
                                         working_copies=keeps_parameters)
        except BaseException:
            self._remove()
            raise

    @property
    def is_free(self) -> bool:
        """Nobody uses it, and nothing would be lost with it."""
        return not self.uses and not (self.place.is_temporary and self.lasting)

    @property
    def keeps_folder(self) -> bool:
        """Nobody uses it or will come back, and its jobs are for those who name its folder."""
        return self.is_free and not self.place.is_temporary and self.asked['directory'] not in list(_wanted.values())

    def has_open(self, job: str) -> bool:
        """An optimizer of this process has the job open, or is about to."""
        return any(use.job == job for use in list(self.uses))

    def differs(self, asked: dict[str, Any]) -> list[str]:
        """Arguments that ask for another server."""
        return [key for key, value in asked.items() if value is not None and value != self.asked[key]]

    def refuse(self, key: str, value: Any) -> Error:
        """It is used, and an optimizer asks for another by this argument."""
        end = ('close() the optimizers that use it' if self.uses else
               f'ballast.drop({min(self.lasting)!r}), which would be lost with its temporary directory,')
        return Error(f'{key}={value!r}: this process already has an embedded state server with {key}={self.asked[key]!r}, and '
                     f'optimizers of one process share it; leave {key} out here, or {end} first', 'BAD_CONFIG')

    def stop(self) -> None:
        """Its directory is free then, also for another server of this process, though tracebacks may keep this object."""
        if os.getpid() != self.pid:
            return
        self.stopped = True
        self.server.stop()
        self._remove()

    def _remove(self) -> None:
        if self.place.is_temporary:
            temporary.remove(self.place.directory)


class Use:
    """One optimizer's use of the process's server, for a job. end() may be a finalizer's, on any thread: it takes no lock."""

    def __init__(self, running: _Embedded, job: str, is_durable: bool) -> None:
        self._running, self.job, self._is_durable = running, job, is_durable
        self.was_used = running.has_open(job)
        self.leaves_job = False  # end() leaves the job on the server, whatever its durability
        running.uses.add(self)

    @property
    def server(self) -> _native.Server:
        return self._running.server

    @property
    def masters(self) -> Any:
        return self._running.masters.get(self.job)

    @masters.setter
    def masters(self, holder: Any) -> None:
        self._running.masters[self.job] = holder

    @property
    def is_over(self) -> bool:
        """The server has ended: it answers no call."""
        return self._running.stopped

    def began(self) -> None:
        """The job is open."""
        self._running.began.setdefault(self.job, []).append(self)
        if self._is_durable:
            self._running.lasting.add(self.job)

    def end(self) -> None:
        """Nothing of a job that is not durable is left to be used: its memory is wanted back, unless somebody else opened it since."""
        running = self._running
        began = running.began.get(self.job, [])
        is_newest = began[-1:] == [self]
        if self in began:
            began.remove(self)
        try:
            ends = running.keeps_parameters and running.uses == {self}  # the server, and its memory with it
            if is_newest and not self._is_durable and not self.leaves_job and not running.stopped and not ends:
                running.masters.pop(self.job, None)
                running.server.drop(self.job)
        finally:
            running.uses.discard(self)
            # Who holds the lock, this thread perhaps, starts a server, and finds this one.
            if running.keeps_parameters and _lock.acquire(blocking=False):
                try:
                    _end_apart(running)
                finally:
                    _lock.release()


def server(directory: str | os.PathLike[str] | None = None, dram: int | str | None = None, nvme: int | str | None = None,
           threads: int | None = None) -> _Embedded:
    """The process's server, started at the first call. Later calls take it as it is, and must not ask for another while it is used.

    directory: what jobs leave on the disk; None: the one of a server that is used, else a temporary one that goes with the process.
    dram, nvme: budgets in bytes; None: 0.8 of the memory that is available, and of the disk that is free (nothing in a temporary
    directory).
    """
    with _lock:
        return _start(directory, dram, nvme, threads)


@contextlib.contextmanager
def opening(job: str, is_durable: bool, apart: bool, **budgets: Any) -> Iterator[Use]:
    """A Use of server(), within which the caller opens `job`. When that fails and nobody else uses the server, it ends: its
    budgets may be what was wrong, and the next attempt may ask for others. apart: of a server that keeps parameters."""
    _collect(job, _asked(**budgets))
    with _lock:
        running = _start_apart(**budgets) if apart else _start(**budgets)
        use = Use(running, job, is_durable)
    try:
        yield use
        use.began()
    except BaseException:
        with _lock:
            running.uses.discard(use)
            _end_apart(running)
            if running is _running and running.is_free:
                _stop()
        raise


def _collect(job: str, asked: dict[str, Any]) -> None:
    """An optimizer that only a cycle keeps, of a trainer that another has taken the place of, is in nobody's way."""
    there = [each for each in (_running, _apart.get(asked['directory'])) if each is not None and each.pid == os.getpid()]
    if any(each.has_open(job) or (each.uses and each.differs(asked)) for each in there):
        gc.collect()


def want(owner: object, directory: str | None) -> None:
    """`owner` will come back to the server of this directory, which no optimizer without a directory ends meanwhile; None: it will not."""
    _wanted.pop(owner, None)
    if directory is not None:
        _wanted[owner] = directory


def want_apart(owner: object, directory: str | None) -> None:
    """`owner` has or will have a job of a model of shard() in this directory; None: it has none any more."""
    _apart_wanted.pop(owner, None)
    if directory is not None:
        _apart_wanted[owner] = directory


def keeps_parameters(directory: str | None) -> bool:
    """The server that an optimizer of this directory has, or will have, keeps parameters, for a model of shard() has that directory too.
    directory: of place.parse_directory()."""
    if directory in _apart:
        return True
    return directory in list(_apart_wanted.values()) and (_running is None or _running.asked['directory'] != directory)


def jobs(directory: str | os.PathLike[str] | None = None) -> list[str]:
    """See ballast.jobs."""
    with _lock:
        return _existing(directory).server.jobs


def drop(name: str, directory: str | os.PathLike[str] | None = None) -> None:
    """See ballast.drop."""
    with _lock:
        running = _existing(directory)
        if running.has_open(name):
            raise Error(f"job '{name}' is in use by an optimizer of this process: call its close(), then drop the job", 'BUSY')
        there = running.server.jobs
        if name not in there:
            raise Error(f"there is no job '{name}' in {running.place.directory}; there are {', '.join(map(repr, there)) or 'none'}",
                        'UNKNOWN_JOB')
        running.server.drop(name)
        running.lasting.discard(name)


def _existing(directory: str | os.PathLike[str] | None) -> _Embedded:
    if directory is None:
        if _running is None:
            raise Error('there is no embedded state server in this process: name the directory that has the job', 'BAD_REQUEST')
        _check_process(_running)
        return _running
    if not os.path.isdir(directory):
        raise Error(f'directory={directory!r} is not there: name the one that has the job', 'BAD_CONFIG')
    return _start(directory, None, None, None)


def _check_process(running: _Embedded | None) -> None:
    if running is not None and running.pid != os.getpid():
        raise Error(
            'this process was forked from one that has an embedded state server, whose threads are not here; '
            'make the optimizer after the fork, or start worker processes with spawn', 'UNSUPPORTED')


def _start(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None, threads: int | None) -> _Embedded:
    global _running
    asked = _asked(directory, dram, nvme, threads)
    _check_process(_running)
    if keeps_parameters(asked['directory']):
        return _start_apart(**asked)
    others = [] if _running is None else _running.differs(asked)
    if directory is None and _running is not None and _running.keeps_folder:
        others.append('directory')
    if others and _running is not None:
        if not _running.is_free:
            raise _running.refuse(others[0], asked[others[0]])
        _stop()
    if _running is None:
        _running = _Embedded(**asked, keeps_parameters=False)
    return _running


def _asked(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None, threads: int | None) -> dict[str, Any]:
    return {'directory': place.parse_directory(directory), 'dram': place.parse_bytes('dram', dram),
            'nvme': place.parse_bytes('nvme', nvme), 'threads': threads}


def _start_apart(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None,
                 threads: int | None) -> _Embedded:
    """A server that keeps parameters: that of the directory, or one of its own where there is no directory."""
    asked = _asked(directory, dram, nvme, threads)
    for each in list(_apart.values()):
        _end_apart(each)  # which a finalizer, that waits for no lock, has left
    running = _apart.get(asked['directory'])
    _check_process(running)
    others = [] if running is None else running.differs(asked)
    if others and running is not None:
        if not running.is_free:
            raise running.refuse(others[0], asked[others[0]])
        _end_apart(running)
        running = None
    if running is None:
        _give_way(asked['directory'])
        running = _Embedded(**asked, keeps_parameters=True)
        _apart[running.place.directory] = running
    return running


def _give_way(directory: str | None) -> None:
    """Ends the server that keeps no parameters if it has this folder and nobody uses it or will come back."""
    if directory is None or _running is None or _running.place.directory != directory:
        return
    if not _running.is_free or directory in list(_wanted.values()):
        raise Error(f'directory={directory!r}: the embedded state server of this process has it and keeps no parameters, as a model of '
                    'shard() needs; one that keeps them serves all optimizers: make the optimizer of the shard() model before the first '
                    'step of the others, or close() those first', 'BAD_CONFIG')
    _stop()


def _end_apart(running: _Embedded) -> None:
    """Ends a server that keeps parameters once nobody uses it: its directory's next server may be another process's."""
    if running.keeps_parameters and not running.uses:
        _apart.pop(running.place.directory, None)
        running.stop()


def stop() -> None:
    """Ends the process's server, after its sessions; what is durable stays in its directory."""
    with _lock:
        _stop()
        for running in list(_apart.values()):
            running.stop()
        _apart.clear()


def _stop() -> None:
    global _running
    if _running is not None and _running.pid == os.getpid():
        running, _running = _running, None
        running.stop()


def directory_in_use() -> str | None:
    """The directory where the process's server keeps what stays; None: there is none, nobody uses the server, or its directory
    goes with the process."""
    running = _running
    return None if running is None or running.place.is_temporary or running.keeps_folder else running.place.directory


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it
atexit.register(stop)
