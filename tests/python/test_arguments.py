"""What is refused, and when; hooks, copies, and other things that torch's class promises."""
import copy
import pickle
import re

import pytest
import torch
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.states.state import State

WRONG = {
    'dram': 'lots', 'nvme': -1, 'resume': 'x', 'durability': 'y', 'moments': 'z', 'master': 'z', 'pin_interval': 3,
    'checkpoints': 0, 'name': '', 'max_norm': -1.0, 'chunk_elements': 1000, 'seed': -1, 'threads': 1025, 'step_timeout': 0,
    'open_timeout': 'soon', 'debug': '0', 'directory': '',
}
# More than one wrong value of an argument.
MORE_WRONG = [('directory', 5), ('directory', b'state')]


@pytest.mark.parametrize('argument, value', [*WRONG.items(), *MORE_WRONG])
def test_a_wrong_argument_is_refused_at_once(argument, value):
    with pytest.raises(ballast.Error, match=f'^{argument}={value!r}: expected ') as raised:
        bt.AdamW(mlp().parameters(), **{argument: value})
    assert raised.value.reason == 'BAD_CONFIG'


@pytest.mark.parametrize('said', ['true', '1 ', ''])
def test_a_wrong_variable_is_refused(said, monkeypatch):
    monkeypatch.setenv('BALLAST_DEBUG', said)
    with pytest.raises(ballast.Error, match=f'^BALLAST_DEBUG={said!r}: expected 0 or 1'):
        bt.AdamW(mlp().parameters())


@pytest.mark.parametrize('said, words', [
    ('localhost:99999', "'localhost:99999' has no port from 1 to 65535; expected host:port"),
    ('localhost:0', "'localhost:0' has port 0"),
    ('localhost', "'localhost' has no port"),
    ('127.0.0.1:1, local host:2', "'local host:2' has a host with"),
    ('127.0.0.1:1,,127.0.0.1:2', "'' has no port"),
    (['127.0.0.1:1 '], "'127.0.0.1:1 ' has no port from 1"),
    ('::1:7070', "'::1:7070' has an IPv6 address without brackets"),
    ('etcd://127.0.0.1:1', "'etcd://127.0.0.1:1' has no prefix"),
    ('127.0.0.1:1,etcd://127.0.0.1:1/x', "'127.0.0.1:1,etcd://127.0.0.1:1/x' names servers beside a registry"),
])
def test_an_address_that_is_none_is_refused_at_once(said, words, monkeypatch):
    with pytest.raises(ballast.Error, match=f'^servers: {re.escape(words)}') as raised:
        bt.AdamW(mlp().parameters(), servers=said)
    assert raised.value.reason == 'BAD_CONFIG'
    if isinstance(said, str):
        monkeypatch.setenv('BALLAST_SERVERS', said)
        with pytest.raises(ballast.Error, match=f'^BALLAST_SERVERS: {re.escape(words)}'):
            bt.AdamW(mlp().parameters())


@pytest.mark.parametrize('tls', [7, {}, {'certificate': 'a', 'key': 'b'}, {'ca': 7}, {'ca': ''}, {'ca': 'a', 'crl': 'b'}])
def test_files_of_tls_that_do_not_fit_are_refused(tls):
    with pytest.raises(ballast.Error, match='^tls=.*expected a dict of paths') as raised:
        bt.AdamW(mlp().parameters(), servers='127.0.0.1:1', tls=tls)
    assert raised.value.reason == 'BAD_CONFIG'


@pytest.mark.parametrize('given', [{'tls': {'ca': 'a'}}, {'token_file': 'a'}])
def test_an_embedded_server_is_shown_nothing(given):
    with pytest.raises(ballast.Error, match='expected servers too'):
        bt.AdamW(mlp().parameters(), **given)


def test_a_token_does_not_travel_in_the_clear(tmp_path, monkeypatch):
    (tmp_path / 'token').write_text('secret\n')
    for given in ({'token_file': tmp_path / 'token'}, {}):
        if not given:
            monkeypatch.setenv('BALLAST_TOKEN_FILE', str(tmp_path / 'token'))
        with pytest.raises(ballast.Error, match='in the clear, where others could read it; set `ca` for TLS') as raised:
            bt.AdamW(mlp().parameters(), servers='192.0.2.77:7070', **given).resume()
        assert raised.value.reason == 'BAD_CONFIG'


@pytest.mark.parametrize('servers', [7, ['127.0.0.1:1', None], {'127.0.0.1:1': 1}])
def test_servers_that_are_no_addresses_at_all_are_refused(servers):
    with pytest.raises(ballast.Error, match='^servers=.*expected .host:port'):
        bt.AdamW(mlp().parameters(), servers=servers)


@pytest.mark.parametrize('name', ['my run', 'a/b', 'x' * 129, 'naïve', None])
def test_a_name_that_servers_do_not_take_is_refused_at_once(name):
    with pytest.raises(ballast.Error, match=r"^name=.*: expected 1 to 128 letters, digits, '.', '_' or '-'"):
        bt.AdamW(mlp().parameters(), name=name)


def test_every_k_needs_its_k():
    with pytest.raises(ballast.Error, match='pin_interval=0: expected the K'):
        bt.AdamW(mlp().parameters(), durability='every-K')


@pytest.mark.parametrize('wrong', [{'lr': -1.0}, {'lr': float('nan')}, {'betas': (0.9, 1.0)}, {'betas': (0.9,)}, {'eps': -1e-8},
                                   {'weight_decay': float('inf')}])
def test_a_wrong_hyper_parameter_is_a_value_error_as_in_torch(wrong):
    with pytest.raises(ValueError, match='expected'):
        bt.AdamW(mlp().parameters(), **wrong)


@pytest.mark.parametrize('take, words', [
    (lambda model: model[0].weight, 'should be an iterable of Tensors or dicts, but got a Tensor'),
    (lambda model: dict(model.named_parameters()), "is a dict without 'params': expected model.named_parameters()"),
    (lambda model: [('a', model[0].weight), model[0].bias], 'Some param names are missing'),
    (lambda model: [model[0].weight, ('a', model[0].bias)], 'Some param names are missing'),
    (lambda model: [], 'optimizer got an empty parameter list'),
])
def test_parameters_that_are_none_are_refused_as_in_torch(take, words):
    with pytest.raises((TypeError, ValueError), match=words):
        bt.AdamW(take(mlp()))


@pytest.mark.parametrize('wrong', [{'lr': '1e-3'}, {'eps': '1e-8'}, {'betas': ('0.9', 0.99)}])
def test_a_number_of_yaml_that_is_a_string_is_refused(wrong):
    """As in torch. A schedule would stumble over it, an epoch later."""
    with pytest.raises(TypeError, match=f'{next(iter(wrong))[:4]}.* is a string, expected a number'):
        bt.AdamW(mlp().parameters(), **wrong)


def test_a_parameter_twice():
    model = mlp()
    with pytest.raises(ValueError, match='more than once'):
        bt.AdamW([*model.parameters(), model[0].weight])
    with pytest.raises(ValueError, match='more than one parameter group'):
        bt.AdamW([{'params': model.parameters()}, {'params': [model[0].weight]}])


def test_a_wrapped_model_is_the_same_job(job):
    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    wrapped = Wrapped(torch.compile(model))
    assert [name for name, _ in wrapped.named_parameters()] == [f'module._orig_mod.{name}' for name in names]
    for optimizer in (bt.AdamW(wrapped.named_parameters(), **job),
                      bt.AdamW(wrapped.parameters(), **{**job, 'name': job['name'] + 'b'}).attach(wrapped)):
        train(model, optimizer, steps=1)
        assert [member.name for member in optimizer.job.members] == names


def test_a_frozen_parameter_with_a_gradient_is_updated_as_in_torch(job):
    def script(model, make):
        model[0].weight.requires_grad_(False)
        optimizer = make(model.parameters())

        def after(i):
            model[0].weight.grad = torch.full_like(model[0].weight, 0.01 * i)
        return train(model, optimizer, steps=10, after_backward=after)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_an_empty_parameter_is_left_alone(job):
    def script(model, make):
        empty = nn.Parameter(torch.zeros(0, 4))
        empty.grad = torch.zeros(0, 4)
        return train(model, make([empty, *model.parameters()]), steps=5)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_hooks(job):
    """All of torch.optim.Optimizer's, in the same order as around its own."""
    def calls_of(model, make):
        optimizer = make(model.parameters())
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append('before step'))
        optimizer.register_step_post_hook(lambda *_: calls.append('after step'))
        optimizer.register_state_dict_pre_hook(lambda _: calls.append('before state_dict'))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, 'mine': 7})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop('mine')))
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append('loaded'))
        state = optimizer.state_dict()  # before the first step: ours could not load moments else
        optimizer.load_state_dict(state)
        assert state['mine'] == 7
        train(model, optimizer, steps=1)
        return calls
    expected, came, _, _ = both(calls_of, lambda p: bt.AdamW(p, **job), torch.optim.AdamW)
    assert came == expected
    assert len(came) == 5


def test_a_profiler_shows_the_step(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    with torch.profiler.profile() as profile:
        train(model, optimizer, steps=1)
    assert 'Optimizer.step#AdamW.step' in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize('take', [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_optimizer_is_not_copied(take, job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    for steps in (0, 1):
        train(model, optimizer, steps=steps)
        with pytest.raises(ballast.Error, match='cannot be copied or pickled.*full_state_dict'):
            take(optimizer)


def test_a_full_state_dict_does_not_look_for_each_tensor_among_all(job, monkeypatch):
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(40)]
    optimizer = bt.AdamW(parameters, **job)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    looks = []
    all_parameters = State._parameters
    monkeypatch.setattr(State, '_parameters', lambda state: looks.append(1) or all_parameters(state))
    assert len(optimizer.full_state_dict()['state']) == 40
    assert len(looks) <= 1


def test_step_counts_follow_steps_and_new_tensors(job):
    """They are asked for once a version."""
    a, b, c = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = bt.AdamW([a, b], **job)

    def step(*parameters):
        optimizer.zero_grad()
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
        return [int(optimizer.state[parameter]['step']) for parameter in (a, b)]
    assert [step(a), step(a, b), step(b)] == [[1, 0], [2, 1], [2, 2]]
    optimizer.add_param_group({'params': [c]})
    assert step(a, c) == [3, 2]
    assert int(optimizer.state[c]['step']) == 1


def test_the_fiftieth_skip_in_a_row_raises(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)

    def skip(count):
        loss_of(model, next(batches(1))).backward()
        model[3].bias.grad[0] = float('nan')
        for _ in range(count):
            with pytest.warns(UserWarning, match="'3.bias' is not finite|'group0.5"):
                optimizer.step()
        optimizer.zero_grad()
    skip(49)
    train(model, optimizer, steps=1)  # one that is none: it counts from the start
    skip(49)
    model[3].bias.grad = torch.full((4,), float('inf'))
    with pytest.raises(ballast.Error, match='50 in a row.*lower the learning rate'):
        optimizer.step()


def test_data_that_is_another_tensor_is_an_edit(job):
    """`p.data = other` moves no version counter; the address tells."""
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            if i == 5:
                model[0].weight.data = model[0].weight.detach() * 0.5
        return train(model, optimizer, steps=10, after_step=after)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_parameters_that_are_not_contiguous(job):
    def make_model():
        model = mlp()
        for layer in (model[0], model[3]):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not model[0].weight.is_contiguous()
        return model
    results = both(lambda model, make: train(model, make(model.parameters()), steps=10), lambda p: bt.AdamW(p, lr=1e-2, **job),
                   lambda p: torch.optim.AdamW(p, lr=1e-2), make_model)
    assert_close(*results)
    assert not results[3][0].weight.is_contiguous()


class _Rotten:
    """A store of a process group that has ended."""

    def set(self, key, value):
        pass

    def get(self, key, seconds):
        raise RuntimeError('the store is gone')


def test_no_traceback_in_a_message():
    options = ballast._native.OpenOptions()
    options.job, options.rank, options.world_size, options.servers = 'job', 0, 2, ['127.0.0.1:1']
    options.step_timeout = options.open_timeout = 1.0
    with pytest.raises(ballast.Error, match='RuntimeError: the store is gone') as raised:
        ballast._native.Session.open(options, [ballast._native.Tensor('w', 'w', [4], 0)], None, _Rotten())
    assert raised.value.reason == 'RANK_MISSING'
    assert 'Traceback' not in str(raised.value) and '\n' not in str(raised.value)
