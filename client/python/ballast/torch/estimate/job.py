"""Estimates the memory and time that a job would need, before there is a job."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from ballast import _native, place
from ballast.errors import Error
from ballast.torch.estimate import call, config, processes, table
from ballast.torch.estimate.model import Model, look
from ballast.torch.estimate.processes import Job, Row
from ballast.torch.job.spec import own_masters
from ballast.torch.sharding.experts import has_fused, split_experts
from ballast.torch.sharding.shard import _PREFETCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim.optimizer import ParamsT

_PROFILE = 'ballast-profile.yaml'


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a job would need. Sizes are bytes."""
    fits: bool
    text: str  # for people
    step_seconds: float  # 0: not known, without a machine profile
    tiers: list[tuple[str, int]]  # name and bytes of the budgets, of the fullest server; empty if it does not fit
    rank_bytes: int  # a trainer's parameters and gradients, whole
    rank_bytes_sharded: int  # and divided among the ranks
    # The memory of each kind of process, beside what Python, torch and activations take: 'trainer', and 'server' if that is a process of
    # its own. Each counts what it shares with the other, as RSS does. Empty if it does not fit, as all that follow.
    processes: list[tuple[str, int]]
    rows: list[Row]  # what they are made of, and what is on the card and on the disk
    disk: int  # of the fullest server
    card: int  # of a rank, beside activations; 0 without a card
    host: int  # memory of all ranks and one server, if they share a host
    call: str  # the lines of Python that make the job; '' if none fits, or none was asked for


class _Asked(NamedTuple):
    """Arguments of estimate() that may be chosen, and those that are given."""
    optimizer: str
    moments: str
    master: str
    ranks: int
    servers: int
    dram: int | str | None
    nvme: int | str | None
    directory: str | None
    threads: int
    durability: str | None
    pin_interval: int
    chunk_elements: int
    profile: str | None
    amsgrad: bool
    momentum: bool
    frozen: str | None
    working: str | None
    prefetch_bytes: int
    card: int | None
    weights: str | None  # the folder of a configuration, from which shard() reads its weights
    splits: bool  # split_experts() comes before shard()


def estimate(params: torch.nn.Module | ParamsT | str | os.PathLike[str] | Any, *,
             optimizer: Literal['adamw', 'adam', 'sgd', 'adagrad', 'lion', 'muon', 'ademamix', 'adamw_schedule_free'] = 'adamw',
             moments: Literal['f32', 'bf16', 'i8', 'f8'] | None = None, master: Literal['f32', 'remainder'] = 'f32', ranks: int = 1,
             servers: int = 0, dram: int | str | None = None, nvme: int | str | None = None,
             directory: str | os.PathLike[str] | None = None, threads: int | None = None,
             durability: Literal['step', 'every-K', 'none'] | None = None, pin_interval: int = 0,
             chunk_elements: int = 1 << 20, profile: str | None = None, amsgrad: bool = False, momentum: bool = False,
             frozen: Literal['working', 'q8', 'state'] | None = None, working: Literal['f8'] | None = None,
             prefetch_bytes: int = _PREFETCH_BYTES, card: int | str | None = None, dtype: torch.dtype | str | None = None) -> Estimate:
    """Estimates what a model's job would need: the bytes of each tier and process, what limits it, and the time of a step. A server without
    jobs computes it in a temporary directory, and reserves nothing. With a configuration or a card it also chooses the call (`call`).

    params: a model, which may be on the device 'meta', or what an optimizer takes. Or the path of a Hugging Face config.json or of its
        folder, or a configuration of transformers: the model is then made without weights, on the device 'meta'.
    optimizer: 'muon' takes a model's groups from muon_groups(); groups that you give may say use_muon=False.
    moments: None: 'f32', or 'i8' if a call is chosen and only that fits.
    servers: how many state servers there are, all alike. 0: the server inside the trainer, or the one that several ranks share.
    momentum: SGD keeps a buffer.
    frozen: as in shard(), for parameters that want no gradient. Give it for any model of shard(), since servers then keep its parameters.
        None: the optimizer without shard(), whose servers keep nothing of them; if a call is chosen, either.
    working, prefetch_bytes: as in shard(). working needs frozen. Experts count as if tokens reached all of them.
    dram, nvme, threads: of each server, as the arguments of an optimizer.
    profile: a file of `ballastctl iotune`. None: ballast-profile.yaml in the directory, if it is there. Without a profile the estimate has
        no time.
    card: memory of each rank's accelerator, such as '24GiB'. None: ranks compute on CPUs.
    dtype: of a configuration's model. None: as the configuration says, or else float32.
    """
    directory = None if directory is None else os.fspath(directory)
    asked = _Asked(optimizer, moments or 'f32', master, ranks, servers, dram, nvme, directory, threads or place.processors(), durability,
                   pin_interval, chunk_elements, profile, amsgrad, momentum, frozen, working, prefetch_bytes,
                   place.parse_bytes('card', card), config.folder_of(params), False)
    _check(asked)
    if config.is_config(params):
        return _chosen(config.model_of(params, dtype), asked, moments is None, is_ours=True)
    if dtype is not None:
        raise Error(f'dtype={dtype!r}: the model has one; give dtype with a configuration only', 'BAD_CONFIG')
    # Looked at twice, if a call is chosen.
    listed = params if isinstance(params, (torch.nn.Module, torch.Tensor, dict)) else list(cast('Iterable[Any]', params))
    given = cast('torch.nn.Module | ParamsT', listed)
    return _told(look(given, frozen, optimizer), asked) if card is None else _chosen(given, asked, moments is None, is_ours=False)


def _check(asked: _Asked) -> None:
    if asked.servers > 0 and asked.dram is None:
        raise Error(f"servers={asked.servers}: expected the budgets of these servers, such as dram='64GiB'", 'BAD_CONFIG')
    if asked.frozen not in (None, 'working', 'q8', 'state'):
        raise Error(f"frozen={asked.frozen!r}: expected None, or shard()'s 'working', 'q8' or 'state'", 'BAD_CONFIG')
    if asked.working not in (None, 'f8'):
        raise Error(f"working={asked.working!r}: expected None, or shard()'s 'f8'", 'BAD_CONFIG')
    if asked.working is not None and asked.frozen is None:
        raise Error("working='f8' is of shard(): expected frozen too, 'state' for parameters that want no gradient", 'BAD_CONFIG')
    if asked.card is not None and asked.card <= 0:
        raise Error(f"card={asked.card}: expected the memory of a rank's accelerator, such as '24GiB', or None for CPUs", 'BAD_CONFIG')


def _chosen(source: Any, asked: _Asked, may_choose_moments: bool, is_ours: bool) -> Estimate:
    """Chooses the first call that fits. is_ours: the model was made here, and may be changed."""
    model = look(source, asked.frozen, asked.optimizer)
    way = call.way(model, asked.ranks, asked.card, asked.frozen is not None)
    if way.is_sharded:
        asked = asked._replace(frozen=asked.frozen or 'working')
        note = ''
        if isinstance(source, torch.nn.Module) and has_fused(source):
            asked, note = _split(source, asked, is_ours)
        model = look(source, asked.frozen, asked.optimizer)
        way = call.way(model, asked.ranks, asked.card, True)
        way = way._replace(text=way.text + note)
        model = model._replace(needs_values=model.needs_values and asked.weights is None)
    if asked.nvme is not None and asked.directory is None and asked.servers == 0:
        asked = asked._replace(directory='state')
    tried = []
    for one in _candidates(asked, may_choose_moments):
        told = _told(model._replace(units=list(way.units)), one)
        if told.fits and not way.short:
            given = one._asdict()
            lines = call.lines(given, way)
            return dataclasses.replace(told, call=lines, text=f'{way.text}\n{call.shown(lines, given, way)}\n{told.text}')
        tried.append(told)
    return dataclasses.replace(tried[0], fits=False, text='\n'.join(filter(None, (way.text, way.short, tried[0].text))))


def _split(model: torch.nn.Module, asked: _Asked, is_ours: bool) -> tuple[_Asked, str]:
    """Splits fused experts, if it may. Returns what is asked then, and what to say."""
    asked = asked._replace(weights=None)  # of which transformers stacks most, and shard(weights=) reads no stacked ones
    whole = '\nThe model has fused experts, which a rank gathers with their block, all of them'
    if not is_ours:
        return asked, f'{whole}. To gather one at a time, call ballast.torch.split_experts(model) before estimate() and shard().'
    try:
        split_experts(model)
    except Error as error:
        return asked, f'{whole}: {error}'
    return asked._replace(splits=True), '\nIts experts are split, so that a rank gathers one at a time, and only those that tokens reach.'


def _candidates(asked: _Asked, may_choose_moments: bool) -> list[_Asked]:
    """Returns what to try, the best first."""
    lasts = asked.directory is not None or asked.servers > 0
    durabilities = ['step', 'none'] if lasts and asked.durability is None else [asked.durability]
    moments = ['f32', 'i8'] if may_choose_moments and asked.optimizer in ('adamw', 'adam', 'lion') else [asked.moments]
    return [asked._replace(durability=durability, moments=each) for durability in durabilities for each in moments]


def _told(model: Model, asked: _Asked) -> Estimate:
    """Estimates one job."""
    keeps, options = _options(model, asked)
    dram, nvme = place.budgets(_disk(asked.directory), asked.dram, asked.nvme)
    told = _native.estimate(model.tensors, options, dram, nvme, asked.threads, asked.servers,
                            _profile_in(asked.directory) if asked.profile is None else asked.profile, keeps)
    job = Job(asked.ranks, asked.servers, asked.frozen is not None, asked.card is not None, not keeps and options.durability == 'none',
              asked.prefetch_bytes, asked.chunk_elements, asked.working is not None)
    rows = processes.rows(told, model, job)
    memory, disk, card = (processes.totals(rows, where) for where in ('memory', 'disk', 'card'))
    return Estimate(told.fits, told.text + table.of(rows, job, model.elements), told.step_seconds, told.tiers, told.rank_bytes,
                    told.rank_bytes_sharded, sorted(memory.items(), reverse=True), rows, sum(disk.values()), sum(card.values()),
                    processes.on_a_host(rows, job.ranks), '')


def _options(model: Model, asked: _Asked) -> tuple[bool, _native.OpenOptions]:
    """Returns whether servers keep parameters, and the job's options."""
    options, spec = _native.OpenOptions(), _native.Optimizer()
    assists = asked.optimizer == 'muon'
    spec.kind = 'adamw' if assists else asked.optimizer
    spec.moments, spec.master, spec.amsgrad, spec.momentum = asked.moments, asked.master, asked.amsgrad, asked.momentum
    spec.gradient, spec.working = model.dtype, asked.working or model.dtype
    options.group_count, options.world_size = model.group_count, asked.ranks
    options.chunk_elements, options.pin_interval = asked.chunk_elements, asked.pin_interval
    options.durability = asked.durability or ('step' if asked.directory is not None or asked.servers > 0 else 'none')
    # All do, but for the one inside a trainer that has them.
    keeps = asked.servers > 0 or asked.ranks > 1 or asked.frozen is not None
    if not keeps and not assists and options.durability == 'none' and asked.card is None and own_masters(spec, model.parameters):
        spec.master = 'lent'
    options.optimizer = spec
    return keeps, options


def _disk(directory: str | os.PathLike[str] | None) -> str | None:
    """Returns the folder, or the nearest one above it that exists: its disk is the one that would be used."""
    path = place.parse_directory(directory)
    while path is not None and not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _profile_in(directory: str | os.PathLike[str] | None) -> str:
    """Returns the path of a profile in the directory. '': there is none."""
    path = '' if directory is None else os.path.join(directory, _PROFILE)
    return path if os.path.exists(path) else ''
