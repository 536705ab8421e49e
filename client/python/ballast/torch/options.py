"""Ballast's own keyword arguments of an optimizer: their types, defaults and meanings. Add an argument here, and nowhere else: type
checkers, help(), the constructor and the README's table (markdown()) read this page."""
# No `from __future__ import annotations`: the table reads the annotations as objects.

import difflib
import inspect
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Callable, Literal, NamedTuple, Optional, TypedDict, TypeVar, Union, get_type_hints

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    Group = Union[ProcessGroup, DeviceMesh]
else:
    Group = Any  # not every torch has process groups

Path = Union[str, 'os.PathLike[str]']
Bytes = Union[int, str]  # '512MiB', '2GB'
Class = TypeVar('Class', bound=type)


class About(NamedTuple):
    default: Any
    meaning: str  # Markdown, a line
    says: Optional[str] = None  # what the default amounts to, where its value does not tell


class Shared(TypedDict, total=False):
    """The arguments of all optimizers."""
    name: Annotated[str, About('default', "the job's name, one per optimizer: 1 to 128 letters, digits, `.`, `_` or `-`")]
    resume: Annotated[Literal['never', 'auto', 'must'], About(
        'never', "`'never'`: an existing job is an error. `'auto'`: continue the job or create it. `'must'`: a missing job is an error")]
    directory: Annotated[Optional[Path], About(None, "the embedded server's folder, where jobs stay on disk", 'a temporary one')]
    dram: Annotated[Optional[Bytes], About(
        None, "the embedded server's budget of memory: bytes, `'512MiB'`, `'2GB'`", '0.8 of the free memory')]
    nvme: Annotated[Optional[Bytes], About(
        None, "the embedded server's budget of disk, written the same way", '0.8 of the free disk; nothing without a `directory`')]
    servers: Annotated[Union[str, Sequence[str], None], About(
        None, "state servers: `'host:port,host:port'` or a list, with IPv6 as `[::1]:7070`; or `'etcd://host:port/prefix'`. "
        '`BALLAST_SERVERS` sets the same', 'embedded')]
    tls: Annotated[Optional[Mapping[str, Path]], About(
        None, "`{'ca': path, 'certificate': path, 'key': path}`, PEM files: TLS with named servers. The last two show who you are. "
        'Ballast reads the files again when they change. `BALLAST_CA`, `BALLAST_CERTIFICATE` and `BALLAST_KEY` set the same',
        'no TLS')]
    token_file: Annotated[Optional[Path], About(
        None, 'a file with a bearer token for named servers. The token goes only over TLS or loopback. `BALLAST_TOKEN_FILE` sets the same',
        'no token')]
    durability: Annotated[Literal['step', 'every-K', 'none', None], About(
        None, "`'step'`: every decided step survives any crash. `'every-K'`: every K-th step does. `'none'`: the job lives only in memory",
        "`'step'` with a directory or servers, else `'none'`")]
    pin_interval: Annotated[int, About(0, "K of `'every-K'`. The newest K-th step is safe once a later step has begun")]
    checkpoints: Annotated[int, About(2, 'how many `state_dict()`s stay loadable')]
    max_norm: Annotated[float, About(
        0.0, 'clip gradients to this global norm within the update, instead of `clip_grad_norm_`', 'no clipping')]
    overlap: Annotated[Optional[torch.nn.Module], About(
        None, 'the model. Steps then run beside the training loop', '`step()` returns when the update is complete')]
    push_early: Annotated[bool, About(
        False, 'gradients go to the servers, and to their logs, during backward', 'they go within `step()`')]
    tied: Annotated[Optional[Mapping[str, Group]], About(
        None, "by name of the parameter, the process group (or mesh of one dimension) that sums its gradients, where pipeline stages "
        'share one tensor')]
    group: Annotated[Optional[Group], About(
        None, 'the ranks that train the job: a process group, or a mesh of one dimension, that has this rank', 'all ranks')]
    host: Annotated[Optional[str], About(
        None, "this rank's address or name, by which other ranks reach it. `BALLAST_HOST` sets the same",
        "from `GLOO_SOCKET_IFNAME`, else the address towards the process group's store")]
    replicas: Annotated[Optional[int], About(
        None, 'on how many of the servers each chunk is. With `replicas=2` a server may be lost with its disk: training goes on '
        'without it, and others copy its chunks. A job keeps its number, unless an operator changes it '
        "(`ballastctl replicas`). Needs `servers='etcd://...'` and `durability` `'step'` or `'none'`",
        'as the job has it; 1 for a new job')]
    failover_after: Annotated[float, About(
        5.0, 'with `replicas`: how many seconds a server may be silent before the job goes on without it')]
    threads: Annotated[Optional[int], About(
        None, 'how many threads compute an update', 'all processors that the process may use')]
    states: Annotated[Literal['named', 'full', None], About(
        None, "`'full'`: `state_dict()` of a durable job has the moments, so that other jobs and optimizers can load it",
        "`'named'` for a durable job, else `'full'`")]
    master: Annotated[Literal['f32', 'remainder'], About(
        'f32', "`'remainder'`: servers keep of each fp32 master only the bits that the bf16 parameter lacks: 1.875 bytes less a "
        "parameter, with the same results. This needs bf16 parameters, `durability='none'` and servers outside the trainer. `'f32'`: whole "
        'masters; fp32 parameters of a job in memory are their own')]
    seed: Annotated[int, About(0, 'the seed of stochastic rounding. A job keeps its seed')]
    chunk_elements: Annotated[int, About(
        1 << 20, 'how many elements servers update, log and move at once: a power of two from 2^16 to 2^20. A job keeps it', '2^20')]
    step_timeout: Annotated[float, About(
        120.0, 'how many seconds servers may take to answer a call, or to make a step once all ranks came. Ranks also wait this long for '
        'each other')]
    open_timeout: Annotated[float, About(
        30.0, 'how many seconds to wait at opening for servers that are down')]
    debug: Annotated[Optional[bool], About(
        None, 'compare all of each parameter at each step, some 0.1 s per GB: finds every write by `.data`, numpy or DLPack',
        'what the variable `BALLAST_DEBUG` says, 1 or 0; else no')]


class Arguments(Shared, total=False):
    moments: Annotated[Literal['f32', 'bf16', 'i8', 'f8'], About(
        'f32', "the format of moments on servers: `'f32'`, `'bf16'` (stochastically rounded), `'i8'` (as `AdamW8bit`), `'f8'`. Muon's "
        'momentum is always fp32')]


def complete(optimizer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments, with defaults for those not given. Refuses an unknown one as Python does, and suggests a similar name."""
    table = _table(Arguments)
    for name in given:
        if name not in table:
            close = difflib.get_close_matches(name, table, 1)
            hint = f"; did you mean '{close[0]}'?" if close else '; help(ballast.torch.AdamW) lists all'
            raise TypeError(f"{optimizer}() got an unexpected keyword argument '{name}'{hint}")
    return {name: given.get(name, about.default) for name, about in table.items()}


def shown(arguments: type) -> Callable[[Class], Class]:
    """A class decorator. It makes help() and signature() show the arguments instead of the constructor's **ballast."""
    def decorate(cls: Class) -> Class:
        constructor = inspect.getattr_static(cls, '__init__')
        parameters = list(inspect.signature(constructor).parameters.values())
        hints = get_type_hints(arguments)
        own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=about.default, annotation=hints[name])
               for name, about in _table(arguments).items()]
        constructor.__signature__ = inspect.Signature([*parameters[:-1], *own], return_annotation=None)
        lines = [textwrap.fill(f'{name}: {about.meaning}. Default: {_default(about)}', 110, initial_indent=' ' * 4,
                               subsequent_indent=' ' * 8) for name, about in _table(arguments).items()]
        cls.__doc__ = '\n'.join([inspect.cleandoc(cls.__doc__ or ''), '', "Ballast's own keyword arguments:", *lines])
        return cls
    return decorate


def markdown() -> str:
    """Returns the README's table."""
    rows = [f'| `{name}` | {about.meaning} | {_default(about)} |' for name, about in _table(Arguments).items()]
    return '\n'.join(['| argument | meaning | default |', '|---|---|---|', *rows])


def _table(arguments: type) -> dict[str, About]:
    hints = get_type_hints(arguments, include_extras=True)
    return {name: about for name, hint in hints.items() for about in hint.__metadata__}


def _default(about: About) -> str:
    value = repr(int(about.default) if isinstance(about.default, float) else about.default)
    return about.says if about.says is not None and about.default is None else f'`{value}`' + (f': {about.says}' if about.says else '')
