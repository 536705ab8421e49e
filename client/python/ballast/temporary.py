"""Directories that go with their process, also one that is killed: then with the next that makes one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile

_PREFIX = 'ballast-'
# Locked while the owner lives. A lock of fcntl's is the process's own: a forked child has none of it, and it goes when its owner
# closes any descriptor of the file, so the owner must not look into its own.
_LOCK = 'owner.lock'
_mine: dict[str, tuple[int, int]] = {}  # path -> (process, descriptor of its lock)


def _lock(path: str | os.PathLike[str]) -> int:
    """A descriptor, locked; OSError if another process has it."""
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
    """A new directory's path; those of processes that were killed go."""
    _remove_stale()
    # Under a name that nobody looks for, until it is locked.
    made = tempfile.mkdtemp(prefix='.' + _PREFIX)
    os.close(os.open(os.path.join(made, _LOCK), os.O_WRONLY | os.O_CREAT, 0o600))
    descriptor = _lock(os.path.join(made, _LOCK))
    path = os.path.join(os.path.dirname(made), os.path.basename(made)[1:])
    _mine[path] = os.getpid(), descriptor  # first: a lock is the process's, another thread would get it too
    os.rename(made, path)
    return path


def remove(path: str) -> None:
    """Removes a directory of make(), once; a forked child leaves it alone."""
    mine = _mine.pop(path, None)
    if mine is not None and mine[0] == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        os.close(mine[1])
