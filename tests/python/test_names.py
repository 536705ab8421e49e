"""Names of parameters: each follows its parameter, whatever a loop or a framework does to the lists of the groups and to the tensors."""
import copy
import io
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.job.naming import split_named

NAMES = ['0.weight', '1.weight', '2.weight']


def layers():
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in NAMES))


def backward(model, i=1):
    model.zero_grad()
    model(torch.full((1, 4), float(i), dtype=next(model.parameters()).dtype)).square().sum().backward()


def registered(optimizer):
    """By name."""
    optimizer.step()
    return {member.name: member.parameter for member in optimizer.job.members}


def is_named(optimizer, model):
    found, expected = registered(optimizer), dict(model.named_parameters())
    return found.keys() == expected.keys() and all(found[name] is expected[name] for name in expected)


@pytest.fixture
def swapping():
    """Conversions of modules exchange what tensors hold, as they always do with DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_swapped_parameters_train_like_torchs(swapping, job):
    """Before the first step and after it, by a conversion and by load_state_dict()."""
    ours = layers().double()
    theirs = copy.deepcopy(ours)
    pairs = [(ours, bt.AdamW(ours.named_parameters(), lr=0.1, **job)), (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.1))]
    values = {name: value / 2 for name, value in ours.state_dict().items()}
    for model, optimizer in pairs:
        model.float()
        for i in range(3):
            backward(model, i + 1)
            optimizer.step()
            model.to('cpu', memory_format=torch.contiguous_format)
            if i == 1:
                model.load_state_dict(values)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(pairs[0][1].state[a]['exp_avg'], pairs[1][1].state[b]['exp_avg'], rtol=1e-4, atol=1e-5)
    assert pairs[0][1].full_state_dict()['param_groups'][0]['param_names'] == NAMES


def test_names_follow_swapped_parameters_into_another_order(swapping, job):
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    optimizer.param_groups[0]['params'].reverse()
    model.bfloat16()
    backward(model)
    assert is_named(optimizer, model)


def test_a_registered_parameter_has_its_name_after_a_swap_outside_of_the_groups(swapping, job):
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    backward(model)
    optimizer.step()
    first, *rest = optimizer.param_groups[0]['params']
    optimizer.param_groups[0]['params'] = rest
    model.to('cpu')
    optimizer.param_groups[0]['params'] = [*rest, first]
    assert optimizer.full_state_dict()['param_groups'][0]['param_names'] == [*NAMES[1:], NAMES[0]]


def test_what_was_replaced_goes_by_place_and_is_not_kept(job):
    """Each new parameter may lie where one before it was."""
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    old = weakref.ref(model[0].weight)
    params = optimizer.param_groups[0]['params']
    for i, layer in enumerate(model):
        values = layer.weight.detach().clone()
        layer.weight = params[i] = None
        layer.weight = nn.Parameter(values)
    assert old() is None
    params[:] = model.parameters()
    assert optimizer.state_dict()['param_groups'][0]['param_names'] == NAMES
    params.reverse()  # from then on they are known
    backward(model)
    assert is_named(optimizer, model)


def test_one_more_does_not_take_the_name_of_another(job):
    """A list that was filtered and appended to, which is as long as before."""
    model = layers()
    new = nn.Parameter(torch.ones(3))
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    group = optimizer.param_groups[0]
    group['params'] = group['params'][1:] + [new]
    backward(model)
    new.grad = torch.ones(3)
    found = registered(optimizer)
    assert list(found) == ['1.weight', '2.weight', 'group0.2[3]'] and found['group0.2[3]'] is new


def test_groups_that_were_cleared_and_added_again(job):
    model, other = layers(), layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    optimizer.param_groups.clear()
    optimizer.add_param_group({'params': list(reversed(list(other.named_parameters())))})
    backward(other)
    assert is_named(optimizer, other)


def test_a_group_of_known_parameters_needs_no_names(job):
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    optimizer.param_groups.clear()
    optimizer.add_param_group({'params': list(reversed(list(model.parameters())))})
    backward(model)
    assert is_named(optimizer, model)


def test_a_group_that_went_leaves_its_names_to_none(job):
    a, b = layers(), layers()
    named = [[(f'{side}.{name}', p) for name, p in model.named_parameters()] for side, model in (('a', a), ('b', b))]
    optimizer = bt.AdamW([{'params': each} for each in named], lr=0.1, **job)
    del optimizer.param_groups[0]
    for layer in b:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    optimizer.param_groups[0]['params'] = list(b.parameters())
    backward(b)
    assert list(registered(optimizer)) == ['b.0.weight', 'b.1.weight', 'b.2.weight']


def test_an_optimizer_leaves_parameters_as_others_see_them(job):
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    for mine, loaded in zip(model.parameters(), torch.load(file, weights_only=True)):
        assert torch.equal(mine, loaded)
    copied = copy.deepcopy(model)
    again = bt.AdamW(copied.named_parameters(), lr=0.1, **{**job, 'name': job['name'] + 'b'})
    backward(copied)
    backward(model)
    assert is_named(again, copied) and is_named(optimizer, model)


def half_named(order, job, name, **more):
    """Of four parameters of one shape, those of the second group have names."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(4, 4)) for name in 'abcd'}
    groups = [{'params': [params['a'], params['b']]}, {'params': [(name, params[name]) for name in order]}]
    optimizer = bt.AdamW(groups, lr=0.1, **{**job, 'name': job['name'] + name}, **more)
    for name, p in params.items():
        p.grad = torch.full((4, 4), float(ord(name)))
    return params, optimizer


@pytest.mark.parametrize('swapped', [False, True])
def test_names_of_some_groups_decide_for_these(swapped, job):
    """Also where the state has its groups the other way round."""
    params, optimizer = half_named('cd', job, 'x')
    optimizer.step()
    saved = optimizer.full_state_dict()
    if swapped:
        saved['param_groups'].reverse()
    mine, other = half_named('dc', job, 'y')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        other.load_state_dict(saved)
    for name in 'abcd':
        assert torch.equal(other.state[mine[name]]['exp_avg'], optimizer.state[params[name]]['exp_avg'])


def test_names_of_some_groups_that_do_not_fit_are_refused(job):
    _, optimizer = half_named('cd', job, 'x')
    optimizer.step()
    saved = optimizer.full_state_dict()
    saved['param_groups'][1]['param_names'] = ['c', 'e']
    with pytest.raises(ballast.Error, match="the state has no parameter 'd', .*, and the state has a parameter 'e'"):
        optimizer.load_state_dict(saved)
    saved['param_groups'][1]['param_names'] = ['e', 'f']
    with pytest.raises(ballast.Error, match="the state has no parameter 'c', .*, and the state has a parameter 'e'"):
        optimizer.load_state_dict(saved)


def test_a_group_with_names_on_one_side_goes_by_place_and_says_so(job):
    params, optimizer = half_named('cd', job, 'x')
    optimizer.step()
    full = [('a', params['a']), ('b', params['b'])]
    other = bt.AdamW([{'params': full}, {'params': [('d', params['d']), ('c', params['c'])]}], **{**job, 'name': job['name'] + 'y'})
    with pytest.warns(UserWarning, match='the state has no names of parameters in group 0, so its entries went to parameters by their '
                      'places'):
        other.load_state_dict(optimizer.full_state_dict())
    none = bt.AdamW([{'params': [params[name] for name in pair]} for pair in ('ab', 'dc')], **{**job, 'name': job['name'] + 'z'})
    with pytest.warns(UserWarning, match='this optimizer has no names of parameters in group 1, so its entries went'):
        none.load_state_dict(optimizer.full_state_dict())
    for name in 'abcd':
        assert torch.equal(other.state[params[name]]['exp_avg'], optimizer.state[params[name]]['exp_avg'])


def test_a_state_with_more_names_goes_by_place_where_there_are_none_here(job):
    """The groups that have names on both sides go by name all the same, and what does not fit there is refused."""
    params = {name: nn.Parameter(torch.full((4, 4), float(ord(name)))) for name in 'abcd'}
    for name, p in params.items():
        p.grad = torch.full((4, 4), float(ord(name)))
    whole = bt.AdamW([{'params': [(name, params[name]) for name in pair]} for pair in ('ab', 'cd')], **{**job, 'name': job['name'] + 'w'})
    whole.step()
    saved = whole.full_state_dict()
    for swapped in (False, True):
        mine, other = half_named('dc', job, f'half{swapped}')
        if swapped:
            saved['param_groups'].reverse()
        with pytest.warns(UserWarning, match='this optimizer has no names of parameters in group 0, so its entries went'):
            other.load_state_dict(saved)
        for name in 'abcd':
            assert torch.equal(other.state[mine[name]]['exp_avg'], whole.state[params[name]]['exp_avg'])
    saved['param_groups'].reverse()
    saved['param_groups'][1]['param_names'] = ['c', 'e']
    with pytest.raises(ballast.Error, match="the state has no parameter 'd', .*, and the state has a parameter 'e'"):
        other.load_state_dict(saved)
    saved['param_groups'][1]['param_names'] = ['e', 'f']
    with pytest.raises(ballast.Error, match="the state has no parameter 'c', .*'e'"):
        other.load_state_dict(saved)


def test_a_state_that_has_a_name_twice_goes_by_place_and_says_so(job):
    model = layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    backward(model)
    optimizer.step()
    saved = optimizer.full_state_dict()
    saved['param_groups'][0]['param_names'] = ['0.weight', '1.weight', '1.weight']
    with pytest.warns(UserWarning, match='the state has a name of parameters twice, so none, in group 0, so its entries went'):
        optimizer.load_state_dict(saved)


def scalars(count):
    return nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])


def work_of(act):
    """Bytecodes that `act` runs: the same on every machine, however busy."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += 1
        return trace
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize('reversed_before', [False, True])
def test_names_cost_as_much_for_each_of_many_swapped(reversed_before, swapping, job):
    work = []
    for count in (250, 2000):
        params = scalars(count)
        optimizer = bt.SGD(params.named_parameters(), lr=0.1, **job)
        if reversed_before:
            optimizer.param_groups[0]['params'].reverse()
        work.append(work_of(params.double))
        names = [name for name, _ in params.named_parameters()]
        expected = names[::-1] if reversed_before else names
        assert optimizer.state_dict()['param_groups'][0]['param_names'] == expected
    assert work[1] < 12 * work[0], 'eight times as many'


def work_of_replacing(count, kept, job):
    params = scalars(count)
    optimizer = bt.SGD(params.named_parameters(), lr=0.1, **job)
    names = [name for name, _ in params.named_parameters()]
    other = scalars(count)
    held = list(params) if kept else None

    def replace():
        nonlocal params
        params = None
        optimizer.param_groups[0]['params'] = list(other)
        assert optimizer.state_dict()['param_groups'][0]['param_names'] == names
    work = work_of(replace)
    assert held is None or len(held) == count
    return work


@pytest.mark.parametrize('kept', [False, True])
def test_names_cost_as_much_for_each_of_many_replaced(kept, job):
    """kept: somebody holds what was replaced."""
    work = [work_of_replacing(count, kept, job) for count in (250, 2000)]
    assert work[1] < 12 * work[0], 'eight times as many'


def test_edits_cost_as_much_for_each_of_many(job):
    work = []
    for count in (250, 2000):
        params = scalars(count)
        optimizer = bt.SGD(params.named_parameters(), lr=0.1, **{**job, 'name': f'{job["name"]}-{count}'})
        for p in params:
            p.grad = torch.ones(1)
        optimizer.step()
        work.append(work_of(optimizer.sync_from_params))
        optimizer.close()
    assert work[1] < 12 * work[0], 'eight times as many'


def test_a_group_that_went_is_not_kept(job):
    a, b = layers(), layers()
    groups = [{'params': [(f'{side}.{name}', p) for name, p in model.named_parameters()]} for side, model in (('a', a), ('b', b))]
    optimizer = bt.AdamW(groups, lr=0.1, **job)
    del groups
    gone = weakref.ref(a[0].weight)
    del optimizer.param_groups[0], a
    backward(b)
    optimizer.step()
    assert gone() is None


def test_groups_and_names_as_torch_takes_them():
    one, two = torch.zeros(1), torch.zeros(2)
    assert split_named([one, two]) == ([{'params': [one, two]}], [[None, None]])
    assert split_named([('module.a', one), ('b', two)]) == ([{'params': [one, two]}], [['a', 'b']])
    assert split_named({'params': one, 'lr': 1}) == ([{'params': [one], 'lr': 1}], [[None]])
    assert split_named([{'params': [one], 'param_names': ['a']}, {'params': [two]}]) == (
        [{'params': [one]}, {'params': [two]}], [['a'], [None]])
    with pytest.raises(ValueError, match='2 param_names for 1 parameters'):
        split_named({'params': [one], 'param_names': ['a', 'b']})
    with pytest.raises(TypeError, match='as a set'):
        split_named({one, two})
