"""torch.optim's optimizers with their names and arguments, and those of papers. options.py has Ballast's own keyword arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ballast.errors import Error
from ballast.torch import algorithms
from ballast.torch.arguments import flag
from ballast.torch.muon import ADJUSTMENTS, COEFFICIENTS, Orthogonal
from ballast.torch.optimizer import Optimizer
from ballast.torch.options import Arguments, Shared, shown
from ballast.torch.steps.averaging import Averaging

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT
    from typing_extensions import Unpack

    from ballast.torch.steps.assisted import Rule


# Since torch 2.7, groups of its Adam say which kind of weight decay they have. Distributed Checkpoint finds no state without that key.
_TELLS_DECAY = 'decoupled_weight_decay' in inspect.signature(torch.optim.Adam.__init__).parameters


def _refuse(optimizer: str, **flags: Any) -> None:
    for name, value in flags.items():
        if value:
            raise Error(f'{optimizer}({name}=True) is not supported: the update runs on state servers, where autograd does not see it; '
                        'leave it out', 'UNSUPPORTED')


def _check(optimizer: str, **values: tuple[Any, float, float | None]) -> None:
    for name, (given, low, below) in values.items():
        if isinstance(given, str):
            raise TypeError(f'{optimizer}: {name}={given!r} is a string, expected a number: YAML reads 1e-3 as a string, and 1.0e-3 as a '
                            'number')
        value = float(given)
        if not low <= value < (float('inf') if below is None else below):
            expected = f'at least {low} and ' + ('finite' if below is None else f'below {below}')
            raise ValueError(f'{optimizer}: {name}={value}, expected {expected}')


def _betas(optimizer: str, betas: Any, count: int = 2) -> dict[str, tuple[Any, float, float]]:
    try:
        decays = [float(beta) for beta in betas]
    except (TypeError, ValueError):
        decays = []
    if len(decays) != count:
        raise ValueError(f'{optimizer}: betas={betas!r}, expected {"two" if count == 2 else "three"} numbers')
    return {f'beta{k + 1}': (beta, 0, 1) for k, beta in enumerate(betas)}


class _AdamLike(Optimizer):
    def __init__(self, kind: str, params: ParamsT, lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
                 amsgrad: bool, maximize: bool, foreach: bool | None, capturable: bool, differentiable: bool, fused: bool | None,
                 ballast: Arguments) -> None:
        name = type(self).__name__
        _refuse(name, differentiable=differentiable, capturable=capturable)
        _check(name, lr=(lr, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None),
               **_betas(name, betas))
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay, 'amsgrad': amsgrad,
                    'maximize': maximize, 'foreach': foreach, 'capturable': capturable,
                    'differentiable': differentiable, 'fused': fused}
        if _TELLS_DECAY:
            defaults['decoupled_weight_decay'] = kind == 'adamw'
        super().__init__(params, defaults, algorithm=algorithms.Adam(kind), **ballast)


@shown(Arguments)
class AdamW(_AdamLike):
    """torch.optim.AdamW. foreach and fused choose how torch computes; they change nothing here."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
                 **ballast: Unpack[Arguments]) -> None:
        super().__init__('adamw', params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
                         differentiable, fused, ballast)


@shown(Shared)
class AdamW8bit(AdamW):
    """AdamW with 8-bit moments and one scale for each 256 elements (Dettmers et al. 2022): 2 bytes of moments per parameter instead of
    8."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None, **ballast: Unpack[Shared]) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
                         differentiable=differentiable, fused=fused, moments='i8', **ballast)


@shown(Arguments)
class Adam(_AdamLike):
    """torch.optim.Adam. weight_decay is an L2 penalty; with decoupled_weight_decay it works as in AdamW. foreach and fused change nothing
    here."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0, amsgrad: bool = False, *, foreach: bool | None = None, maximize: bool = False,
                 capturable: bool = False, differentiable: bool = False, fused: bool | None = None, decoupled_weight_decay: bool = False,
                 **ballast: Unpack[Arguments]) -> None:
        kind = 'adamw' if flag('decoupled_weight_decay', decoupled_weight_decay) else 'adam'
        super().__init__(kind, params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
                         differentiable, fused, ballast)


@shown(Arguments)
class SGD(Optimizer):
    """torch.optim.SGD. momentum_buffer: the job keeps momentum even if all groups begin with momentum=0. Set it if a schedule raises
    momentum later."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3, momentum: float = 0, dampening: float = 0,
                 weight_decay: float = 0, nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None,
                 differentiable: bool = False, fused: bool | None = None, momentum_buffer: bool = False,
                 **ballast: Unpack[Arguments]) -> None:
        _refuse('SGD', differentiable=differentiable)
        _check('SGD', lr=(lr, 0, None), momentum=(momentum, 0, None),
               weight_decay=(weight_decay, 0, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError('SGD: nesterov needs a momentum and no dampening')
        defaults = {'lr': lr, 'momentum': momentum, 'dampening': dampening, 'weight_decay': weight_decay,
                    'nesterov': nesterov, 'maximize': maximize, 'foreach': foreach, 'differentiable': differentiable,
                    'fused': fused}
        algorithm = algorithms.SGD(flag('momentum_buffer', momentum_buffer))
        super().__init__(params, defaults, algorithm=algorithm, **ballast)


@shown(Arguments)
class Adagrad(Optimizer):
    """torch.optim.Adagrad, for dense gradients."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
                 initial_accumulator_value: float = 0, eps: float = 1e-10, foreach: bool | None = None, *, maximize: bool = False,
                 differentiable: bool = False, fused: bool | None = None,
                 **ballast: Unpack[Arguments]) -> None:
        _refuse('Adagrad', differentiable=differentiable)
        _check('Adagrad', lr=(lr, 0, None), lr_decay=(lr_decay, 0, None), eps=(eps, 0, None),
               weight_decay=(weight_decay, 0, None),
               initial_accumulator_value=(initial_accumulator_value, 0, None))
        defaults = {'lr': lr, 'lr_decay': lr_decay, 'eps': eps, 'weight_decay': weight_decay,
                    'initial_accumulator_value': initial_accumulator_value, 'foreach': foreach, 'maximize': maximize,
                    'differentiable': differentiable, 'fused': fused}
        super().__init__(params, defaults, algorithm=algorithms.Adagrad(), **ballast)


@shown(Arguments)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2), with the defaults of the paper."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, *, maximize: bool = False, **ballast: Unpack[Arguments]) -> None:
        _check('Lion', lr=(lr, 0, None), weight_decay=(weight_decay, 0, None), **_betas('Lion', betas))
        defaults = {'lr': lr, 'betas': betas, 'weight_decay': weight_decay, 'maximize': maximize}
        super().__init__(params, defaults, algorithm=algorithms.Lion(), **ballast)


@shown(Arguments)
class AdEMAMix(Optimizer):
    """AdEMAMix (Pagliardini et al. 2024): AdamW with a second, slow mean of gradients, which counts `alpha` times. betas: of the mean, of
    the squares, of the slow mean.

    t_alpha, t_beta3: over how many steps alpha rises from 0, and the slow mean's decay from betas[0]; None: from the first step as given.
    Steps are the loop's, skipped ones included. The paper takes the number of all steps for both."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
                 alpha: float = 5.0, t_alpha: int | None = None, t_beta3: int | None = None, eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, maximize: bool = False, **ballast: Unpack[Arguments]) -> None:
        _check('AdEMAMix', lr=(lr, 0, None), alpha=(alpha, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None),
               t_alpha=(t_alpha or 0, 0, None), t_beta3=(t_beta3 or 0, 0, None), **_betas('AdEMAMix', betas, 3))
        defaults = {'lr': lr, 'betas': betas, 'alpha': alpha, 't_alpha': t_alpha, 't_beta3': t_beta3, 'eps': eps,
                    'weight_decay': weight_decay, 'maximize': maximize}
        super().__init__(params, defaults, algorithm=algorithms.AdEMAMix(), **ballast)


@shown(Arguments)
class AdamWScheduleFree(Optimizer):
    """AdamWScheduleFree of the package schedulefree (Defazio et al. 2024): a constant learning rate, and for evaluation the average of all
    steps. Parameters hold that average between eval() and train(); an optimizer begins in training.

    A step weighs t**r * lr**weight_lr_power in the average; of lr, only the warm-up counts. Steps are the loop's, skipped ones included.
    Not for a model of shard()."""

    def __init__(self, params: ParamsT, lr: float | torch.Tensor = 0.0025, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0, warmup_steps: int = 0, r: float = 0.0, weight_lr_power: float = 2.0,
                 foreach: bool | None = None, *, maximize: bool = False, **ballast: Unpack[Arguments]) -> None:
        _check('AdamWScheduleFree', lr=(lr, 0, None), eps=(eps, 0, None), weight_decay=(weight_decay, 0, None),
               warmup_steps=(warmup_steps, 0, None), r=(r, 0, None), weight_lr_power=(weight_lr_power, 0, None),
               **_betas('AdamWScheduleFree', betas))
        if not float(betas[0]) > 0:
            raise ValueError(f'AdamWScheduleFree: betas={betas!r}, expected a first one above 0: the average follows from y and z by it')
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay, 'warmup_steps': warmup_steps, 'r': r,
                    'weight_lr_power': weight_lr_power, 'foreach': foreach, 'maximize': maximize}
        super().__init__(params, defaults, algorithm=algorithms.AdamWScheduleFree(), **ballast)
        self._averaging = Averaging()
        self.job.features.append(self._averaging)

    def eval(self) -> None:
        """Parameters become the average of all steps. Call it before evaluation, and before a save of the model for use. All ranks call
        it."""
        self._averaging.eval(self.job)

    def train(self) -> None:
        """Parameters become those of training again. Call it before the next step, and before a save or load of the optimizer's state. All
        ranks call it."""
        self._averaging.train(self.job)


@shown(Arguments)
class Muon(Optimizer):
    """torch.optim.Muon for matrices, and AdamW for the groups that have use_muon=False, as muon_groups(model) makes them. The trainer
    orthogonalises; servers keep master weights and momentum.

    use_muon, betas: of groups without their own. A group of AdamW has eps=1e-8 and weight_decay=1e-2, unless it says otherwise.
    rule: what the trainer computes of matrices; another optimizer of matrices is a subclass with a rule of its own."""
    rule: ClassVar[Rule] = Orthogonal()

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
                 ns_coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7, ns_steps: int = 5,
                 adjust_lr_fn: str | None = None, *, use_muon: bool = True, betas: tuple[float, float] = (0.9, 0.999),
                 **ballast: Unpack[Arguments]) -> None:
        _check('Muon', lr=(lr, 0, None), momentum=(momentum, 0, 1), weight_decay=(weight_decay, 0, None), eps=(eps, 0, None),
               ns_steps=(ns_steps, 0, 100), **_betas('Muon', betas))
        if adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f'Muon: adjust_lr_fn={adjust_lr_fn!r}, expected one of {", ".join(map(repr, ADJUSTMENTS))}')
        defaults = {'lr': lr, 'weight_decay': weight_decay, 'momentum': momentum, 'nesterov': nesterov,
                    'ns_coefficients': ns_coefficients, 'eps': eps, 'ns_steps': ns_steps, 'adjust_lr_fn': adjust_lr_fn,
                    'use_muon': flag('use_muon', use_muon), 'betas': betas, 'amsgrad': False, 'maximize': False}
        super().__init__(params, defaults, algorithm=algorithms.Muon(), rule=self.rule, **ballast)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        if not param_group.get('use_muon', self.defaults['use_muon']):
            param_group = {'eps': 1e-8, 'weight_decay': 1e-2, **param_group}
        super().add_param_group(param_group)
