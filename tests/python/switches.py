"""What test_switches.py runs: the public surface as operations, and torch's process-wide switches around each call of it."""
import contextlib
import json
import os
import shutil
import traceback
import warnings

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ballast
import ballast.torch as bt
from ballast import embedded


class _Passing(TorchFunctionMode):
    """Sees every function of torch, and changes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _set(switch, value, before):
    switch(value)
    try:
        yield
    finally:
        switch(before)


@contextlib.contextmanager
def _warnings_raise():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


def _within(context):
    """`call`, within context()."""
    def around(call):
        with context():
            return call()
    return around


def _compiled(call):
    return torch.compile(call, backend='eager')()


def _default_device(device):
    return _within(lambda: _set(torch.set_default_device, device, None))


# Each takes a function and calls it. `none` is what the others are compared with.
SWITCHES = {
    'default dtype float64': _within(lambda: _set(torch.set_default_dtype, torch.float64, torch.float32)),
    'default dtype bfloat16': _within(lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32)),
    'default dtype float16': _within(lambda: _set(torch.set_default_dtype, torch.float16, torch.float32)),
    'default device meta': _default_device('meta'),
    'default device cpu': _default_device('cpu'),
    'device context meta': _within(lambda: torch.device('meta')),
    'flush denormal': _within(lambda: _set(torch.set_flush_denormal, True, False)),
    'deterministic algorithms': _within(lambda: _set(torch.use_deterministic_algorithms, True, False)),
    'inference_mode': _within(torch.inference_mode),
    'no_grad': _within(torch.no_grad),
    'enable_grad': _within(torch.enable_grad),
    'grad enabled False': _within(lambda: torch.set_grad_enabled(False)),
    'anomaly mode': _within(torch.autograd.detect_anomaly),
    'torch.compile': _compiled,
    'torch function mode': _within(_Passing),
    'one thread': _within(lambda: _set(torch.set_num_threads, 1, torch.get_num_threads())),
    'autocast': _within(lambda: torch.autocast('cpu', torch.bfloat16)),
    'warnings are errors': _within(_warnings_raise),
}


# In CI those alone that no other covers.
if os.environ.get('TEST_ROUNDS') == 'ci':
    for _same in ('grad enabled False', 'enable_grad', 'default device cpu', 'device context meta'):
        del SWITCHES[_same]


def _always(set_it):
    """Of a process of its own: set before anything else, and never taken back."""
    def around(call):
        set_it()
        return call()
    return around


# Set before there is a server, whose threads have what their maker had.
FRESH = {
    'flush denormal before the first server': _always(lambda: torch.set_flush_denormal(True)),
    'default dtype and device before the first server': _always(
        lambda: (torch.set_default_dtype(torch.bfloat16), torch.set_default_device('meta'))),
}


def _values(count, seed, dtype=torch.float32):
    """Normal numbers, denormals and zeros; the same under any switch."""
    generator = torch.Generator('cpu').manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float32, device='cpu')
    bits = torch.randint(1, 1 << 20, (count,), generator=generator, dtype=torch.int32, device='cpu')
    values = torch.where(torch.arange(count, device='cpu') % 3 == 1, bits.view(torch.float32), values)
    values[::7] = 0
    return values.to(dtype)


def _normal(shape, seed):
    """For the script's own arithmetic, which some switches change for denormals."""
    return torch.randn(shape, generator=torch.Generator('cpu').manual_seed(seed), dtype=torch.float32, device='cpu') * 0.1


class Surface:
    """A durable fp32 job, one of bf16 that is not, and what else the operations share. call(f): f() under the switch; what is outside
    of it is the script's own arithmetic."""

    def __init__(self, call, folder):
        self.call, self.folder = call, folder
        self.weight, self.bias = nn.Parameter(_values(600, 1).reshape(20, 30)), nn.Parameter(_values(30, 2))
        self.half = [nn.Parameter(_values(512, 3, torch.bfloat16)), nn.Parameter(_values(40, 4, torch.bfloat16))]
        self.optimizer = self.other = self.saved = None
        self.version = self.late = None

    def gradients(self, seed):
        for i, parameter in enumerate((self.weight, self.bias, *self.half)):
            parameter.grad = _values(parameter.numel(), 10 * seed + i, parameter.dtype).reshape(parameter.shape)

    def parameters(self):
        return [parameter.detach().clone() for parameter in (self.weight, self.bias, *self.half)]

    def make(self, params, **more):
        arguments = {'lr': 1e-3, 'directory': self.folder, 'dram': '128MiB', 'nvme': '1GiB', 'threads': 2}
        return self.call(lambda: bt.AdamW(params, **{**arguments, **more}))


OPERATIONS = {}


def operation(function):
    """Of the surface: what it returns is the same under every switch. They run in the order in which they are here."""
    OPERATIONS[function.__name__] = function
    return function


@operation
def construct(on):
    on.optimizer = on.make([('weight', on.weight), ('bias', on.bias)])
    on.other = on.call(lambda: bt.SGD(on.half, lr=1e-2, momentum=0.9, name='half', durability='none'))
    return len(on.optimizer.param_groups)


@operation
def resume(on):
    return tuple(on.call(on.optimizer.resume)), tuple(on.call(on.other.resume))


@operation
def step(on):
    for i in range(3):
        on.gradients(i)
        on.call(on.optimizer.step)
        on.call(lambda: on.other.step(blob=b'here'))
    return on.parameters(), on.call(on.other.resume).blob


@operation
def closure(on):
    def closure():
        on.gradients(20)
        return 0.5
    return on.call(lambda: on.optimizer.step(closure)), on.parameters()


@operation
def norms(on):
    return on.call(lambda: (on.optimizer.grad_norm, on.optimizer.last_step_skipped, on.other.grad_norm))


@operation
def stats(on):
    return on.call(on.optimizer.stats)['steps']


@operation
def many_steps(on):
    """Beyond what bf16 counts."""
    parameter = nn.Parameter(_values(8, 5))
    optimizer = on.call(lambda: bt.SGD([parameter], lr=1e-3, momentum=0.5, name='many', durability='none'))
    def steps():
        for _ in range(257):
            optimizer.step()
    parameter.grad = _values(8, 6)
    on.call(steps)
    state = on.call(lambda: dict(optimizer.state[parameter]))
    full = on.call(optimizer.full_state_dict)
    on.call(optimizer.close)
    assert state['step'] == 257
    return state, full['state'][0]['step'], parameter.detach()


@operation
def state(on):
    return [on.call(lambda optimizer=optimizer, p=p: dict(optimizer.state[p])) for optimizer, p in
            ((on.optimizer, on.weight), (on.optimizer, on.bias), (on.other, on.half[0]))]


@operation
def state_dict(on):
    on.saved = on.call(on.optimizer.state_dict)
    assert not any(group['ballast'].is_inference() for group in on.saved['param_groups'])
    return _of_any_job(on.saved), _of_any_job(on.call(on.other.state_dict))


def _of_any_job(state):
    """Without what differs between two jobs of one name."""
    groups = []
    for group in state['param_groups']:
        said = json.loads(bytes(group['ballast'].tolist())) if 'ballast' in group else {}
        groups.append({**group, 'ballast': {key: value for key, value in said.items() if key not in ('life', 'decided_by')}})
    return {**state, 'param_groups': groups}


@operation
def full_state_dict(on):
    return on.call(on.optimizer.full_state_dict), on.call(on.other.full_state_dict)


@operation
def edits(on):
    with torch.no_grad():
        on.weight[0].copy_(_values(30, 7))
        on.half[0][::3].copy_(_values(512, 17, torch.bfloat16)[::3])
    on.gradients(31)
    on.call(on.optimizer.step)
    on.call(on.other.step)
    return on.parameters(), on.call(on.other.full_state_dict)['state'][0]['master']


@operation
def sync_from_params(on):
    on.bias.data[:5] = 2
    on.call(on.optimizer.sync_from_params)
    on.gradients(32)
    on.call(on.optimizer.step)
    return on.parameters()


@operation
def versions(on):
    on.version = on.call(on.optimizer.versions)[-1]
    return on.version


@operation
def rollback(on):
    on.call(lambda: on.optimizer.rollback(on.version))
    return on.parameters()


@operation
def load_state_dict(on):
    on.gradients(33)
    on.call(on.optimizer.step)
    on.call(lambda: on.optimizer.load_state_dict(on.saved))
    before = on.parameters()
    on.gradients(34)
    on.call(on.optimizer.step)
    return before, on.parameters()


@operation
def load_full(on):
    full = on.call(on.other.full_state_dict)
    on.gradients(35)
    on.call(on.other.step)
    on.call(lambda: on.other.load_state_dict(full))
    on.gradients(36)
    on.call(on.other.step)
    return on.parameters(), on.call(on.other.full_state_dict)


@operation
def load_torch(on):
    parameter = nn.Parameter(_values(64, 8))
    saved = {'state': {0: {'step': torch.tensor(300.0, dtype=torch.float32, device='cpu'), 'exp_avg': _values(64, 9),
                           'exp_avg_sq': _values(64, 10).abs()}},
             'param_groups': torch.optim.AdamW([parameter], lr=1e-3).state_dict()['param_groups']}
    optimizer = on.make([parameter], name='theirs', durability='none')
    on.call(lambda: optimizer.load_state_dict(saved))
    parameter.grad = _values(64, 11)
    on.call(optimizer.step)
    found = on.call(lambda: dict(optimizer.state[parameter]))
    on.call(optimizer.close)
    return parameter.detach(), found


@operation
def export_import(on):
    folder = on.folder + '-export'
    shutil.rmtree(folder, ignore_errors=True)
    on.call(lambda: bt.export_state(on.optimizer, folder))
    weight, bias = nn.Parameter(on.weight.detach().clone()), nn.Parameter(on.bias.detach().clone())
    optimizer = on.make([('weight', weight), ('bias', bias)], name='imported', durability='none')
    on.call(lambda: bt.import_state(optimizer, folder))
    on.gradients(37)
    weight.grad, bias.grad = on.weight.grad, on.bias.grad
    on.call(optimizer.step)
    full = on.call(optimizer.full_state_dict)
    on.call(optimizer.close)
    return weight.detach(), bias.detach(), full, sorted(os.listdir(folder))


@operation
def add_param_group(on):
    late = on.late = nn.Parameter(_values(50, 12))
    on.call(lambda: on.optimizer.add_param_group({'params': [('late', late)], 'lr': 0.1}))
    on.gradients(38)
    late.grad = _values(50, 13)
    on.call(on.optimizer.step)
    return late.detach(), on.parameters(), on.call(lambda: dict(on.optimizer.state[late]))


@operation
def skipped(on):
    on.gradients(39)
    on.half[0].grad[3] = float('inf')
    on.call(lambda: _under_scale(on.other))
    return on.other.last_step_skipped, on.parameters()


def _under_scale(optimizer):
    with optimizer.gradient_scale(0.5):
        optimizer.step()


@operation
def max_norm(on):
    parameter = nn.Parameter(_values(300, 14))
    optimizer = on.make([parameter], name='clipped', durability='none', max_norm=0.1)
    parameter.grad = _values(300, 15)
    on.call(optimizer.step)
    norm = on.call(lambda: optimizer.grad_norm)
    on.call(optimizer.close)
    return parameter.detach(), norm


@operation
def loss_scaler(on):
    scaler = on.call(lambda: bt.LossScaler(init_scale=1024.0, growth_interval=2))
    loss = on.call(lambda: scaler.scale(torch.full((), 3.0, dtype=torch.float32, device='cpu')))
    for i in range(2):
        on.gradients(40 + i)
        if i == 0:
            on.call(lambda: scaler.unscale_(on.other))
        on.call(lambda: scaler.step(on.other))
        on.call(scaler.update)
    saved = on.call(scaler.state_dict)
    on.call(lambda: scaler.load_state_dict(saved))
    return loss, saved, scaler.get_scale(), on.parameters()


@operation
def zero_grad(on):
    on.gradients(50)
    on.call(lambda: on.optimizer.zero_grad(set_to_none=False))
    zeros = on.weight.grad.clone()
    on.call(on.optimizer.zero_grad)
    return zeros, on.weight.grad is None


@operation
def estimate(on):
    with torch.device('meta'):
        model = nn.Linear(100, 100, dtype=torch.float32)
    found = on.call(lambda: ballast.estimate(model, dram='8GiB', nvme=0, threads=2))
    return found.text, found.fits, found.tiers


def _net():
    net = nn.Sequential(*[nn.Linear(16, 16, device='cpu', dtype=torch.float32) for _ in range(3)])
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(_normal(parameter.shape, 60 + i))
    return net


@operation
def overlap(on):
    """The forward pass that waits is under the switch, too; its own arithmetic may not be the same there."""
    net = _net()
    optimizer = on.make(list(net.named_parameters()), name='overlapped', durability='none', overlap=net)
    for i in range(3):
        for j, parameter in enumerate(net.parameters()):
            parameter.grad = _values(parameter.numel(), 70 + 10 * i + j).reshape(parameter.shape)
        on.call(optimizer.step)
        x = _normal((4, 16), 80 + i)
        with contextlib.suppress(RuntimeError):  # of dtypes that do not go together, and of torch.compile in overlap
            on.call(lambda x=x: net(x))
    on.call(optimizer.wait)
    found = [parameter.detach().clone() for parameter in net.parameters()]
    on.call(optimizer.close)
    return found


@operation
def push_early(on):
    """Backward is not under the switch: its hooks are, where the switch is the process's own."""
    net = _net()
    optimizer = on.make(list(net.named_parameters()), name='early', push_early=True)
    for i in range(3):
        net(_normal((4, 16), 90 + i)).square().mean().backward()
        on.call(optimizer.step)
        on.call(optimizer.zero_grad)
    found = [parameter.detach().clone() for parameter in net.parameters()]
    on.call(optimizer.close)
    on.call(lambda: ballast.drop('early', on.folder))
    return found


@operation
def close_and_resume(on):
    on.gradients(99)
    on.call(on.optimizer.step)
    on.call(on.optimizer.close)
    on.call(on.other.close)
    weight, bias = nn.Parameter(_values(600, 1).reshape(20, 30)), nn.Parameter(_values(30, 2))
    optimizer = on.make([{'params': [('weight', weight), ('bias', bias)]}, {'params': [('late', on.late)]}], resume='must')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        resumed = tuple(on.call(optimizer.resume))
    on.call(optimizer.close)
    return resumed, weight.detach(), bias.detach()


@operation
def drop(on):
    on.call(lambda: ballast.drop('default', on.folder))
    return on.call(lambda: ballast.jobs(on.folder))


def run_all(names, folder):
    """switch -> operation -> its result, or the traceback of what it raised."""
    found = {}
    for number, name in enumerate(names):
        call = {'none': lambda f: f(), **SWITCHES, **FRESH}[name]
        on = Surface(call, f'{folder}-{number}')
        results = found[name] = {}
        for operation, act in OPERATIONS.items():
            try:
                results[operation] = act(on)
            except Exception:  # pylint: disable=broad-except
                results[operation] = traceback.format_exc()
        embedded.stop()
        shutil.rmtree(on.folder, ignore_errors=True)
    return found
