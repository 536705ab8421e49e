"""Directories that disappear with their process. If a process is killed, the next one that makes a directory removes its directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

_PREFIX = 'ballast-'
# Locked while the owner lives. A lock of fcntl belongs to the process: a forked child does not have it. The lock is lost when its owner
# closes any descriptor of the file, so the owner must not open its own file again.
_LOCK = 'owner.lock'
_mine: dict[str, tuple[int, int]] = {}  # path -> (process, descriptor of its lock)


def _lock(path: str | os.PathLike[str]) -> int:
    """Returns a descriptor with the lock. Raises OSError if another process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale() -> None:
    for folder in pathlib.Path(tempfile.gettempdir()).glob(f'{_PREFIX}*'):
        if str(folder) in _mine:
            continue
        with contextlib.suppress(OSError):  # somebody's else, or gone meanwhile
            descriptor = _lock(folder / _LOCK)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def make() -> str:
    """Makes a directory, and returns its path. Removes those of processes that were killed."""
    _remove_stale()
    # It has a name that nobody looks for until it is locked.
    made = tempfile.mkdtemp(prefix='.' + _PREFIX)
    os.close(os.open(os.path.join(made, _LOCK), os.O_WRONLY | os.O_CREAT, 0o600))
    descriptor = _lock(os.path.join(made, _LOCK))
    path = os.path.join(os.path.dirname(made), os.path.basename(made)[1:])
    _mine[path] = os.getpid(), descriptor  # first: a lock is the process's, another thread would get it too
    os.rename(made, path)
    return path


def remove(path: str) -> None:
    """Removes a directory of make(). A forked child leaves it alone."""
    mine = _mine.pop(path, None)
    if mine is not None and mine[0] == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        os.close(mine[1])
