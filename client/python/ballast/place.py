"""Where a state server of this trainer's own keeps state, and how much of it: what was asked for, checked against the machine
before anything starts."""

import os
import re
import resource
import shutil
import tempfile
import warnings
from typing import NamedTuple

from ballast import temporary
from ballast.errors import Error

_UNITS = {'': 1, 'b': 1, 'k': 10**3, 'm': 10**6, 'g': 10**9, 't': 10**12}
# Without budgets: the part of what is free now that a server may take.
_DEFAULT_SHARE = 0.8
# For state on its way between NVMe and the update: eight chunks of 2^20 elements with fp32 moments, or of a small budget a
# quarter, and what four need. Measured, 268M parameters with 1.5 GiB of DRAM: a step takes 2.3 s with 48 MiB, 1.9 with 96, 2.2
# with 144.
_STAGING_BYTES = 48 << 20, 96 << 20


class Place(NamedTuple):
    directory: str
    is_temporary: bool  # goes with the process
    dram: int  # bytes, as the others
    nvme: int
    staging: int  # of dram


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


def _gib(count):
    return f'{count / 2**30:.3g} GiB'


def _number_in(path):
    """None where there is none, as 'max' says of a limit."""
    try:
        with open(path, encoding='ascii') as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _memory(path='/proc/meminfo'):
    """Bytes by name, as /proc/meminfo tells them."""
    with open(path, encoding='ascii') as lines:
        return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(':') for line in lines)}


def _limits():
    """(all, free) bytes of memory that this process can come to: the machine's, or its container's, whose root is seen from within."""
    memory = _memory()
    most, free = memory['MemTotal'], memory['MemAvailable']
    for limit, used in (('memory.max', 'memory.current'), ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes')):
        limit, used = _number_in(f'/sys/fs/cgroup/{limit}'), _number_in(f'/sys/fs/cgroup/{used}')
        if limit is not None and used is not None and limit < most:
            most, free = limit, min(free, max(limit - used, 0))
    return most, free


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


def _make_directory(directory):
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise Error(f'directory={directory!r}: expected a folder that can be made and written, came: {error.strerror}; give another',
                    'BAD_CONFIG') from None


def _file_system(directory):
    """The kind of the one that `directory` is on."""
    path, kind = '', ''
    with open('/proc/self/mounts', encoding='utf-8', errors='replace') as mounts:
        for _, mounted, this, *_ in map(str.split, mounts):
            inside = os.path.commonpath((os.path.realpath(directory), mounted)) == mounted
            if inside and len(mounted) >= len(path):
                path, kind = mounted, this
    return kind


def budgets(directory, dram, nvme):
    """Bytes of (dram, nvme), unchecked. None: 0.8 of what is free there; no NVMe without a directory to stay."""
    dram, nvme = parse_bytes('dram', dram), parse_bytes('nvme', nvme)
    if dram is None:
        dram = int(_DEFAULT_SHARE * _limits()[1])
    if nvme is None:
        # What its jobs hold already is theirs: the same line must find room for them again.
        nvme = 0 if directory is None else int(_DEFAULT_SHARE * (shutil.disk_usage(directory).free + _held(directory)))
    return dram, nvme


def _check_dram(asked):
    most, free = _limits()
    if asked > most:
        raise Error(f'dram: {_gib(asked)} were asked for, there are {_gib(most)} of memory here: lower dram, or give nvme and a directory',
                    'BAD_CONFIG')
    if asked > free:
        warnings.warn(f'dram: {_gib(asked)} were asked for, {_gib(free)} of memory are available now', stacklevel=2)
    lockable = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.geteuid() != 0 and 0 <= lockable < asked and _memory()['SwapTotal'] > 0:
        warnings.warn(f'dram: {_gib(asked)} were asked for, {_gib(lockable)} can be locked and the machine swaps: state may be swapped '
                      'out; raise the limit (ulimit -l)', stacklevel=2)


def _check_nvme(directory, asked):
    free, held = shutil.disk_usage(directory).free, _held(directory)
    if asked > free + held:
        raise Error(f'nvme: {_gib(asked)} were asked for, the disk of {directory} has {_gib(free)} free'
                    + (f', and jobs there hold {_gib(held)}' if held else '') + ': lower nvme, or give a directory on another disk',
                    'BAD_CONFIG')
    kind = _file_system(directory)
    if asked > 0 and kind in ('tmpfs', 'ramfs'):
        warnings.warn(f'directory={directory!r} is in memory ({kind}): what nvme holds takes DRAM, and nothing there outlives the machine',
                      stacklevel=2)


def make(directory, dram, nvme):
    """directory: None for a temporary one. dram, nvme: as budgets(). BAD_CONFIG where the machine has not what was asked for; warns
    where it may not."""
    is_temporary = directory is None
    directory = temporary.make() if is_temporary else os.path.abspath(directory)
    try:
        if not is_temporary:
            _make_directory(directory)
        if dram is not None:
            _check_dram(parse_bytes('dram', dram))
        if nvme is not None:
            _check_nvme(directory, parse_bytes('nvme', nvme))
        dram, nvme = budgets(None if is_temporary else directory, dram, nvme)
    except BaseException:
        if is_temporary:
            temporary.remove(directory)
        raise
    low, high = _STAGING_BYTES
    return Place(directory, is_temporary, dram, nvme, max(low, min(high, dram // 4)) if nvme > 0 else 0)
