"""torch.optim's optimizers by their names and arguments, and Lion. Keyword arguments of Ballast: see Optimizer."""

from ballast import _native
from ballast.errors import Error
from ballast.torch.arguments import flag
from ballast.torch.optimizer import Optimizer


def _refuse(optimizer, **flags):
    for name, value in flags.items():
        if value:
            raise Error(f'{optimizer}({name}=True) is not supported: the update runs on state servers, outside of '
                        "autograd's sight; leave it out", 'UNSUPPORTED')


def _check(optimizer, **values):
    for name, (value, low, below) in values.items():
        if not low <= value < (float('inf') if below is None else below):
            expected = f'at least {low} and ' + ('finite' if below is None else f'below {below}')
            raise ValueError(f'{optimizer}: {name}={value}, expected {expected}')


def _betas(optimizer, betas):
    try:
        beta1, beta2 = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        raise ValueError(f'{optimizer}: betas={betas!r}, expected two numbers') from None
    return {'beta1': (beta1, 0, 1), 'beta2': (beta2, 0, 1)}


def _adam_hyper(group):
    hyper = _native.GroupHyper()
    hyper.learning_rate = float(group['lr'])
    hyper.beta1, hyper.beta2 = (float(beta) for beta in group['betas'])
    hyper.epsilon = float(group['eps'])
    hyper.weight_decay = float(group['weight_decay'])
    hyper.maximize = bool(group['maximize'])
    return hyper


class _AdamLike(Optimizer):
    def __init__(self, kind, params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
                 differentiable, fused, ballast):
        name = type(self).__name__
        _refuse(name, differentiable=differentiable, capturable=capturable)
        _check(name, lr=(float(lr), 0, None), eps=(float(eps), 0, None), weight_decay=(float(weight_decay), 0, None),
               **_betas(name, betas))
        defaults = {'lr': lr, 'betas': betas, 'eps': eps, 'weight_decay': weight_decay, 'amsgrad': amsgrad,
                    'maximize': maximize, 'foreach': foreach, 'capturable': capturable,
                    'differentiable': differentiable, 'fused': fused}
        super().__init__(params, defaults, kind=kind, **ballast)

    def _spec(self, group):
        return {'amsgrad': bool(group['amsgrad'])}

    def _hyper(self, group):
        return _adam_hyper(group)


class AdamW(_AdamLike):
    """torch.optim.AdamW. foreach and fused say how torch computes, and change nothing here."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *,
                 maximize=False, foreach=None, capturable=False, differentiable=False, fused=None, **ballast):
        super().__init__('adamw', params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
                         differentiable, fused, ballast)


class AdamW8bit(AdamW):
    """AdamW with moments of 8 bits, one scale per 256 elements (Dettmers et al. 2022): 2 bytes of moments per parameter
    instead of 8."""

    def __init__(self, params, *args, **kwargs):
        super().__init__(params, *args, moments='i8', **kwargs)


class Adam(_AdamLike):
    """torch.optim.Adam: weight_decay is an L2 penalty."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, *,
                 foreach=None, maximize=False, capturable=False, differentiable=False, fused=None, **ballast):
        super().__init__('adam', params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
                         differentiable, fused, ballast)


class SGD(Optimizer):
    """torch.optim.SGD. momentum_buffer: the job keeps momentum also if all groups begin with a momentum of 0, which a schedule raises."""

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, maximize=False,
                 foreach=None, differentiable=False, fused=None, momentum_buffer=False, **ballast):
        _refuse('SGD', differentiable=differentiable)
        _check('SGD', lr=(float(lr), 0, None), momentum=(float(momentum), 0, None),
               weight_decay=(float(weight_decay), 0, None))
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError('SGD: nesterov needs a momentum and no dampening')
        defaults = {'lr': lr, 'momentum': momentum, 'dampening': dampening, 'weight_decay': weight_decay,
                    'nesterov': nesterov, 'maximize': maximize, 'foreach': foreach, 'differentiable': differentiable,
                    'fused': fused}
        self._momentum_buffer = flag('momentum_buffer', momentum_buffer)
        super().__init__(params, defaults, kind='sgd', **ballast)

    def _spec(self, group):
        return {'momentum': float(group['momentum']) != 0 or self._momentum_buffer, 'nesterov': bool(group['nesterov'])}

    def _hyper(self, group):
        if float(group['momentum']) == 0 and float(group['dampening']) != 0 and self._options.optimizer.momentum:
            raise Error(f"SGD: a group has momentum=0 and dampening={group['dampening']} in a job that keeps momentum: its buffer would not "
                        'begin as torch\'s does once momentum is raised; give that group dampening=0', 'BAD_SPEC')
        hyper = _native.GroupHyper()
        hyper.learning_rate = float(group['lr'])
        hyper.beta1 = float(group['momentum'])
        hyper.dampening = float(group['dampening'])
        hyper.weight_decay = float(group['weight_decay'])
        hyper.maximize = bool(group['maximize'])
        return hyper


class Adagrad(Optimizer):
    """torch.optim.Adagrad, for dense gradients."""

    def __init__(self, params, lr=1e-2, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10,
                 foreach=None, *, maximize=False, differentiable=False, fused=None, **ballast):
        _refuse('Adagrad', differentiable=differentiable)
        _check('Adagrad', lr=(float(lr), 0, None), lr_decay=(float(lr_decay), 0, None), eps=(float(eps), 0, None),
               weight_decay=(float(weight_decay), 0, None),
               initial_accumulator_value=(float(initial_accumulator_value), 0, None))
        defaults = {'lr': lr, 'lr_decay': lr_decay, 'eps': eps, 'weight_decay': weight_decay,
                    'initial_accumulator_value': initial_accumulator_value, 'foreach': foreach, 'maximize': maximize,
                    'differentiable': differentiable, 'fused': fused}
        super().__init__(params, defaults, kind='adagrad', **ballast)

    def _hyper(self, group):
        hyper = _native.GroupHyper()
        hyper.learning_rate = float(group['lr'])
        hyper.learning_rate_decay = float(group['lr_decay'])
        hyper.initial_accumulator = float(group['initial_accumulator_value'])
        hyper.epsilon = float(group['eps'])
        hyper.weight_decay = float(group['weight_decay'])
        hyper.maximize = bool(group['maximize'])
        return hyper


class Lion(Optimizer):
    """Lion (Chen et al. 2023, algorithm 2), with its paper's defaults."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, **ballast):
        _check('Lion', lr=(float(lr), 0, None), weight_decay=(float(weight_decay), 0, None), **_betas('Lion', betas))
        defaults = {'lr': lr, 'betas': betas, 'weight_decay': weight_decay, 'maximize': maximize}
        super().__init__(params, defaults, kind='lion', **ballast)

    def _hyper(self, group):
        hyper = _native.GroupHyper()
        hyper.learning_rate = float(group['lr'])
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group['betas'])
        hyper.weight_decay = float(group['weight_decay'])
        hyper.maximize = bool(group['maximize'])
        return hyper
