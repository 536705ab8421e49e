"""What is written to optimizer.state: assigning takes effect as in torch.optim, writing to the copies that it gives raises."""
import copy
from collections import defaultdict

import pytest
import state_ways
import torch
from conftest import PAIRS
from scripts import batches, loss_of, mlp
from test_ranks import run_ranks

import ballast
import ballast.torch as bt


def train(model, optimizer, count, first=0):
    for batch in list(batches(first + count))[first:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def set_empty(optimizer, _):
    optimizer.state = defaultdict(dict)


def clear(optimizer, _):
    optimizer.state.clear()


def entry_empty(optimizer, p):
    optimizer.state[p] = {}


def delete(optimizer, p):
    del optimizer.state[p]


def pop(optimizer, p):
    optimizer.state.pop(p)


def pop_and_put_back(optimizer, p):
    optimizer.state[p] = optimizer.state.pop(p)


def delete_and_put_back(optimizer, p):
    entry = optimizer.state[p]
    del optimizer.state[p]
    optimizer.state[p] = entry


def delete_and_put_back_halved(optimizer, p):
    """As programs do that prune a parameter, or let it grow."""
    entry = optimizer.state[p]
    del optimizer.state[p]
    for key, value in entry.items():
        if key != 'step' and value is not None:
            entry[key] = value * 0.5
    optimizer.state[p] = entry


def clear_and_put_back(optimizer, _):
    entries = dict(optimizer.state)
    optimizer.state = defaultdict(dict)
    for p, entry in entries.items():
        optimizer.state[p] = entry


def halve(optimizer, p):
    optimizer.state[p] = {key: value if key == 'step' or value is None else value * 0.5 for key, value in optimizer.state[p].items()}


def set_halved(optimizer, _):
    optimizer.state = {p: {key: value if key == 'step' or value is None else value * 0.5 for key, value in optimizer.state[p].items()}
                       for group in optimizer.param_groups for p in group['params']}


def step_back(optimizer, p):
    optimizer.state[p] = {**optimizer.state[p], 'step': torch.tensor(0.0)}


WRITES = [set_empty, clear, entry_empty, delete, pop, pop_and_put_back, delete_and_put_back, delete_and_put_back_halved, clear_and_put_back,
          halve, set_halved, step_back]
# torch's Adagrad makes its state when it is made, and cannot do without; its SGD has no step, and without momentum no entry.
CASES = [('adamw', write) for write in WRITES] + [('sgd_momentum', write) for write in WRITES if write is not step_back]
CASES += [(pair, write) for pair in PAIRS for write in (set_empty, halve)
          if pair not in ('adamw', 'sgd_momentum') and (pair, write) != ('adagrad', set_empty)]


@pytest.mark.parametrize('pair,write', CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
def test_assigning_is_as_in_torch(pair, write, job):
    ours, theirs, arguments = PAIRS[pair]
    model = mlp()
    twin = copy.deepcopy(model)
    mine, other = ours(model.named_parameters(), **arguments, **job), theirs(twin.parameters(), **arguments)
    for each, optimizer in ((model, mine), (twin, other)):
        train(each, optimizer, 2)
        write(optimizer, each[0].weight)
        train(each, optimizer, 2, first=2)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f'{name}: {m}')
        if 'step' in other.state[q]:
            assert mine.state[p]['step'] == other.state[q]['step']
    assert mine.resume().step == 4  # the loop's own
    mine.close()


@pytest.mark.parametrize('write', [
    lambda entry: entry['exp_avg'].zero_(), lambda entry: entry['exp_avg'].mul_(0.5), lambda entry: entry['exp_avg'].view(-1)[3:].fill_(1),
    lambda entry: entry['exp_avg'].data.copy_(torch.ones(64, 16)), lambda entry: setattr(entry['exp_avg'], 'data', torch.ones(64, 16)),
    lambda entry: entry['exp_avg'].__setitem__(0, 1.0),
    lambda entry: torch.mul(torch.ones(64, 16), 2, out=entry['exp_avg']), lambda entry: torch._foreach_zero_([entry['exp_avg_sq']]),
    lambda entry: torch.nn.init.zeros_(entry['exp_avg']), lambda entry: entry['step'].fill_(0), lambda entry: entry['step'].add_(1),
    lambda entry: entry.__setitem__('exp_avg', torch.zeros(64, 16)), lambda entry: entry.update(step=0), lambda entry: entry.clear(),
    lambda entry: entry.update(extra=1, step=0), lambda entry: entry.__setitem__('exp_avg', entry['exp_avg'] * 1.0000001),
    lambda entry: entry.__setitem__('exp_avg', entry['exp_avg'].double()), lambda entry: entry.__setitem__('exp_avg', None),
    lambda entry: entry.__ior__({'step': 1}),
    lambda entry: entry.pop('exp_avg'), lambda entry: entry.__delitem__('step')])
@pytest.mark.parametrize('inference', [False, True])
def test_writing_to_a_copy_raises_and_names_what_does(write, inference, job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    before = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
    with torch.inference_mode(inference), pytest.raises(ballast.Error, match=r'write optimizer.state\[p\] = \{\*\*optimizer.state\[p\]'):
        write(optimizer.state[model[0].weight])
    after = optimizer.state[model[0].weight]
    assert after.keys() == before.keys() and all(torch.equal(value, before[key]) for key, value in after.items())
    with pytest.raises(ValueError, match='read-only'):
        after['exp_avg'].numpy()[:] = 1
    optimizer.close()


@pytest.mark.parametrize('steps', [0, 2])
def test_a_key_of_another_optimizer_is_refused_with_the_way_to_keep_it(steps, job):
    """As filters of gradients have it, which keep an average of their own beside the optimizer's."""
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, steps)
    p = model[0].weight
    with pytest.raises(ballast.Error, match=r"\['momentum_buffer'\] is a moment of another optimizer.* under another key, such as 'my_mom"):
        optimizer.state[p]['momentum_buffer'] = torch.zeros(64, 16)
    with pytest.raises(ballast.Error, match=r"has 'momentum_buffer'.* A value of your own needs another key"):
        optimizer.state[p] = {**optimizer.state[p], 'momentum_buffer': torch.zeros(64, 16)}
    optimizer.state[p]['my_momentum_buffer'] = torch.ones(64, 16)
    train(model, optimizer, 1)
    assert torch.equal(optimizer.state[p]['my_momentum_buffer'], torch.ones(64, 16))
    optimizer.close()


def in_place(state, to):
    for entry in state.values():
        for key, value in entry.items():
            entry[key] = to(value)


def by_data(state, to):
    for entry in state.values():
        for value in entry.values():
            value.data = to(value.data)


def by_update(state, to):
    for entry in state.values():
        entry.update({key: to(value) for key, value in entry.items()})


def whole(state, to):
    for parameter in state:
        state[parameter] = {key: to(value) for key, value in state[parameter].items()}


@pytest.mark.parametrize('move', [in_place, by_data, by_update, whole])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_values_that_are_there_already_are_no_write(move, dtype, job):
    """As a framework does that moves state to another device."""
    model = mlp().to(dtype)
    optimizer = bt.AdamW(model.named_parameters(), **job)
    move(optimizer.state, lambda value: value.to('cpu'))  # before the first step
    train(model, optimizer, 2)
    for to in (lambda value: value.to('cpu'), torch.clone, lambda value: value.clone().t().contiguous().t() if value.dim() == 2 else value):
        move(optimizer.state, to)
    assert optimizer.job.opened.session.version == 2  # no transaction was made
    stale = {p: dict(entry) for p, entry in optimizer.state.items()}
    train(model, optimizer, 1, first=2)
    with pytest.raises(ballast.Error, match='is a copy of what the servers hold'):
        optimizer.state[model[0].weight].update(stale[model[0].weight])
    optimizer.close()


def test_an_entry_is_as_it_is_now(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    entry = optimizer.state[model[0].weight]
    assert entry == {} and 'step' not in entry and entry.get('exp_avg') is None
    train(model, optimizer, 2)
    assert list(entry) == ['step', 'exp_avg', 'exp_avg_sq'] and entry['step'] == 2
    assert isinstance(entry, dict) and dict(entry).keys() == {**entry}.keys() == (entry | {}).keys() == entry.copy().keys() == entry.keys()
    with pytest.raises(KeyError, match='momentum_buffer'):
        entry.pop('momentum_buffer')
    assert entry.pop('momentum_buffer', None) is None
    train(model, optimizer, 1, first=2)
    assert entry['step'] == 3
    optimizer.close()


@pytest.mark.parametrize('kind', ['moments', 'named'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_what_others_keep_stays_in_the_trainer(kind, dtype, job, tmp_path):
    """As torch.optim has it: kept by parameter, in the state_dict, and gone with an entry that another takes the place of."""
    def script(make):
        torch.manual_seed(2)
        model = mlp().to(dtype)
        optimizer = make(model)
        first, second = model[0].weight, model[0].bias
        train(model, optimizer, 1)
        optimizer.state[first]['e_w'] = torch.full((3,), 0.1, dtype=torch.float64)
        optimizer.state[first].setdefault('counts', {'seen': 1, 'kept': torch.tensor(2.0)})
        optimizer.state[second].update(old_p=torch.ones(64), e_w=1)
        train(model, optimizer, 1, first=1)
        seen = [key for p in (first, second) for key in optimizer.state[p] if key in ('e_w', 'counts', 'old_p')]
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state[first]['e_w'].zero_()
        assert not optimizer.state[first]['e_w'].any()
        del optimizer.state[second]['e_w']
        optimizer.state[second].pop('old_p')
        optimizer.state[second]['new'] = 1
        optimizer.state[first] = {key: value for key, value in optimizer.state[first].items() if key != 'e_w'}
        seen += [key for p in (first, second) for key in optimizer.state[p] if key in ('e_w', 'counts', 'old_p', 'new')]
        optimizer.load_state_dict(saved)
        seen += [(key, torch.as_tensor(value).dtype, torch.as_tensor(value).sum().item()) for p in (first, second)
                 for key, value in optimizer.state[p].items() if key in ('e_w', 'old_p', 'new')]
        seen += [optimizer.state[first]['counts']]
        optimizer.state.clear()
        seen += [len(optimizer.state.get(p, {})) if isinstance(optimizer, torch.optim.AdamW) else 'e_w' in optimizer.state[p]
                 for p in (first, second)]
        return seen
    more = {'directory': tmp_path / 'state', 'nvme': '1GiB'} if kind == 'named' else {}
    optimizers = []

    def ours(model):
        optimizers.append(bt.AdamW(model.named_parameters(), lr=1e-2, **job, **more))
        return optimizers[0]
    assert script(ours) == script(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizers[0].close()


def test_a_look_opens_no_job(job, tmp_path):
    """It would bring the job's parameters in the place of those that the model has just loaded."""
    job |= {'directory': tmp_path / 'state', 'nvme': '1GiB', 'states': 'full'}
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2, first=2)
    whole = copy.deepcopy(model.state_dict())
    optimizer.close()

    model.load_state_dict(saved[0])
    optimizer = bt.AdamW(model.named_parameters(), **job, resume='auto')
    for entry in optimizer.state.values():  # as Lightning, before it loads a checkpoint
        assert entry == {}
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, 2, first=2)
    assert all(map(torch.equal, model.state_dict().values(), whole.values()))
    optimizer.close()

    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job, resume='auto')
    with pytest.warns(UserWarning, match=r"goes on from step 4 .* call optimizer.resume\(\) before the first forward pass"):
        train(model, optimizer, 1)
    optimizer.close()


@pytest.mark.parametrize('take', [lambda state, p: state.pop(p), lambda state, p: state.__delitem__(p), lambda state, p: state.clear(),
                                  lambda state, p: state.__setitem__(p, {**state[p], 'exp_avg': state[p]['exp_avg'] * 2})])
def test_an_entry_that_was_taken_away_is_a_dict_of_its_values(take, job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    p = model[0].weight
    optimizer.state[p]['note'] = 7
    entry = optimizer.state[p]
    had = {key: value if key == 'note' else value.clone() for key, value in entry.items()}
    take(optimizer.state, p)
    train(model, optimizer, 1, first=2)
    assert list(entry) == list(had) and entry['note'] == 7
    assert all(torch.equal(entry[key], had[key]) for key in ('step', 'exp_avg', 'exp_avg_sq'))
    entry['exp_avg'].zero_()
    entry.update(step=1, more=2)
    del entry['note']
    assert entry.pop('exp_avg_sq') is not None and list(entry) == ['step', 'exp_avg', 'more'] and not entry['exp_avg'].any()
    entry.clear()
    assert not entry and optimizer.state[p]['exp_avg'].any()
    optimizer.close()


def test_an_entry_of_a_parameter_that_left_its_group_is_there_still(job):
    """Programs put another in its place first, and move the state then."""
    def script(make):
        torch.manual_seed(2)
        model = mlp()
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        old, group = model[3].weight, optimizer.param_groups[0]
        model[3].weight = torch.nn.Parameter(torch.cat([old.detach(), old.detach()]))
        model[3].bias = torch.nn.Parameter(torch.zeros(8))
        group['params'] = list(model.parameters())
        assert old in optimizer.state and optimizer.state.get(old)['step'] == 2
        entry = optimizer.state.pop(old)
        optimizer.state[model[3].weight] = {key: value if key == 'step' else torch.cat([value, value]) for key, value in entry.items()}
        train(model, optimizer, 2, first=2)
        return optimizer, list(model.parameters())
    optimizer, mine = script(lambda params: bt.AdamW(params, lr=1e-2, **job))
    _, theirs = script(lambda params: torch.optim.AdamW(params, lr=1e-2))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_a_state_that_another_took_the_place_of_does_not_come_back_empty(job):
    """torch's still has what it had; ours tells how to keep that."""
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    state, copies = optimizer.state, {p: dict(entry) for p, entry in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state = state  # the one that was cleared
    optimizer.state = copies
    state = optimizer.state
    optimizer.state = defaultdict(dict)
    with pytest.raises(ballast.Error, match=r'Keep copies, \{p: dict\(entry\) for p, entry in optimizer.state.items\(\)\}'):
        optimizer.state = state
    assert optimizer.state[model[0].weight]['step'] == 0
    optimizer.state = copies
    assert optimizer.state[model[0].weight]['step'] == 2
    optimizer.close()


def test_an_entry_of_before_leaves_masters_as_they_are(job):
    """Of 16-bit parameters, which have moved since: torch's entry has no master."""
    masters = []
    for kind in ('whole', 'without masters'):
        torch.manual_seed(2)
        model = mlp().bfloat16()
        optimizer = bt.AdamW(model.named_parameters(), lr=1e-3, **{**job, 'name': f"{job['name']}-{kind[:5]}"})
        train(model, optimizer, 2)
        kept = {p: {key: value for key, value in entry.items() if key != 'master' or kind == 'whole'}
                for p, entry in optimizer.state.items()}
        train(model, optimizer, 2, first=2)
        optimizer.state = kept
        masters.append([optimizer.job.read_master(p) for p in model.parameters()])
        optimizer.close()
    assert all(map(torch.equal, *masters))


def test_the_way_that_pickles_take(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    optimizer.__setstate__(optimizer.__getstate__())
    assert optimizer.state[model[0].weight]['step'] == 2
    optimizer.__setstate__({'state': {}})
    assert optimizer.state[model[0].weight]['step'] == 0
    optimizer.close()


def test_copies_are_tensors_like_others(job, tmp_path):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    entry = optimizer.state[model[0].weight]
    for plain in (entry['exp_avg'] * 2, entry['exp_avg'].clone(), copy.deepcopy(entry)['exp_avg'], torch.stack([entry['exp_avg']])):
        assert type(plain) is torch.Tensor
        plain.zero_()
    torch.save(entry, tmp_path / 'entry.pt')
    loaded = torch.load(tmp_path / 'entry.pt', weights_only=True)
    assert loaded.keys() == entry.keys() and torch.equal(loaded['exp_avg'], entry['exp_avg']) and type(loaded['step']) is torch.Tensor
    (entry['exp_avg_sq'] * model[0].weight.square()).sum().backward()  # autograd may keep one
    optimizer.close()


def test_what_does_not_fit_is_refused(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    train(model, optimizer, 2)
    p = model[0].weight
    entry = optimizer.state[p]
    for value, text in (({'step': 1}, "'0.weight' has no 'exp_avg'"), (3, "'0.weight' is a int"),
                        ({**optimizer.state[p], 'exp_avg': torch.zeros(3)}, r"'exp_avg' of parameter '0.weight' has shape \[3\]")):
        with pytest.raises(ballast.Error, match=text):
            optimizer.state[p] = value
    with pytest.raises(KeyError, match='in none of the param_groups'):
        optimizer.state[torch.zeros(1)] = {}
    with pytest.raises(KeyError, match='in none of the param_groups'):
        optimizer.state = {torch.zeros(1): {}}
    with pytest.raises(ballast.Error, match='expected a dict of dicts'):
        optimizer.state = None
    assert optimizer.state[p]['step'] == 2
    optimizer.state = optimizer.state
    assert optimizer.state[p]['step'] == 2
    train(model, optimizer, 1, first=2)
    assert entry['step'] == 3  # what was refused took no entry away
    optimizer.close()


def test_before_the_first_step_there_is_no_state(job):
    """As in torch, and no server is started."""
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), **job)
    assert optimizer.state[model[0].weight] == {}
    optimizer.state.clear()
    optimizer.state = {}
    assert optimizer.job.opened is None


def test_a_reset_outlives_the_process_that_made_it(tmp_path):
    with state_ways.server(tmp_path / 'server') as address:
        model, twin = mlp(), mlp()
        twin.load_state_dict(model.state_dict())
        other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, servers=address)
        train(model, optimizer, 3)
        train(twin, other, 3)
        optimizer.state = {}
        other.state = defaultdict(dict)
        optimizer.close()
        model = mlp()
        optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, servers=address, resume='must')
        assert optimizer.resume().step == 3 and optimizer.state[model[0].weight]['step'] == 0
        train(model, optimizer, 2, first=3)
        train(twin, other, 2, first=3)
        for p, q in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        optimizer.close()


def test_two_ranks_write_the_same_or_nothing(tmp_path):
    (told, mine), (other_told, other) = run_ranks('state_writes', tmp_path)[0]
    assert told == other_told == [True, True]
    for p, q in zip(mine, other):
        assert torch.equal(p, q)
