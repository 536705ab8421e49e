"""State servers inside this process. Its optimizers share one. For models of shard(), whose parameters are not in the trainer, each
directory has a server that keeps parameters too. All optimizers of a directory share its server."""

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
# Folders of optimizers that have left their jobs and will come back, as after a refused load. By optimizer's connection, while it lives.
_wanted: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Folders of optimizers whose models live on servers, by optimizer's connection. Whichever comes first starts a server that keeps
# parameters.
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
        """Nobody uses the server, and nothing would be lost with it."""
        return not self.uses and not (self.place.is_temporary and self.lasting)

    @property
    def keeps_folder(self) -> bool:
        """Nobody uses the server or will come back to it, and its jobs are for those who name its folder."""
        return self.is_free and not self.place.is_temporary and self.asked['directory'] not in list(_wanted.values())

    def has_open(self, job: str) -> bool:
        """An optimizer of this process has the job open, or is about to."""
        return any(use.job == job for use in list(self.uses))

    def differs(self, asked: dict[str, Any]) -> list[str]:
        """Returns the arguments that ask for another server."""
        return [key for key, value in asked.items() if value is not None and value != self.asked[key]]

    def refuse(self, key: str, value: Any) -> Error:
        """Returns the error for an optimizer that asks for another server by this argument, while this one is used."""
        end = ('close() the optimizers that use it' if self.uses else
               f'ballast.drop({min(self.lasting)!r}), which would be lost with its temporary directory,')
        return Error(f'{key}={value!r}: this process already has an embedded state server with {key}={self.asked[key]!r}, and '
                     f'optimizers of one process share it; leave {key} out here, or {end} first', 'BAD_CONFIG')

    def stop(self) -> None:
        """Stops the server, which frees its directory for another server of this process, even if tracebacks keep this object."""
        if os.getpid() != self.pid:
            return
        self.stopped = True
        self.server.stop()
        self._remove()

    def _remove(self) -> None:
        if self.place.is_temporary:
            temporary.remove(self.place.directory)


class Use:
    """One optimizer's use of the process's server, for a job. A finalizer may call end(), on any thread, so end() takes no lock."""

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
        """The server has ended, and answers no call."""
        return self._running.stopped

    def began(self) -> None:
        """The job is open."""
        self._running.began.setdefault(self.job, []).append(self)
        if self._is_durable:
            self._running.lasting.add(self.job)

    def end(self) -> None:
        """Ends the use. If the job is not durable, nobody can use it any more, so the server drops it, unless somebody else has opened it
        since."""
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
            # Whoever holds the lock, perhaps this thread, is starting a server, and will find this one.
            if running.keeps_parameters and _lock.acquire(blocking=False):
                try:
                    _end_apart(running)
                finally:
                    _lock.release()


def server(directory: str | os.PathLike[str] | None = None, dram: int | str | None = None, nvme: int | str | None = None,
           threads: int | None = None) -> _Embedded:
    """Returns the process's server, which the first call starts. Later calls take it as it is, and must not ask for another while it is
    used.

    directory: where jobs stay on disk. None: that of a server in use, or else a temporary one that disappears with the process.
    dram, nvme: budgets in bytes. None: 0.8 of the free memory, and of the free disk (nothing in a temporary directory).
    """
    with _lock:
        return _start(directory, dram, nvme, threads)


@contextlib.contextmanager
def opening(job: str, is_durable: bool, apart: bool, **budgets: Any) -> Iterator[Use]:
    """Gives a Use of server(), for a block that opens `job`. If the block raises and nobody else uses the server, the server ends: its
    budgets may be what was wrong, and the next attempt may ask for others. apart: use a server that keeps parameters."""
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
    """Collects optimizers that only a reference cycle keeps alive, so that they are not in the way of a new one."""
    there = [each for each in (_running, _apart.get(asked['directory'])) if each is not None and each.pid == os.getpid()]
    if any(each.has_open(job) or (each.uses and each.differs(asked)) for each in there):
        gc.collect()


def want(owner: object, directory: str | None) -> None:
    """Notes that `owner` will come back to the server of this directory. Until then no optimizer without a directory ends it. None: it will
    not come back."""
    _wanted.pop(owner, None)
    if directory is not None:
        _wanted[owner] = directory


def want_apart(owner: object, directory: str | None) -> None:
    """Notes that `owner` has or will have a job of a model of shard() in this directory. None: it no longer has."""
    _apart_wanted.pop(owner, None)
    if directory is not None:
        _apart_wanted[owner] = directory


def keeps_parameters(directory: str | None) -> bool:
    """The server of this directory keeps, or will keep, parameters, since a model of shard() uses the directory too. directory: of
    place.parse_directory()."""
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
            raise Error(f"job '{name}' is in use by an optimizer of this process; close() that optimizer, then drop the job", 'BUSY')
        there = running.server.jobs
        if name not in there:
            raise Error(f"there is no job '{name}' in {running.place.directory}; there are {', '.join(map(repr, there)) or 'none'}",
                        'UNKNOWN_JOB')
        running.server.drop(name)
        running.lasting.discard(name)


def _existing(directory: str | os.PathLike[str] | None) -> _Embedded:
    if directory is None:
        if _running is None:
            raise Error('this process has no embedded state server; name the directory that has the job', 'BAD_REQUEST')
        _check_process(_running)
        return _running
    if not os.path.isdir(directory):
        raise Error(f'directory={directory!r} does not exist; name the directory that has the job', 'BAD_CONFIG')
    return _start(directory, None, None, None)


def _check_process(running: _Embedded | None) -> None:
    if running is not None and running.pid != os.getpid():
        raise Error(
            "this process was forked from one that has an embedded state server, and a fork does not copy the server's threads. Make the "
            'optimizer after the fork, or start worker processes with spawn', 'UNSUPPORTED')


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
    """Returns the directory's server that keeps parameters. Without a directory it starts a new one."""
    asked = _asked(directory, dram, nvme, threads)
    for each in list(_apart.values()):
        _end_apart(each)  # a finalizer, which waits for no lock, may have left it
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
    """Ends the server that keeps no parameters, if it has this folder and nobody uses it or will come back to it."""
    if directory is None or _running is None or _running.place.directory != directory:
        return
    if not _running.is_free or directory in list(_wanted.values()):
        raise Error(f'directory={directory!r}: the embedded state server of this process uses it, but keeps no parameters, as a model of '
                    'shard() needs. A server that keeps parameters can serve all optimizers: make the optimizer of the shard() model '
                    'before the first step of the others, or close() those first', 'BAD_CONFIG')
    _stop()


def _end_apart(running: _Embedded) -> None:
    """Ends a server that keeps parameters if nobody uses it, since the next server of its directory may be in another process."""
    if running.keeps_parameters and not running.uses:
        _apart.pop(running.place.directory, None)
        running.stop()


def stop() -> None:
    """Ends the process's servers, after their sessions. Durable jobs stay in their directories."""
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
    """Returns the directory where the process's server keeps durable jobs. None: there is no server, nobody uses it, or its directory
    disappears with the process."""
    running = _running
    return None if running is None or running.place.is_temporary or running.keeps_folder else running.place.directory


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it
atexit.register(stop)
