"""Buffers of a model, which no server keeps: a resume names them."""
import collections
import warnings

import pytest
import torch
from torch import nn

import ballast.torch as bt

STATISTICS = ['norm.running_mean', 'norm.running_var', 'norm.num_batches_tracked']


class Norms(nn.Module):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm(4)
        self.register_buffer('table', torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x))


class Counts(nn.Module):
    """A mask and rotary tables, which stay as they are, and a count and a codebook, which do not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer('mask', torch.ones(4, 4).tril())
        self.register_buffer('positions', torch.arange(4))
        self.register_buffer('angles', torch.outer(torch.arange(4.0), torch.ones(4)).cos())
        self.register_buffer('count', torch.tensor(0))
        self.register_buffer('codebook', torch.zeros(4))

    def forward(self, x):
        self.count += 1
        self.codebook = 0.9 * self.codebook + 0.1 * x.detach().mean(0)
        return self.linear(x @ self.mask + self.angles[self.positions].sum())


def told_by_runs(job, make_model, make_params, after_made=lambda optimizer, model: None, wrap=lambda model: model, **more):
    """What each of two runs of a durable job said of buffers: at the resume, and in three steps."""
    said = []
    for _ in range(2):
        model = make_model()
        net = wrap(model)
        optimizer = bt.AdamW(make_params(net), **job, **{key: value(net) for key, value in more.items()})
        after_made(optimizer, net)
        for act in (optimizer.resume, lambda net=net, optimizer=optimizer: steps(net, optimizer)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                act()
            said.append([str(each.message) for each in caught if 'buffers' in str(each.message)])
        optimizer.close()
    return said


def steps(model, optimizer):
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def durable(job, tmp_path):
    return {**job, 'directory': tmp_path, 'nvme': '256MiB', 'resume': 'auto'}


def check_first_and_named(said, names):
    assert said[0] == said[1] == said[3] == []
    [text] = said[2]
    assert f'{", ".join(names)} are as' in text and 'table' not in text
    assert 'strict=False' in text


@pytest.mark.parametrize('knows', ['attach', 'overlap'])
def test_a_resume_names_the_buffers_that_begin_anew(knows, durable):
    said = told_by_runs(durable, Norms, Norms.named_parameters,
                        *([lambda optimizer, model: optimizer.attach(model)] if knows == 'attach' else []),
                        **({'overlap': lambda model: model} if knows == 'overlap' else {}))
    check_first_and_named(said, STATISTICS)


PARAMS = {
    'named': Norms.named_parameters,
    'parameters': Norms.parameters,
    'list': lambda model: list(model.parameters()),
    'filter': lambda model: filter(lambda p: p.requires_grad, model.parameters()),
    'groups': lambda model: [{'params': model.linear.parameters()}, {'params': [model.norm.weight, model.norm.bias], 'weight_decay': 0}],
    'a part': lambda model: model.linear.parameters(),
}


@pytest.mark.parametrize('params', PARAMS)
def test_a_resume_names_them_if_it_has_parameters_alone(params, durable):
    check_first_and_named(told_by_runs(durable, Norms, PARAMS[params]), STATISTICS)


WRAPS = {
    'compiled': (lambda model: torch.compile(model, backend='eager'), ''),
    'in a sequence': (nn.Sequential, '0.'),
}


@pytest.mark.parametrize('wrapped', WRAPS)
def test_a_resume_names_them_in_wrappers(wrapped, durable):
    wrap, prefix = WRAPS[wrapped]
    said = told_by_runs(durable, Norms, lambda model: model.named_parameters(), wrap=wrap)
    check_first_and_named(said, [prefix + name for name in STATISTICS])


def test_a_resume_names_statistics_of_norms_without_parameters(durable):
    said = told_by_runs(durable, lambda: Norms(lambda n: nn.BatchNorm1d(n, affine=False)), Norms.named_parameters)
    check_first_and_named(said, STATISTICS)


def test_a_second_step_names_what_training_changes(durable):
    said = told_by_runs(durable, Counts, Counts.named_parameters)
    assert said[:3] == [[], [], []]
    [text] = said[3]
    assert 'went on after 3 steps, and training changes buffers of the model that no server keeps: count, codebook began as' in text


def test_constants_and_models_of_others_are_not_named(durable):
    class Constants(Counts):
        def forward(self, x):
            return self.linear(x @ self.mask)
    other, teacher = Norms(), Norms().eval().requires_grad_(False)

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Constants(), teacher

        def forward(self, x):
            return self.student(x) - self.teacher(x)
    said = told_by_runs(durable, Student, lambda model: model.student.named_parameters())
    assert said == [[]] * 4
    assert other is not None


def test_statistics_of_a_layer_in_eval_are_not_named(durable):
    """Though its weight and bias are trained."""
    assert told_by_runs(durable, lambda: Norms().eval(), Norms.named_parameters) == [[]] * 4


def test_statistics_of_a_layer_that_trains_after_the_resume_are_named_then(durable):
    class Late(Norms):
        def forward(self, x):
            self.train()
            return super().forward(x)
    said = told_by_runs(durable, lambda: Late().eval(), Norms.named_parameters)
    assert said[:3] == [[], [], []]
    assert f'{", ".join(STATISTICS)} began as' in said[3][0]


def test_buffers_that_come_and_go_are_not_named(durable):
    """One that a forward pass drops, one that it makes, and one of a lazy layer that nothing calls."""
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.passes = nn.Linear(4, 4), 0
            for name in ('dropped', 'made'):
                self.register_buffer(name, torch.ones(4))
            self.register_buffer('never', nn.UninitializedBuffer())
            self.made = self.made.to('meta')

        def forward(self, x):
            self.passes += 1
            if self.passes == 2:
                self.dropped, self.made = None, torch.ones(4)
            return self.linear(x)
    assert told_by_runs(durable, Lazy, Lazy.named_parameters) == [[]] * 4


def test_a_proxy_is_not_asked_what_it_is(durable):
    """Objects that stand for others, as of lazy imports: the look for modules leaves them alone."""
    class Proxy:
        asked = collections.Counter()

        @property
        def __class__(self):
            Proxy.asked['class'] += 1
            raise RuntimeError('no request here')
    proxy = Proxy()
    check_first_and_named(told_by_runs(durable, Norms, Norms.named_parameters), STATISTICS)
    assert not proxy.asked
