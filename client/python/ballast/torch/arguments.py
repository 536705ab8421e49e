"""Checks Ballast's own arguments of an optimizer's constructor before anything happens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from ballast import _native, place
from ballast.errors import Error

_CHOICES = {
    'resume': ('never', 'auto', 'must'),
    'durability': (None, 'step', 'every-K', 'none'),
    'moments': ('f32', 'bf16', 'i8', 'f8'),
    'master': ('f32', 'remainder'),
    'states': (None, 'named', 'full'),
}
_CHUNK_ELEMENTS = 1 << 16, 1 << 20
_PIN_INTERVAL_MAX = 1 << 32


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise Error(f'{name}={value!r}: expected {expected}', 'BAD_CONFIG')


def _listed(choices: Sequence[str | None]) -> str:
    names = ', '.join(repr(choice) for choice in choices if choice is not None)
    return f'one of {names}, or None to choose' if None in choices else f'one of {names}'


def _lies(value: Any, low: float, high: float) -> bool:
    """The value is a whole number from low to high."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _number(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        if fits(float(value)):
            return float(value)
    except (TypeError, ValueError):
        pass
    return _refuse(name, value, expected)


def flag(name: str, value: Any, variable: str | None = None) -> bool:
    """Returns True or False. None takes the value of the environment variable, 0 or 1."""
    if value is None and variable is not None:
        said = os.environ.get(variable, '0')
        if said not in ('0', '1'):
            _refuse(variable, said, '0 or 1')
        return said == '1'
    if not isinstance(value, bool):
        _refuse(name, value, f'True, False, or None for {variable}' if variable else 'True or False')
    return value


def check(given: Mapping[str, Any]) -> None:
    """Refuses a wrong argument. given: of options.complete()."""
    for name, choices in _CHOICES.items():
        if given[name] not in choices:
            _refuse(name, given[name], _listed(choices))
    if not isinstance(given['name'], str) or not _native.is_job_name(given['name']):
        _refuse('name', given['name'], _native.JOB_NAME_RULE)
    if not _lies(given['checkpoints'], 1, math.inf):
        _refuse('checkpoints', given['checkpoints'], 'at least 1')
    if not _lies(given['seed'], 0, (1 << 64) - 1):
        _refuse('seed', given['seed'], 'an integer from 0 to 2^64 - 1')
    if given['threads'] is not None and not _lies(given['threads'], 1, place.THREADS_MAX):
        _refuse('threads', given['threads'], f'1 to {place.THREADS_MAX}, or None for all processors')
    if given['replicas'] is not None and not _lies(given['replicas'], 1, 4):
        _refuse('replicas', given['replicas'], '1 to 4, or None')
    _check_pin_interval(given['pin_interval'], given['durability'])
    _check_chunk_elements(given['chunk_elements'])
    for name in ('dram', 'nvme'):
        place.parse_bytes(name, given[name])
    _number('max_norm', given['max_norm'], 'a number >= 0; 0 does not clip', lambda value: 0 <= value < math.inf)
    for name in ('step_timeout', 'open_timeout', 'failover_after'):
        _number(name, given[name], 'seconds, more than 0', lambda value: 0 < value < math.inf)


def _check_pin_interval(value: Any, durability: str | None) -> None:
    low, high = (1, _PIN_INTERVAL_MAX) if durability == 'every-K' else (0, 0)
    if not _lies(value, low, high):
        _refuse('pin_interval', value, "the K of durability='every-K', from 1 to 2^32, or 0 with any other durability; durability is "
                                       f'{durability!r}')


def _check_chunk_elements(value: Any) -> None:
    low, high = _CHUNK_ELEMENTS
    if not _lies(value, low, high) or value & (value - 1):
        _refuse('chunk_elements', value, f'a power of two from {low} to {high}')


def groups(name: str, value: Any) -> dict[str, dist.ProcessGroup]:
    """Returns process groups by name of a parameter, from groups or from meshes of one dimension. None: there are none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _refuse(name, value, 'a dict from names of parameters to process groups, or to meshes of one dimension')
    return {key: _group(f'{name}[{key!r}]', each) for key, each in value.items()}


def group(name: str, value: Any) -> dist.ProcessGroup | None:
    """Returns a process group, or that of a mesh of one dimension. None stays None."""
    return None if value is None else _group(name, value)


def _group(name: str, value: Any) -> dist.ProcessGroup:
    found = value.get_group() if hasattr(value, 'get_group') and value.ndim == 1 else value
    if dist.is_available() and found == dist.GroupMember.NON_GROUP_MEMBER:
        raise Error(f"{name}: rank {dist.get_rank()} is not in this process group; make the optimizer only on the group's ranks",
                    'BAD_CONFIG')
    if not dist.is_available() or not isinstance(found, dist.ProcessGroup):
        _refuse(name, value, 'a process group that has this rank, or such a mesh of one dimension')
    return found


def access(tls: Mapping[str, str | os.PathLike[str]] | None, token_file: str | os.PathLike[str] | None,
           servers: Sequence[str]) -> _native.Access:
    """Returns the files that show named servers who this trainer is, and that check who the servers are. None: those of BALLAST_CA,
    BALLAST_CERTIFICATE, BALLAST_KEY and BALLAST_TOKEN_FILE."""
    given = _native.Access()
    if not servers:
        for name, value in (('tls', tls), ('token_file', token_file)):
            if value is not None:
                _refuse(name, value, 'servers too, since an embedded server needs no credentials')
        return given
    for key, path in _tls_files(tls).items():
        setattr(given, key, os.fspath(path))
    if token_file is None:
        token_file = os.environ.get('BALLAST_TOKEN_FILE', '')
    elif not _is_path(token_file):
        _refuse('token_file', token_file, 'a path')
    given.token_file = os.fspath(token_file)
    return given


def _tls_files(tls: Any) -> Mapping[str, str | os.PathLike[str]]:
    """Returns files by field of _native.Access."""
    keys = ('ca', 'certificate', 'key')
    if tls is None:
        return {key: os.environ.get(f'BALLAST_{key.upper()}', '') for key in keys}
    if not isinstance(tls, Mapping) or 'ca' not in tls or not set(tls) <= set(keys) or not all(map(_is_path, tls.values())):
        _refuse('tls', tls, "a dict of paths: 'ca' (the servers' CAs), and both or neither of 'certificate' and 'key'")
    return tls


def addresses(servers: str | Sequence[str] | None) -> list[str]:
    """Returns the state servers of a list, of 'host:port,...' or of 'etcd://host:port/prefix'. None: those of BALLAST_SERVERS, if it is
    set. A URL of etcd may come cut at its commas."""
    name, servers = ('servers', servers) if servers is not None else ('BALLAST_SERVERS', os.environ.get('BALLAST_SERVERS', ''))
    if isinstance(servers, str):
        servers = [server.strip() for server in servers.split(',')] if servers.strip() else []
    if not isinstance(servers, (list, tuple)) or not all(isinstance(server, str) for server in servers):
        _refuse(name, servers, "'host:port,host:port', a list of 'host:port', or 'etcd://host:port/prefix'")
    if why := _native.servers_error(list(servers)):
        raise Error(f'{name}: {why}', 'BAD_CONFIG')
    return list(servers)
