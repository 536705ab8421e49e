"""Checks of Ballast's own arguments to an optimizer's constructor, before anything happens."""

from __future__ import annotations

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


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        if fits(float(value)):
            return float(value)
    except (TypeError, ValueError):
        pass
    return _refuse(name, value, expected)


def flag(name: str, value: Any, variable: str | None = None) -> bool:
    """True or False. None takes the value of the environment's variable, 0 or 1."""
    if value is None and variable is not None:
        said = os.environ.get(variable, '0')
        if said not in ('0', '1'):
            _refuse(variable, said, '0 or 1')
        return said == '1'
    if not isinstance(value, bool):
        _refuse(name, value, f'True, False, or None for {variable}' if variable else 'True or False')
    return value


def check(*, name: Any, durability: Any, pin_interval: Any, checkpoints: Any, chunk_elements: Any, seed: Any, threads: Any, dram: Any,
          nvme: Any, **rest: Any) -> None:
    """`rest`: resume, moments, master and states, max_norm and the time-outs."""
    for key in ('resume', 'moments', 'master'):
        if rest[key] not in _CHOICES[key]:
            _refuse(key, rest[key], 'one of ' + ', '.join(map(repr, _CHOICES[key])))
    if rest['states'] not in _CHOICES['states']:
        _refuse('states', rest['states'], "'named', 'full', or None to choose")
    if durability not in _CHOICES['durability']:
        _refuse('durability', durability, "one of 'step', 'every-K', 'none', or None to choose")
    if not isinstance(name, str) or not _native.is_job_name(name):
        _refuse('name', name, _native.JOB_NAME_RULE)
    if not _integer(pin_interval) or not (
            1 <= pin_interval <= _PIN_INTERVAL_MAX if durability == 'every-K' else pin_interval == 0):
        _refuse('pin_interval', pin_interval, f"the K of durability='every-K', from 1 to 2^32, and 0 with any other; "
                                              f'durability is {durability!r}')
    if not _integer(checkpoints) or checkpoints < 1:
        _refuse('checkpoints', checkpoints, 'at least 1')
    low, high = _CHUNK_ELEMENTS
    if not _integer(chunk_elements) or not low <= chunk_elements <= high or chunk_elements & (chunk_elements - 1):
        _refuse('chunk_elements', chunk_elements, f'a power of two from {low} to {high}')
    if not _integer(seed) or not 0 <= seed < 1 << 64:
        _refuse('seed', seed, 'an integer from 0 to 2^64 - 1')
    if threads is not None and (not _integer(threads) or not 1 <= threads <= place.THREADS_MAX):
        _refuse('threads', threads, f'1 to {place.THREADS_MAX}, or None for all processors')
    place.parse_bytes('dram', dram)
    place.parse_bytes('nvme', nvme)
    _number('max_norm', rest['max_norm'], 'a number >= 0; 0 does not clip', lambda value: 0 <= value < float('inf'))
    for key in ('step_timeout', 'open_timeout'):
        _number(key, rest[key], 'seconds, more than 0', lambda value: 0 < value < float('inf'))


def groups(name: str, value: Any) -> dict[str, dist.ProcessGroup]:
    """Process groups by name of a parameter, of groups or of meshes of one dimension; None: none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _refuse(name, value, 'a dict of process groups, or of meshes of one dimension, by name of the parameter')
    return {key: _group(f'{name}[{key!r}]', each) for key, each in value.items()}


def group(name: str, value: Any) -> dist.ProcessGroup | None:
    """A process group, or that of a mesh of one dimension; None stays None."""
    return None if value is None else _group(name, value)


def _group(name: str, value: Any) -> dist.ProcessGroup:
    found = value.get_group() if hasattr(value, 'get_group') and value.ndim == 1 else value
    if dist.is_available() and found == dist.GroupMember.NON_GROUP_MEMBER:
        raise Error(f'{name}: rank {dist.get_rank()} is not a member of this process group; make the optimizer on its members alone',
                    'BAD_CONFIG')
    if not dist.is_available() or not isinstance(found, dist.ProcessGroup):
        _refuse(name, value, 'a process group that has this rank, or a mesh of one dimension')
    return found


def access(tls: Mapping[str, str | os.PathLike[str]] | None, token_file: str | os.PathLike[str] | None,
           servers: Sequence[str]) -> _native.Access:
    """The files that show named servers who this is, and who they must be. None: those of BALLAST_CA, BALLAST_CERTIFICATE, BALLAST_KEY and
    BALLAST_TOKEN_FILE."""
    given = _native.Access()
    if not servers:
        for name, value in (('tls', tls), ('token_file', token_file)):
            if value is not None:
                _refuse(name, value, 'servers too: an embedded server asks nobody who it is')
        return given
    keys = ('ca', 'certificate', 'key')
    if tls is None:
        tls = {key: os.environ.get(f'BALLAST_{key.upper()}', '') for key in keys}
    elif not isinstance(tls, Mapping) or 'ca' not in tls or not set(tls) <= set(keys) or not all(
            isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in tls.values()):
        _refuse('tls', tls, "a dict of paths: 'ca', the CAs of the servers, and both or neither of 'certificate' and 'key'")
    for key, path in tls.items():
        setattr(given, key, os.fspath(path))
    if token_file is None:
        token_file = os.environ.get('BALLAST_TOKEN_FILE', '')
    elif not isinstance(token_file, (str, os.PathLike)) or not os.fspath(token_file):
        _refuse('token_file', token_file, 'a path')
    given.token_file = os.fspath(token_file)
    return given


def addresses(servers: str | Sequence[str] | None) -> list[str]:
    """The state servers of a list, of 'host:port,...' or 'etcd://host:port/prefix', or, for None, of BALLAST_SERVERS; none if
    nothing is said. A URL of etcd may come cut at its commas."""
    name, servers = ('servers', servers) if servers is not None else ('BALLAST_SERVERS', os.environ.get('BALLAST_SERVERS', ''))
    if isinstance(servers, str):
        servers = [server.strip() for server in servers.split(',')] if servers.strip() else []
    if not isinstance(servers, (list, tuple)) or not all(isinstance(server, str) for server in servers):
        _refuse(name, servers, "'host:port,host:port', a list of 'host:port', or 'etcd://host:port/prefix'")
    if why := _native.servers_error(list(servers)):
        raise Error(f'{name}: {why}', 'BAD_CONFIG')
    return list(servers)
