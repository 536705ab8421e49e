"""Optimizers that wrap others, as their authors publish them: with ours within they do what they do with torch.optim's."""
import copy
from collections import defaultdict

import pytest
import torch
from scripts import batches, loss_of, mlp

import ballast.torch as bt

ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization: makes its base from its own groups, and shares them. in_base: keeps what it notes in the base's
    state, and not in its own."""

    def __init__(self, params, base, in_base, rho=0.05):
        super().__init__(params, {'rho': rho})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)
        self.notes = self.base.state if in_base else self.state

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group['params']]).norm()
        for group in self.param_groups:
            for p in group['params']:
                self.notes[p]['e_w'] = p.grad * (group['rho'] / (norm + 1e-12))
                p.add_(self.notes[p]['e_w'])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group['params']:
                p.sub_(self.notes[p]['e_w'])
        self.base.step()
        self.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """Keeps its slow weights in its base's state, and its options in the base's groups."""

    def __init__(self, base, alpha=0.5, k=3):
        self.base, self.param_groups, self.state = base, base.param_groups, defaultdict(dict)
        self.defaults = base.defaults
        for group in self.param_groups:
            group.update(alpha=alpha, k=k, counter=0)

    @torch.no_grad()
    def step(self):
        self.base.step()
        for group in self.param_groups:
            group['counter'] += 1
            if group['counter'] % group['k']:
                continue
            for p in group['params']:
                entry = self.base.state[p]
                if 'slow' not in entry:
                    entry['slow'] = torch.empty_like(p).copy_(p)
                slow = entry['slow']
                slow.add_(p - slow, alpha=group['alpha'])
                p.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class ScheduleFree:
    """Steps a second sequence z, which is in the parameters' place while its base steps; z is in the base's state."""

    def __init__(self, base, momentum=0.9):
        self.base, self.momentum, self.count = base, momentum, 0

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.base.param_groups for p in group['params']]
        self.count += 1
        for p in parameters:
            entry = self.base.state[p]
            if 'z' not in entry:
                entry['z'] = p.clone()
            p.lerp_(entry['z'], 1 - 1 / self.momentum)
            self._swap(p, entry['z'])
        self.base.step()
        for p in parameters:
            z = self.base.state[p]['z']
            self._swap(p, z)
            p.lerp_(z, 1 / self.count)
            p.lerp_(z, 1 - self.momentum)

    @staticmethod
    def _swap(p, z):
        kept = p.clone()
        p.copy_(z)
        z.copy_(kept)

    def zero_grad(self):
        self.base.zero_grad()

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state):
        self.base.load_state_dict(state)


def sam(in_base):
    def run(model, make):
        optimizer = Sam(model.parameters(), make, in_base)
        for batch in batches(8):
            loss_of(model, batch).backward()
            optimizer.first_step()
            loss_of(model, batch).backward()
            optimizer.second_step()
    return run


def stepped(wrap):
    """Trains, goes back by the wrapper's own state_dict and the model's, and trains on."""
    def run(model, make):
        optimizer, data = wrap(make(model.parameters())), list(batches(8))
        train(model, optimizer, data[:4])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), getattr(optimizer, 'count', None)))
        train(model, optimizer, data[4:])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.count = saved[2]
        train(model, optimizer, data[4:])
    return run


def train(model, optimizer, data):
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


WRAPPERS = {'sam': sam(False), "sam in its base's state": sam(True), 'lookahead': stepped(Lookahead),
            'schedule free': stepped(ScheduleFree)}


class Entered(torch.optim.AdamW):
    """torch's with its state there before the first step: it takes an entry that is not empty for one of its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if 'step' not in self.state[p]:
                    self.state[p].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        return super().step(closure)


@pytest.mark.parametrize('wrapper', WRAPPERS)
@pytest.mark.parametrize('kind', ['moments', 'named'])
def test_like_torch(wrapper, kind, job, tmp_path):
    more = {'directory': tmp_path / 'state', 'nvme': '1GiB'} if kind == 'named' else {}
    model, made = mlp(), []
    twin = copy.deepcopy(model)

    def ours(params):
        made.append(bt.AdamW(params, **ARGUMENTS, **job, **more))
        return made[0]
    WRAPPERS[wrapper](twin, lambda params: Entered(params, **ARGUMENTS))
    WRAPPERS[wrapper](model, ours)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f'{name}: {m}')
    made[0].close()
