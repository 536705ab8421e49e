"""fp32 parameters of a job in memory on this process's server are their own masters: the server has their moments alone, and whatever
is written to a parameter counts as it does with torch.optim."""
import copy

import numpy as np
import pytest
import torch
from conftest import PAIRS
from own_process import run
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt
from ballast import embedded
from ballast.torch.job import spec
from ballast.torch.tensors import memory


def bits(model, optimizer):
    """Parameters and all state, as bytes."""
    states = [optimizer.state[p] for p in model.parameters()]
    return ([p.detach().numpy().tobytes() for p in model.parameters()]
            + [value.numpy().tobytes() for state in states for _, value in sorted(state.items())])


def strided():
    """A bias in the middle of a buffer, at an odd address; a weight that is not contiguous."""
    model = mlp()
    buffer = torch.zeros(67)
    buffer[1:65] = model[0].bias.detach()
    model[0].bias = nn.Parameter(buffer[1:65])
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
    return model


@pytest.mark.parametrize('make_model', [mlp, strided])
@pytest.mark.parametrize('way', [*PAIRS, 'lion', 'bf16', 'i8', 'overlap', 'nvme', 'max_norm'])
def test_bits_of_masters_on_the_server(way, make_model, job, monkeypatch, tmp_path):
    make, _, arguments = PAIRS.get(way, (bt.Lion if way == 'lion' else bt.AdamW, None, {'lr': 1e-2}))
    arguments = {**arguments, **{'bf16': {'moments': 'bf16'}, 'i8': {'moments': 'i8'}, 'max_norm': {'max_norm': 0.5}}.get(way, {})}
    if way == 'nvme':
        job = {**job, 'dram': '64MiB', 'nvme': '256MiB', 'directory': str(tmp_path), 'durability': 'none'}
        embedded.stop()

    def trained(name):
        torch.manual_seed(3)
        model = make_model()
        wide = nn.Parameter(torch.randn(8 << 20)) if way == 'nvme' else None
        optimizer = make([*model.named_parameters(), *([] if wide is None else [('wide', wide)])], **arguments, **{**job, 'name': name},
                         **({'overlap': model} if way == 'overlap' else {}))

        def backward(i):
            if wide is not None:
                wide.grad = torch.randn(len(wide), generator=torch.Generator().manual_seed(i))
        train(model, optimizer, steps=5, after_backward=backward)
        if way == 'overlap':
            optimizer.wait()
        lends = optimizer.job.opened.lends_masters
        assert way != 'nvme' or dict(zip(('dram', 'nvme'), embedded._running.server.tiers))['nvme'][1] > 16 << 20
        found = lends, bits(model, optimizer), None if wide is None else wide.detach().numpy().tobytes()
        optimizer.close()
        return found
    lends, *own = trained(job['name'])
    monkeypatch.setattr(spec, 'own_masters', lambda *_: False)
    other, *kept = trained(job['name'] + '-kept')
    assert (lends, other) == (True, False)
    assert own == kept
    if way == 'nvme':
        embedded.stop()


def in_place(p):
    with torch.no_grad():
        p.mul_(-2)


def by_data(p):
    p.data.mul_(-2)


def by_numpy(p):
    p.detach().numpy()[...] *= -2


def by_foreach(p):
    torch._foreach_mul_([p.data], -2.0)


def other_data(p):
    p.data = p.detach() * -2


def other_layout(p):
    p.data = (p.detach() * -2).t().contiguous().t()


def raw_memory(p):
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * p.numel()).from_address(p.data_ptr()))[:] *= -2


def from_a_state(p):
    nn.ParameterList([p]).load_state_dict({'0': p.detach() * -2})


EDITS = [in_place, by_data, by_numpy, by_foreach, other_data, other_layout, raw_memory, from_a_state]


@pytest.mark.parametrize('edit', EDITS)
def test_every_edit_counts_bit_for_bit(edit, job):
    """SGD with numbers that are exact in fp32."""
    results = []
    for make in (torch.optim.SGD, lambda p, **more: bt.SGD(p, **more, **job)):
        p = nn.Parameter(torch.arange(24.0).reshape(4, 6))
        optimizer = make([p], lr=0.5, momentum=0.5)
        for i in range(6):
            p.grad = torch.full((4, 6), float(i - 2))
            optimizer.step()
            if i % 2 == 1:
                edit(p)
        results.append(p.detach().contiguous().numpy().tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize('edit', EDITS)
def test_edits_between_backward_and_step(edit, job):
    def script(model, make):
        optimizer = make(model.parameters())
        return train(model, optimizer, steps=8, after_backward=lambda i: edit(model[3].weight) if i == 4 else None)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_an_inf_in_a_parameter_stays_in_its_place(job):
    """As a NaN, by the kernels' decay, and as an Inf with torch: nobody is told, as nobody is there."""
    p = nn.Parameter(torch.ones(3))
    optimizer = bt.SGD([p], lr=0.5, **job)
    for value in (1.0, float('inf')):
        p.data[1] = value
        p.grad = torch.ones(3)
        optimizer.step()
    assert not p[1].isfinite() and p[0] == p[2] == 0


def test_a_skipped_step_leaves_parameters_alone(job):
    p = nn.Parameter(torch.ones(3))
    optimizer = bt.AdamW([p], lr=0.5, **job)
    p.grad = torch.ones(3)
    optimizer.step()
    p.data.fill_(7)
    p.grad = torch.tensor([1.0, float('nan'), 1.0])
    with pytest.warns(UserWarning, match='was skipped'):
        optimizer.step()
    assert torch.equal(p, torch.full((3,), 7.0))


def test_states_go_to_torch_and_come_back(job):
    """Both ways, and on from there as torch alone."""
    model = mlp()
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    ours = bt.AdamW(model.parameters(), lr=1e-2, **job)
    train(model, ours, steps=5)
    train(twin, theirs, steps=5)
    state, weights = copy.deepcopy(ours.state_dict()), copy.deepcopy(model.state_dict())
    assert all(set(entry) == {'step', 'exp_avg', 'exp_avg_sq'} for entry in state['state'].values())
    fresh = mlp()
    fresh.load_state_dict(weights)
    third = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    third.load_state_dict(state)
    again = mlp()
    again.load_state_dict(weights)
    fourth = bt.AdamW(again.parameters(), lr=1e-2, **{**job, 'name': job['name'] + '-again'})
    fourth.load_state_dict(third.state_dict())
    for each, optimizer in ((twin, theirs), (model, ours), (fresh, third), (again, fourth)):
        train(each, optimizer, steps=5)
    for a, b, c, d in zip(*(each.parameters() for each in (twin, model, fresh, again))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)
        assert torch.equal(b, d)


def test_exported_masters_are_the_parameters_and_come_back(job, tmp_path):
    model = strided()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=3)
    by_data(model[0].weight)
    bt.export_state(optimizer, tmp_path / 'state')
    expected = bits(model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, steps=2)
    model.load_state_dict(weights)
    bt.import_state(optimizer, tmp_path / 'state')
    assert bits(model, optimizer) == expected
    other = strided()
    second = bt.AdamW(other.named_parameters(), lr=1e-2, **{**job, 'name': job['name'] + '-other'})
    other.load_state_dict(weights)
    bt.import_state(second, tmp_path / 'state')
    assert bits(other, second) == expected
    train(model, optimizer, steps=2)
    train(other, second, steps=2)
    assert bits(other, second) == bits(model, optimizer)


def test_another_optimizer_that_takes_the_job_over_gets_the_parameters(job):
    model, other = mlp(), strided()
    first = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, first, steps=3)
    by_data(model[0].weight)
    expected = bits(model, first)
    second = bt.AdamW(other.named_parameters(), lr=1e-2, resume='auto', **job)
    with pytest.warns(UserWarning, match='was open in another optimizer'):
        assert second.resume().step == 3
    assert bits(other, second) == expected
    train(other, second, steps=1)
    first.close()
    train(other, second, steps=1)


def test_without_them_a_job_is_refused_until_a_state_is_loaded(job):
    model, other = mlp(), mlp()
    first = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, first, steps=3)
    state = copy.deepcopy(first.state_dict())
    second = bt.AdamW(other.named_parameters(), lr=1e-2, resume='auto', **job)
    first.job.opened.members = []  # as of one that another thread is closing
    with pytest.warns(UserWarning, match='was open in another optimizer'), pytest.raises(ballast.Error, match='no values of') as error:
        second.resume()
    assert error.value.reason == 'STATE_LOST'
    other.load_state_dict(model.state_dict())
    second.load_state_dict(state)
    train(other, second, steps=1)
    assert second.resume().step == 4


def test_other_dtypes_and_devices_keep_masters_on_the_server(job):
    for dtype in (torch.bfloat16, torch.float16):
        model = nn.Linear(4, 4)
        model.bias.data = model.bias.data.to(dtype)
        optimizer = bt.AdamW(model.parameters(), **{**job, 'name': f"{job['name']}{dtype}".replace('torch.', '-')})
        optimizer.resume()
        assert not optimizer.job.opened.lends_masters
        optimizer.close()


def test_16_bits_among_parameters_that_are_their_own_masters_are_refused(job):
    model = mlp()
    optimizer = bt.AdamW(model[0].named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=1)
    optimizer.add_param_group({'params': [('late', nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))]})
    optimizer.param_groups[-1]['params'][0].grad = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ballast.Error, match="'late' is torch.bfloat16, and the job's are float32 and their own masters") as error:
        optimizer.step()
    assert error.value.reason == 'BAD_DTYPE'


def test_parameters_that_register_late_are_their_own_masters_too(job):
    def script(model, make):
        model[0].weight.requires_grad_(False)
        optimizer = make(model.parameters())
        losses = train(model, optimizer, steps=2)
        model[0].weight.data.mul_(2)
        model[0].weight.requires_grad_(True)
        losses += train(model, optimizer, steps=2)
        by_data(model[0].weight)
        return losses + train(model, optimizer, steps=2)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_parameters_that_move_to_a_device_in_mid_run(job, monkeypatch):
    """A double: all memory counts as elsewhere, so parameters and gradients go by way of host memory that is kept from step to step."""
    def script(model, make):
        optimizer = make(model.parameters())
        losses = train(model, optimizer, steps=2)
        if isinstance(optimizer, bt.AdamW):
            monkeypatch.setattr(memory, 'is_elsewhere', lambda _: True)
        losses += train(model, optimizer, steps=3)
        by_data(model[0].weight)
        losses += train(model, optimizer, steps=3)
        return losses
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_an_error_after_the_step_was_decided_loses_nothing(job, monkeypatch):
    """Also of what is copied: the step counts, and the parameters are its."""
    model, twin = strided(), strided()
    twin.load_state_dict(model.state_dict())
    optimizer = bt.AdamW(model.parameters(), lr=1e-2, **job)
    other = bt.AdamW(twin.parameters(), lr=1e-2, **{**job, 'name': job['name'] + '-other'})
    train(model, optimizer, steps=2)
    train(twin, other, steps=3)
    session = optimizer.job.opened.session

    class Interrupted:
        def __getattr__(self, name):
            return getattr(session, name)

        def step(self, *arguments, **more):
            session.step(*arguments, **more)
            raise KeyboardInterrupt
    monkeypatch.setattr(optimizer.job.opened, 'session', Interrupted())
    optimizer.zero_grad()
    loss_of(model, list(batches(3))[2]).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.setattr(optimizer.job.opened, 'session', session)
    assert optimizer.resume().step == 3
    assert bits(model, optimizer) == bits(twin, other)


def test_memory_is_what_estimate_says_and_torch_takes(tmp_path):
    """Within 5 % of what the process takes: moments alone."""
    run(tmp_path, '''
        def resident():
            with open('/proc/self/status') as status:
                return next(int(line.split()[1]) for line in status if line.startswith('VmRSS')) << 10
        def trained(parameters, **more):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer = bt.AdamW(parameters, lr=1e-2, durability='none', dram='2GiB', threads=2, **more)
            optimizer.step()
            return optimizer
        first = trained([torch.nn.Parameter(torch.ones(1 << 16))], name='first')
        parameters = [torch.nn.Parameter(torch.randn(1 << 22)) for _ in range(8)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        count = sum(p.numel() for p in parameters)
        told = ballast.estimate(parameters, dram='2GiB', durability='none')
        before = resident()
        second = trained(parameters, name='second')
        second.step()
        took, said = resident() - before, dict(told.tiers)['dram']
        assert abs(took - said) < 0.05 * said, (took / count, said / count)
        assert 8 * count <= said < 8.1 * count, said / count
        assert f'{8 * count / 2**30:.2f} GiB' in told.text.split('ZeRO stage 0')[1].splitlines()[0], told.text  # as torch.optim's
        ''')
