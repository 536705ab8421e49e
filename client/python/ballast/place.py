"""The folder and the budgets of a state server of this trainer's own, checked against the machine before anything starts."""

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
# Without budgets: the part of what is free now that a server may take.
_DEFAULT_SHARE = 0.8
# Files that a state server keeps in its directory, beside its catalog of some MiB.
_TIER, _LOGS = 'nvme.tier', 'log-'
# As ballastd's.
THREADS_MAX = 1024


def processors() -> int:
    """The number of processors that this process may use, as far as a server can."""
    return min(len(os.sched_getaffinity(os.getpid())), THREADS_MAX)


class Place(NamedTuple):
    directory: str
    is_temporary: bool  # goes with the process
    dram: int  # bytes, as the others
    nvme: int


def parse_bytes(what: str, value: int | str | None) -> int | None:
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


def parse_directory(directory: str | os.PathLike[str] | None) -> str | None:
    """The folder that the path means now, since a process may change its own; None stays None."""
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
    """None where there is none, as 'max' says of a limit."""
    try:
        with open(path, encoding='ascii') as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _memory(path: str = '/proc/meminfo') -> dict[str, int]:
    """Bytes by name, as /proc/meminfo tells them."""
    with open(path, encoding='ascii') as lines:
        return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(':') for line in lines)}


def _cgroups(proc: str = '/proc/self/cgroup', root: str = '/sys/fs/cgroup') -> Iterator[tuple[str, str, str, str]]:
    """(folder, names of limit, use, and what of that is page cache) of the memory cgroups that this process is in, and of those above
    them. Within a container the path is the host's, and only the root is there."""
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
    """(all, free) bytes of memory that this process can come to: the machine's, or its cgroups'. Page cache counts as free."""
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
    """Bytes of the disk that jobs of a server there take."""
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries
                   if entry.name == _TIER or entry.name.startswith(_LOGS))


def _make_directory(directory: str) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise Error(f'directory={directory!r}: expected a folder that can be made and written, came: {error.strerror}; give another',
                    'BAD_CONFIG') from None


def _file_system(directory: str | os.PathLike[str], mounts: str | os.PathLike[str] = '/proc/self/mountinfo') -> str:
    """The kind of file system that `directory` is on; '' if nobody tells. proc_pid_mountinfo(5)."""
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
    """Bytes of (dram, nvme), not compared with the machine: an estimate may be for another one. None: 0.8 of what is free there; no NVMe
    without a directory to stay."""
    dram, nvme = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if dram is None:
        dram = int(_DEFAULT_SHARE * _limits()[1])
    if nvme is None:
        # Space that its jobs hold already is theirs: the same line must find room for them again.
        nvme = 0 if directory is None else int(_DEFAULT_SHARE * (shutil.disk_usage(directory).free + _held(directory)))
    return dram, nvme


def _check_dram(asked: int) -> None:
    most, free = _limits()
    if asked > most:
        raise Error(f'dram: {_gib(asked)} were asked for, there are {_gib(most)} of memory here: lower dram, or give nvme and a directory',
                    'BAD_CONFIG')
    if asked > free:
        warn(f'dram: {_gib(asked)} were asked for, {_gib(free)} of memory are available now')


def _check_nvme(directory: str, asked: int) -> None:
    free, held = shutil.disk_usage(directory).free, _held(directory)
    if asked > free + held:
        there = f'nvme: {_gib(asked)} were asked for, the disk of {directory} has {_gib(free)} free'
        if held == 0:
            raise Error(f'{there}: lower nvme, or give a directory on another disk', 'BAD_CONFIG')
        # Jobs that are there may need no more than they have.
        warn(f'{there}, and jobs there hold {_gib(held)}')
    kind = _file_system(directory)
    if kind in ('tmpfs', 'ramfs'):
        warn(f'directory={directory!r} is in memory ({kind}): what nvme holds takes DRAM, and nothing there outlives the machine')


def make(directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None) -> Place:
    """directory: None for a temporary one. dram, nvme: as budgets(). BAD_CONFIG where the machine has not what was asked for; warns
    where it may not."""
    is_temporary = directory is None
    directory = temporary.make() if directory is None else os.path.abspath(directory)
    try:
        if not is_temporary:
            _make_directory(directory)
        _check_machine(directory, dram, nvme)
        dram, nvme = budgets(None if is_temporary else directory, dram, nvme)
        moving = _native.staging(dram)
        if nvme > 0 and moving >= dram:
            raise Error(f'dram: {_gib(dram)}, but buffers for state on nvme alone take {_gib(moving)}: raise dram, or set '
                        'nvme=0', 'BAD_CONFIG')
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
    """As make(), for files without a name: `default` takes the place of a directory that is None, and nothing there is removed."""
    directory = parse_directory(directory)
    if directory is not None:
        _make_directory(directory)
    _check_machine(directory or default, dram, nvme)
    return Place(directory or default, False, *budgets(directory, dram, nvme))
