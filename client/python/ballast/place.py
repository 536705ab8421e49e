"""The folder and the budgets of this trainer's own state server, which are checked against the machine before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from ballast import _native, temporary
from ballast.errors import Error, warn

_UNITS = {'': 1, 'b': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 't': 10**12}
# Without a budget a server may take this part of what is free now.
_DEFAULT_SHARE = 0.8
# Files that a state server keeps in its directory, beside its catalog of some MiB.
_TIER, _LOGS = 'nvme.tier', 'log-'
# As ballastd's.
THREADS_MAX = 1024


def processors() -> int:
    """Returns how many processors this process may use, up to what a server can use."""
    return min(len(os.sched_getaffinity(os.getpid())), THREADS_MAX)


class Place(NamedTuple):
    directory: str
    is_temporary: bool  # goes with the process
    dram: int  # bytes, as the others
    nvme: int


def parse_bytes(what: str, value: int | str | None) -> int | None:
    """Returns the bytes of an int, or of a string such as '512MiB' or '2GB'. None stays None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    match = re.fullmatch(r'\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*', str(value).lower())
    if match is None or (match[3] and not match[2]):
        raise Error(f"{what}={value!r}: expected bytes, such as 536870912, '512MiB' or '2GB'", 'BAD_CONFIG')
    unit = _UNITS[match[2]]
    if match[3]:
        unit = 1024 ** 'bkmgt'.index(match[2])
    return int(float(match[1]) * unit)


def parse_directory(directory: str | os.PathLike[str] | None) -> str | None:
    """Returns the absolute path, since a process may change its working directory. None stays None."""
    if directory is None:
        return None
    try:
        path = os.fspath(directory)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise Error(f"directory={directory!r}: expected a folder's path, such as 'state', or None for a temporary folder", 'BAD_CONFIG')
    return os.path.abspath(path)


def _gib(count: int) -> str:
    return f'{count / 2**30:.3g} GiB'


def _number_in(path: str) -> int | None:
    """Returns the number in a file. None: the file has no number, as a limit of 'max'."""
    try:
        with open(path, encoding='ascii') as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _memory(path: str = '/proc/meminfo') -> dict[str, int]:
    """Returns bytes by name, from /proc/meminfo."""
    with open(path, encoding='ascii') as lines:
        return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(':') for line in lines)}


def _cgroups(proc: str = '/proc/self/cgroup', root: str = '/sys/fs/cgroup') -> Iterator[tuple[str, str, str, str]]:
    """Yields the memory cgroups that this process is in, and those above them: (folder, and names of the limit, the use, and the page
    cache in the use). In a container the path is the host's, and only the root exists."""
    try:
        with open(proc, encoding='utf-8') as lines:
            groups = [line.rstrip('\n').split(':', 2) for line in lines]
    except OSError:
        groups = []
    versions = {'': (root, ('memory.max', 'memory.current', 'inactive_file')),
                'memory': (f'{root}/memory', ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'))}
    for top, names in versions.values():
        yield top, *names
    for _, controllers, path in groups:
        for controller in controllers.split(','):
            if controller not in versions:
                continue
            top, names = versions[controller]
            while path.strip('/'):
                yield top + path, *names
                path = os.path.dirname(path)


def _limits() -> tuple[int, int]:
    """Returns (all, free) bytes of memory that this process can get, from the machine or within its cgroups. Page cache counts as free."""
    memory = _memory()
    most = memory['MemTotal']
    free = memory.get('MemAvailable', memory['MemFree'])
    for folder, limit_file, used_file, cache in _cgroups():
        limit, used = _number_in(f'{folder}/{limit_file}'), _number_in(f'{folder}/{used_file}')
        if limit is not None and used is not None:
            most, free = min(most, limit), min(free, max(limit - used + _cache_in(f'{folder}/memory.stat', cache), 0))
    return most, free


def _cache_in(path: str, name: str) -> int:
    try:
        with open(path, encoding='ascii') as lines:
            return next((int(value) for key, value in map(str.split, lines) if key == name), 0)
    except (OSError, ValueError):
        return 0


def _held(directory: str | os.PathLike[str]) -> int:
    """Returns how many bytes of the disk the jobs of a server in this directory take."""
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries
                   if entry.name == _TIER or entry.name.startswith(_LOGS))


def _make_directory(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise Error(f'directory={directory!r}: expected a folder that can be created and written to; the system says: {error.strerror}. '
                    'Give another folder', 'BAD_CONFIG') from None


def _file_system(directory: str | os.PathLike[str], mounts: str | os.PathLike[str] = '/proc/self/mountinfo') -> str:
    """Returns the kind of file system that `directory` is on, or '' if it is not known. proc_pid_mountinfo(5)."""
    device = os.stat(directory).st_dev
    number = f'{os.major(device)}:{os.minor(device)}'
    try:
        with open(mounts, encoding='utf-8', errors='replace') as lines:
            for line in lines:
                mount, _, system = line.partition(' - ')
                if mount.split(' ')[2:3] == [number]:
                    return system.split(' ')[0]
    except OSError:
        pass
    return ''


def budgets(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None) -> tuple[int, int]:
    """Returns bytes of (dram, nvme). They are not compared with the machine, since an estimate may be for another one. None: 0.8 of what is
    free, and no NVMe without a lasting directory."""
    dram, nvme = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if dram is None:
        dram = int(_DEFAULT_SHARE * _limits()[1])
    if nvme is None:
        # Space that the jobs of this directory hold counts as free, so that the same script finds room for them again.
        nvme = 0 if directory is None else int(_DEFAULT_SHARE * (shutil.disk_usage(directory).free + _held(directory)))
    return dram, nvme


def _check_dram(asked: int) -> None:
    most, free = _limits()
    if asked > most:
        raise Error(f'dram: {_gib(asked)} were asked for, but this machine or its container has {_gib(most)} of memory; lower dram, or '
                    'give nvme and a directory', 'BAD_CONFIG')
    if asked > free:
        warn(f'dram: {_gib(asked)} were asked for, but only {_gib(free)} of memory are free now')


def _check_nvme(directory: str, asked: int) -> None:
    free, held = shutil.disk_usage(directory).free, _held(directory)
    if asked > free + held:
        there = f'nvme: {_gib(asked)} were asked for, but the disk of {directory} has only {_gib(free)} free'
        if held == 0:
            raise Error(f'{there}; lower nvme, or give a directory on another disk', 'BAD_CONFIG')
        # Jobs in this directory may need no more than they have.
        warn(f'{there}. Jobs in this directory already hold {_gib(held)}')
    kind = _file_system(directory)
    if kind in ('tmpfs', 'ramfs'):
        warn(f'directory={directory!r} lies in memory ({kind}): its files take DRAM, and a reboot of the machine loses them')


def make(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None) -> Place:
    """Makes the place of a server. directory: None for a temporary one. dram, nvme: as for budgets(). Raises BAD_CONFIG if the machine does
    not have what was asked for, and warns if it may not have it."""
    is_temporary = directory is None
    directory = temporary.make() if directory is None else os.path.abspath(directory)
    try:
        if not is_temporary:
            _make_directory(directory)
        _check_machine(directory, dram, nvme)
        dram, nvme = budgets(None if is_temporary else directory, dram, nvme)
        moving = _native.staging(dram)
        if nvme > 0 and moving >= dram:
            raise Error(f'dram: {_gib(dram)} is too little: the buffers that move state to and from nvme take {_gib(moving)}. Raise dram, '
                        'or set nvme=0', 'BAD_CONFIG')
    except BaseException:
        if is_temporary:
            temporary.remove(directory)
        raise
    return Place(directory, is_temporary, dram, nvme)


def _check_machine(directory: str, dram: int | str | None, nvme: int | str | None) -> None:
    memory, disk = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if memory is not None:
        _check_dram(memory)
    if disk:
        _check_nvme(directory, disk)


def for_scratch(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None, default: str) -> Place:
    """As make(), for files without a name. If directory is None, `default` takes its place. Nothing is removed from it later."""
    directory = parse_directory(directory)
    if directory is not None:
        _make_directory(directory)
    _check_machine(directory or default, dram, nvme)
    return Place(directory or default, False, *budgets(directory, dram, nvme))
