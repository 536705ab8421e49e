"""A job's parameters in another process than its trainer's: for evaluation while the training goes on."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch import arguments
from ballast.torch.job.naming import unwrapped
from ballast.torch.tensors.kinds import DTYPES, is_sharded
from ballast.torch.tensors.remote import part_of

_BATCH_BYTES = 256 << 20  # on their way into the model
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Reading(NamedTuple):
    """What Reader.read() has read."""
    version: int  # the job's, which counts steps and edits from 0, the initial values
    steps: int  # how many updates the parameters have had
    missing: tuple[str, ...]  # with strict=False: parameters of the model that the job lacks, which stay as they are
    unexpected: tuple[str, ...]  # with strict=False: parameters of the job that the model lacks


class Reader:
    """Reads a job's newest parameters into a model, in another process than the trainer's. The trainer goes on: a reader neither ends its
    session nor holds up its steps. While read() runs, servers keep its version beside the newer ones.

    name: the job's. servers, tls, token_file: as for an optimizer; a server inside a trainer's process cannot be reached. On servers with
    rights, `read` is enough. timeout: how many seconds servers may take to answer a call, and to show one version.

    >>> reader = ballast.torch.Reader('run-1', servers='node-1:7070')  # doctest: +SKIP
    >>> reader.read(model).steps  # doctest: +SKIP
    1200
    """

    def __init__(self, name: str = 'default', *, servers: str | Sequence[str] | None = None,
                 tls: Mapping[str, str | os.PathLike[str]] | None = None, token_file: str | os.PathLike[str] | None = None,
                 timeout: float = 120.0) -> None:
        found = arguments.addresses(servers)
        if not found:
            raise Error('servers: expected those that the trainer names, or BALLAST_SERVERS; no other process reaches a server inside '
                        'the trainer', 'BAD_CONFIG')
        if not 0 < timeout < math.inf:
            raise Error(f'timeout={timeout!r}: expected seconds, more than 0', 'BAD_CONFIG')
        self._timeout = timeout
        self._lock = threading.Lock()
        self._native = _native.Reader.open(name, found, arguments.access(tls, token_file, found), timeout)

    def newest(self) -> int:
        """Returns the job's newest version, and reads nothing."""
        with self._lock:
            return self._native.newest()

    def read(self, model: torch.nn.Module, *, masters: bool = False, strict: bool = True) -> Reading:
        """Copies the job's newest parameters into `model`, by name; all are of one version. Buffers are not the job's, and stay as they
        are.

        masters: read the optimizer's fp32 masters instead, into a model of fp32. strict: refuse a model whose names are not the job's.
        Raises Error, with the parameter's name, before anything is copied. After an error amid the copies, which says so, read again.
        """
        parameters = {unwrapped(name): parameter for name, parameter in model.named_parameters() if parameter.numel() > 0}
        deadline = time.monotonic() + self._timeout
        with self._lock:
            while True:
                try:
                    return self._read(parameters, masters, strict)
                except Error as error:  # servers needed the memory, or the job was dropped
                    if error.reason != 'VERSION_GONE' or time.monotonic() > deadline:
                        raise

    def close(self) -> None:
        """Ends the connections. Further calls raise Error."""
        with self._lock:
            self._native.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, parameters: Mapping[str, torch.nn.Parameter], masters: bool, strict: bool) -> Reading:
        version, steps = self._native.take()
        try:
            shapes = dict(self._native.tensors)
            dtype = 'f32' if masters else self._native.working
            if dtype not in DTYPES.values():
                raise Error(f"the job's working parameters are {dtype}, which readers do not decode; read(model, masters=True) into a "
                            'model of float32', 'UNSUPPORTED')
            missing, unexpected = _compare_names(parameters, shapes, strict)
            there = {name: parameter for name, parameter in parameters.items() if name in shapes}
            for name, parameter in there.items():
                _check(name, parameter, shapes[name], dtype, masters)
            self._copy(there, _TORCH_DTYPES[dtype], masters)
        finally:
            self._native.let_go()
        return Reading(version, steps, missing, unexpected)

    def _copy(self, parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype, masters: bool) -> None:
        copied = False
        for names in _batches(parameters, dtype):
            read = [torch.empty(parameters[name].shape, dtype=dtype, device='cpu') for name in names]
            try:
                self._native.read(names, read, masters)
            except Error as error:
                if not copied:
                    raise
                text = str(error).removesuffix(f' [{error.reason}]')
                raise Error(f'{text}. The model has parameters of several versions now: read again before you use it', error.reason,
                            error.code, error.details) from error
            with torch.no_grad():
                for name, values in zip(names, read):
                    parameters[name].copy_(values)
            copied = True


def _batches(parameters: Mapping[str, torch.nn.Parameter], dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, parameter in parameters.items():
        if names and size >= _BATCH_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += parameter.numel() * dtype.itemsize
    if names:
        yield names


def _compare_names(parameters: Mapping[str, object], shapes: Mapping[str, object],
                   strict: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns what the job lacks, and what the model lacks."""
    missing = tuple(name for name in parameters if name not in shapes)
    unexpected = tuple(name for name in shapes if name not in parameters)
    if not strict or not (missing or unexpected):
        return missing, unexpected
    told = [f'{which} {_listed(names)}' for which, names in (('the job lacks', missing), ('the model lacks', unexpected)) if names]
    raise Error(f"{' and '.join(told)}; expected the trainer's model with the names of its named_parameters(). strict=False reads what "
                'both have', 'TENSORS_DIFFER', details={'missing': '\0'.join(unexpected), 'unknown': '\0'.join(missing)})


def _listed(names: Sequence[str]) -> str:
    more = f' and {len(names) - 4} more' if len(names) > 4 else ''
    return ', '.join(repr(name) for name in names[:4]) + more


def _check(name: str, parameter: torch.nn.Parameter, shape: Sequence[int], dtype: str, masters: bool) -> None:
    if is_sharded(parameter) or part_of(parameter) is not None or parameter.is_meta:
        raise Error(f"parameter '{name}' is a DTensor, lives on servers or is on the meta device; read into a plain model, in memory",
                    'UNSUPPORTED')
    if list(parameter.shape or [1]) != list(shape):
        raise Error(f"parameter '{name}' has shape {list(parameter.shape)}, and the job's has {list(shape)}", 'BAD_SPEC')
    rounds = dtype == 'f32' and not masters and parameter.dtype in DTYPES  # as the trainer rounds it
    if not rounds and parameter.dtype not in (torch.float32, _TORCH_DTYPES[dtype]):
        what = 'masters are' if masters else "the job's is"
        raise Error(f"parameter '{name}' is {parameter.dtype}, and {what} {_TORCH_DTYPES[dtype]}; convert the model to that, or to "
                    'torch.float32', 'BAD_DTYPE')
