"""Which experts ranks gather: those that tokens of any of them reach."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ballast.errors import Error
from ballast.torch.sharding.sharded import model_of, unit_of
from ballast.torch.sharding.wrapped import fsdp_groups, is_wrapped


def reached_experts(experts: Sequence[nn.Module] | nn.ModuleList, tokens: torch.Tensor) -> list[int]:
    """Returns which experts a forward pass calls, as numbers in `experts`, ascending. Those are the experts that tokens reach on this rank,
    or on another that gathers them with it. Call each of them in this order; one without tokens here with an empty input that wants a
    gradient, as x[:0], whose output goes into the result. It then takes part in its gather and its reduction, with a gradient of zeros. All
    other experts take no part in the step.

    experts: all on the same ranks. tokens: [len(experts)], how many tokens of this rank each one has, or whether it has any.

    COLLECTIVE among ranks that gather the experts together, in each forward pass: they exchange a byte for each expert. Without shard() and
    fully_shard, on one rank, and within gathered() there is nothing to exchange. Waits for `tokens`. Errors: RANK_MISSING, on CPUs with
    shard(), if ranks do not come within the optimizer's step_timeout."""
    if tokens.shape != (len(experts),):
        raise Error(f'reached_experts(): expected tokens of shape [{len(experts)}], a number for each expert; got {list(tokens.shape)}',
                    'BAD_REQUEST')
    first = next(iter(experts), None)
    model = None if first is None else model_of(first)
    is_reached = tokens.detach() > 0
    if first is not None and (model is None or not model.copies):  # with copies a rank may be alone
        is_reached = _together(first, is_reached, 0.0 if model is None else model.timeout)
    reached: list[int] = is_reached.nonzero().flatten().tolist()
    if model is not None and not model.copies:
        units = [unit for unit in (unit_of(experts[i]) for i in reached) if unit is not None and unit.is_expert]
        if torch._C._current_graph_task_id() == -1:
            model.passes.turns.route(units)
        model.pulls.route([unit for unit in units if unit.needs_gather])
    return reached


def _together(expert: nn.Module, is_reached: torch.Tensor, seconds: float) -> torch.Tensor:
    """Returns the experts that are reached on ranks which gather this one together. seconds: how long they may take; 0: as long as the
    process group lets them."""
    if not is_wrapped(expert):
        model = model_of(expert)
        if model is not None and len(model.holders) > 1:
            raise Error(f'reached_experts(): the experts, each a {type(expert).__name__}, are gathered with their block, whole. Make each '
                        'expert a unit: leave out units= of shard(), or name the experts there; or give each to fully_shard', 'BAD_REQUEST')
        return is_reached
    mesh = fsdp_groups(expert)[0].mesh_info
    for name in ('shard_process_group', 'replicate_process_group'):
        group = getattr(mesh, name, None)
        if group is not None and group.size() > 1:
            flags = is_reached.to(torch.uint8)
            _all_reduce(flags, group, seconds)
            is_reached = flags > 0
    return is_reached


def _all_reduce(flags: torch.Tensor, group: dist.ProcessGroup, seconds: float) -> None:
    if flags.is_cuda or seconds == 0:  # NCCL has its own watchdog
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        return
    try:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True).wait(datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        raise Error(f'ranks {dist.get_process_group_ranks(group)} did not all come to reached_experts() within {seconds:g} s '
                    f'(step_timeout), or a connection broke. All ranks must run the same passes. Start all ranks again '
                    f'({str(error).splitlines()[0]})', 'RANK_MISSING') from error
