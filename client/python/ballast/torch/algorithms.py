"""Update rules as servers know them: the options of a job, and the hyper-parameters of each group at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ballast import _native
from ballast.errors import Error


class Algorithm:
    """An update rule. kind: the servers' name of it."""

    kind: str
    may_assist = False  # assists() is true of some groups
    state_name: str  # torch's name of what they keep

    @property
    def name(self) -> str:
        """What messages and exports call it."""
        return self.kind

    def spec(self, group: dict[str, Any]) -> dict[str, bool]:
        """Returns the fields of _native.Optimizer that a param_group asks for. A job keeps them for life."""
        return {}

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        """Returns the hyper-parameters of a param_group. spec: the job's. step: of the loop, from 1."""
        hyper = _native.GroupHyper()
        hyper.learning_rate = float(group['lr'])
        hyper.weight_decay = float(group['weight_decay'])
        hyper.maximize = bool(group['maximize'])
        return hyper

    def assists(self, group: dict[str, Any]) -> bool:
        """Servers cannot compute this param_group's updates, so the trainer does, see steps/assisted.py."""
        return False

    def state_hyper(self, group: dict[str, Any]) -> _native.GroupHyper:
        """Returns the hyper-parameters of the state of an assisted param_group. Servers make SGD steps of it, by the gradients."""
        raise NotImplementedError


def hypers(algorithm: Algorithm, groups: Sequence[dict[str, Any]], spec: _native.Optimizer, count: int,
           step: int) -> list[_native.GroupHyper]:
    """Returns the hyper-parameters of a job's `count` groups. groups: the param_groups. spec: the job's. step: of the loop, from 1."""
    found = [algorithm.hyper(group, spec, step) for group in groups]
    found += found[:1] * (count - len(found))
    for g, group in enumerate(groups):
        if algorithm.assists(group):
            found[state_group(g, count)] = algorithm.state_hyper(group)
    return found


def state_group(g: int, count: int) -> int:
    """Returns which of a job's `count` groups has the states of the assisted param_group `g`: one of the second half."""
    return count // 2 + g


class Adam(Algorithm):
    """kind: 'adam' or 'adamw'."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def spec(self, group: dict[str, Any]) -> dict[str, bool]:
        return {'amsgrad': bool(group['amsgrad'])}

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        hyper = super().hyper(group, spec, step)
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group['betas'])
        hyper.epsilon = float(group['eps'])
        return hyper


class SGD(Algorithm):
    kind = 'sgd'

    def __init__(self, momentum_buffer: bool) -> None:
        """momentum_buffer: the job keeps momentum even if no group has any."""
        self._momentum_buffer = momentum_buffer

    def spec(self, group: dict[str, Any]) -> dict[str, bool]:
        return {'momentum': float(group['momentum']) != 0 or self._momentum_buffer, 'nesterov': bool(group['nesterov'])}

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        if float(group['momentum']) == 0 and float(group['dampening']) != 0 and spec.momentum:
            raise Error(f"SGD: a group has momentum=0 and dampening={group['dampening']} in a job that keeps momentum. If the momentum "
                        "rose later, its buffer would not begin as torch's does. Give that group dampening=0", 'BAD_SPEC')
        hyper = super().hyper(group, spec, step)
        hyper.beta1 = float(group['momentum'])
        hyper.dampening = float(group['dampening'])
        return hyper


class Adagrad(Algorithm):
    kind = 'adagrad'

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        hyper = super().hyper(group, spec, step)
        hyper.learning_rate_decay = float(group['lr_decay'])
        hyper.initial_accumulator = float(group['initial_accumulator_value'])
        hyper.epsilon = float(group['eps'])
        return hyper


class Lion(Algorithm):
    kind = 'lion'

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        hyper = super().hyper(group, spec, step)
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group['betas'])
        return hyper


class AdEMAMix(Algorithm):
    kind = 'ademamix'

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        hyper = super().hyper(group, spec, step)
        hyper.beta1, hyper.beta2, beta3 = (float(beta) for beta in group['betas'])
        hyper.epsilon = float(group['eps'])
        hyper.alpha = float(group['alpha']) * _part(step, group['t_alpha'])
        hyper.beta3 = _warmed(hyper.beta1, beta3, _part(step, group['t_beta3']))
        return hyper


def _part(step: int, warmup: int | None) -> float:
    """Returns which part of a warm-up is done. warmup: its steps; None: there is none."""
    return 1.0 if warmup is None or step >= warmup else step / warmup


def _warmed(first: float, last: float, part: float) -> float:
    """Returns the decay with this part of the way from `first` to `last` done. The half-life, -ln(2) / ln(decay), grows evenly
    (Pagliardini et al. 2024, section 3)."""
    if part == 1.0:
        return last
    life = (1 - part) * _life(first) + part * _life(last)
    return min(math.exp(-1 / life), last) if life > 0 else 0.0


def _life(decay: float) -> float:
    return -1 / math.log(decay) if decay > 0 else 0.0


class AdamWScheduleFree(Algorithm):
    kind = 'adamw_schedule_free'

    def __init__(self) -> None:
        self._averages: dict[tuple[int, float, float], _Average] = {}

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        hyper = super().hyper(group, spec, step)
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group['betas'])
        hyper.epsilon = float(group['eps'])
        key = int(group['warmup_steps']), float(group['r']), float(group['weight_lr_power'])
        hyper.learning_rate *= _part(step, key[0])
        hyper.average = self._averages.setdefault(key, _Average(*key)).share(step)
        return hyper


class _Average:
    """The weights of steps in a schedule-free optimizer's average: t^r times the learning rate's power. It counts on what the rate was as a
    part of the present one, so a job that goes on needs no more than its number of steps."""

    def __init__(self, warmup: int, r: float, power: float) -> None:
        self._warmup, self._r, self._power = warmup, r, power
        self._step, self._weight, self._sum = 0, 0.0, 0.0

    def share(self, step: int) -> float:
        """Returns the part that a step has of the average of all steps up to it."""
        if step < self._step:  # a rollback
            self._step, self._sum = 0, 0.0
        while self._step < step:
            self._step += 1
            self._weight = self._step**self._r * _part(self._step, self._warmup)**self._power
            self._sum += self._weight
        return self._weight / self._sum


class Muon(Adam):
    """Matrices get Muon, the others AdamW."""
    may_assist, state_name = True, 'momentum_buffer'

    def __init__(self) -> None:
        super().__init__('adamw')

    @property
    def name(self) -> str:
        return 'muon'

    def spec(self, group: dict[str, Any]) -> dict[str, bool]:
        return {} if self.assists(group) else super().spec(group)

    def hyper(self, group: dict[str, Any], spec: _native.Optimizer, step: int) -> _native.GroupHyper:
        return Algorithm.hyper(self, group, spec, step) if self.assists(group) else super().hyper(group, spec, step)

    def assists(self, group: dict[str, Any]) -> bool:
        return bool(group['use_muon'])

    def state_hyper(self, group: dict[str, Any]) -> _native.GroupHyper:
        # The running mean m + (1 - momentum) * (g - m), as an SGD step with a weight decay of 1 along -g.
        hyper = _native.GroupHyper()
        hyper.learning_rate, hyper.weight_decay = 1 - float(group['momentum']), 1.0
        hyper.maximize = True
        return hyper
