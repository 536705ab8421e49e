"""States in torch.optim's format: from torch's optimizers into jobs, from jobs into torch's, from job to job."""
import copy
import io
import itertools

import pytest
import torch
from conftest import PAIRS
from own_process import run
from scripts import batches, loss_of, mlp

import ballast
import ballast.torch as bt
from ballast.torch.job.moments import KNOWN

LOADS = {**PAIRS, 'lion': (bt.Lion, bt.Lion, {'lr': 1e-3, 'weight_decay': 0.1}),
         'schedule_free': (bt.AdamWScheduleFree, bt.AdamWScheduleFree, {'warmup_steps': 7})}


def train(model, optimizer, first, last):
    for batch in itertools.islice(batches(last), first, None):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def saved(model, optimizer):
    """As a file has it."""
    file = io.BytesIO()
    full = getattr(optimizer, 'full_state_dict', optimizer.state_dict)()
    torch.save({'model': model.state_dict(), 'optimizer': full}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def loaded(checkpoint, make, model):
    model.load_state_dict(checkpoint['model'])
    optimizer = make(model)
    optimizer.load_state_dict(checkpoint['optimizer'])
    return optimizer


def assert_models_close(model, expected):
    for (name, value), other in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f'{name}: {m}')


@pytest.mark.parametrize('pair', PAIRS)
def test_a_state_of_torchs_goes_on_here(pair, job):
    ours, theirs, arguments = PAIRS[pair]
    twin, model = mlp(), mlp()
    theirs_optimizer = theirs(twin.parameters(), **arguments)
    train(twin, theirs_optimizer, 0, 5)
    checkpoint = saved(twin, theirs_optimizer)
    # The groups' hyper-parameters come with the state.
    optimizer = loaded(checkpoint, lambda m: ours(m.named_parameters(), **{**arguments, 'lr': 77.0}, **job), model)
    assert optimizer.param_groups[0]['lr'] == arguments['lr']
    for (_, value), other in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(value, other)
        entry = theirs_optimizer.state[other]
        for key in entry.keys() & KNOWN:
            if entry[key] is not None:
                assert torch.equal(optimizer.state[value][key], entry[key])
    train(twin, theirs_optimizer, 5, 10)
    train(model, optimizer, 5, 10)
    assert_models_close(model, twin)


@pytest.mark.parametrize('pair', PAIRS)
def test_a_state_of_ours_goes_on_in_torch(pair, job):
    ours, theirs, arguments = PAIRS[pair]
    model, twin = mlp(), mlp()
    optimizer = ours(model.named_parameters(), **arguments, **job)
    train(model, optimizer, 0, 5)
    theirs_optimizer = loaded(saved(model, optimizer), lambda m: theirs(m.parameters(), **arguments), twin)
    train(model, optimizer, 5, 10)
    train(twin, theirs_optimizer, 5, 10)
    assert_models_close(twin, model)


@pytest.mark.parametrize('pair', LOADS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_from_job_to_job_with_the_same_bits(pair, dtype, job):
    ours, _, arguments = LOADS[pair]
    model, twin = mlp().to(dtype), mlp().to(dtype)
    optimizer = ours(model.named_parameters(), **arguments, **job)
    train(model, optimizer, 0, 5)
    checkpoint = saved(model, optimizer)
    second = loaded(checkpoint, lambda m: ours(m.named_parameters(), **arguments, **{**job, 'name': job['name'] + 'b'}), twin)
    train(model, optimizer, 5, 10)
    train(twin, second, 5, 10)
    for value, other in zip(twin.parameters(), model.parameters()):
        assert torch.equal(value, other)


def test_8_bit_moments(job):
    model, twin = mlp(), mlp()
    optimizer = bt.AdamW8bit(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, 0, 5)
    second = loaded(saved(model, optimizer), lambda m: bt.AdamW8bit(m.named_parameters(), **{**job, 'name': job['name'] + 'b'}),
                    twin)
    # The same codes; a block's scale, which is not in the state, may differ in its last bit.
    for value, other in zip(twin.parameters(), model.parameters()):
        for key in ('exp_avg', 'exp_avg_sq'):
            torch.testing.assert_close(second.state[value][key], optimizer.state[other][key], rtol=1e-6, atol=0)
    train(model, optimizer, 5, 10)
    train(twin, second, 5, 10)
    assert_models_close(twin, model)


@pytest.mark.parametrize('batch_bytes', [1, 1100, 1 << 20])
def test_into_a_job_that_has_made_steps(batch_bytes, job, monkeypatch):
    """As torch's: what the job had is replaced, what the model has is kept. In however many transactions."""
    monkeypatch.setattr('ballast.torch.states.writing._BATCH_BYTES', batch_bytes)
    twin, model = mlp(), mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, theirs, 0, 5)
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-3, **job)
    train(model, optimizer, 0, 3)
    checkpoint = saved(twin, theirs)
    model.load_state_dict(checkpoint['model'])
    before = optimizer.job.opened.session.version
    optimizer.load_state_dict(checkpoint['optimizer'])
    assert optimizer.job.opened.session.version - before == {1: 12, 1100: 6, 1 << 20: 2}[batch_bytes]  # of each moment
    assert optimizer.resume().step == 5
    train(twin, theirs, 5, 10)
    train(model, optimizer, 5, 10)
    assert optimizer.state[model[0].weight]['step'] == 10
    assert_models_close(model, twin)


def test_states_without_an_entry_start_anew(job):
    """A parameter that had no gradient yet, as torch saves it."""
    twin, model = mlp(), mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for batch in batches(3):
        theirs.zero_grad()
        loss_of(twin, batch).backward()
        twin[0].bias.grad = None
        theirs.step()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, 0, 2)
    checkpoint = saved(twin, theirs)
    assert len(checkpoint['optimizer']['state']) == 5
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    assert optimizer.state[model[0].bias]['step'] == 0
    train(twin, theirs, 3, 8)
    train(model, optimizer, 3, 8)
    assert_models_close(model, twin)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(job):
    model, twin = mlp(), mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, theirs, 0, 2)
    good = theirs.state_dict()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-3, **job)
    train(model, optimizer, 0, 2)
    version = optimizer.job.opened.session.version

    def refused(match, **changes):
        bad = copy.deepcopy(good)
        for key, value in changes.items():
            if value is None:
                del bad['state'][2][key]
            else:
                bad['state'][2][key] = value
        with pytest.raises(ballast.Error, match=match):
            optimizer.load_state_dict(bad)
        assert optimizer.job.opened.session.version == version and optimizer.param_groups[0]['lr'] == 1e-3

    refused("'2.weight' has no 'exp_avg_sq'", exp_avg_sq=None)
    refused("'2.weight' has no 'step'", step=None)
    refused(r"'exp_avg' of parameter '2.weight' has shape \[63\], but the parameter has \[64\]", exp_avg=torch.zeros(63))
    refused("'2.weight' has 'momentum_buffer', which", momentum_buffer=torch.zeros(64))
    refused("'exp_avg' of parameter '2.weight' has an Inf", exp_avg=torch.full((64,), float('nan')))
    refused("'exp_avg_sq' of parameter '2.weight' is a mean of squares", exp_avg_sq=torch.full((64,), -1.0))
    refused("'step' of parameter '2.weight' is 1.5", step=torch.tensor(1.5))
    refused("'exp_avg' of parameter '2.weight' is not a floating-point tensor", exp_avg=[1.0] * 64)
    sgd = torch.optim.SGD(twin.parameters(), lr=1e-2, momentum=0.9)
    train(twin, sgd, 2, 3)
    with pytest.raises(ballast.Error, match="'0.weight' has 'momentum_buffer'"):
        optimizer.load_state_dict(sgd.state_dict())
    with pytest.raises(ballast.Error, match="group 0 has amsgrad=True, and the job was made with amsgrad=False"):
        optimizer.load_state_dict(torch.optim.AdamW(twin.parameters(), amsgrad=True).state_dict())
    train(model, optimizer, 2, 3)


@pytest.mark.parametrize('steps_made', [0, 2])
def test_a_frozen_parameters_state_is_there_when_it_thaws(steps_made, job):
    model, twin = mlp(), mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, theirs, 0, 3)
    model[0].weight.requires_grad_(False)
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, 0, steps_made)
    checkpoint = saved(twin, theirs)
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    model[0].weight.requires_grad_(True)
    train(twin, theirs, 3, 6)
    train(model, optimizer, 3, 6)
    assert optimizer.state[model[0].weight]['step'] == 6
    assert_models_close(model, twin)


def test_an_empty_state_is_loaded_before_the_first_step(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-3, **job)
    optimizer.load_state_dict(torch.optim.AdamW(mlp().parameters(), lr=0.5).state_dict())
    assert optimizer.param_groups[0]['lr'] == 0.5 and optimizer.job.opened is None


NONE = '''
model = mlp()
optimizer = make(model, durability='none', directory=None, nvme=None)
data = list(batches(12))
if os.path.exists('saved.pt'):
    saved = torch.load('saved.pt', weights_only=True)
    model.load_state_dict(saved['model'])
    optimizer.load_state_dict(saved['optimizer'])
for i in range(optimizer.resume().step, 12):
    optimizer.zero_grad()
    loss_of(model, data[i]).backward()
    optimizer.step()
    if i == 5 and 'STOP' in os.environ:
        torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'saved.pt')
        sys.exit()
torch.save(model.state_dict(), 'model.pt')
'''


def test_a_job_that_keeps_nothing_goes_on_from_its_state_dict(tmp_path):
    whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
    whole.mkdir()
    stopped.mkdir()
    run(whole, NONE)
    run(stopped, NONE, STOP='1')
    run(stopped, NONE)
    expected = torch.load(whole / 'model.pt')
    for name, value in torch.load(stopped / 'model.pt').items():
        assert torch.equal(value, expected[name]), name


CUT_OFF = '''
class Mortal:
    """A session whose process dies behind the commit of this many arrays."""
    def __init__(self, session, left):
        self._session, self._left = session, left
    def __getattr__(self, name):
        return getattr(self._session, name)
    def commit_state(self, *arguments):
        report = self._session.commit_state(*arguments)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return report

def train(model, optimizer, first, last):
    for batch in list(batches(last))[first:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

model = mlp()
optimizer = make(model, resume='auto')
if not os.path.exists('saved.pt'):
    twin = mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(twin, theirs, 0, 4)
    torch.save({'model': twin.state_dict(), 'optimizer': theirs.state_dict()}, 'saved.pt')
    train(model, optimizer, 0, 3)
    kept = optimizer.state_dict()
    torch.save(kept, 'kept.pt')
saved = torch.load('saved.pt', weights_only=True)
if os.path.exists('died'):
    for use in (optimizer.resume, optimizer.state_dict, optimizer.full_state_dict, lambda: train(model, optimizer, 0, 1)):
        try:
            use()
        except ballast.Error as error:
            assert error.reason == 'INCOMPLETE' and 'load_state_dict() again' in str(error), error
        else:
            raise AssertionError('a state that is not whole was used')
left = int(os.environ['LEFT'])
if left >= 0:
    open('died', 'w').close()
    if optimizer.job.opened is None:
        optimizer.resume()
    optimizer.job.opened.session = Mortal(optimizer.job.opened.session, left)
if 'ROLLBACK' in os.environ:
    optimizer.load_state_dict(torch.load('kept.pt', weights_only=True))
    assert optimizer.resume().step == 3
    assert optimizer.state[model[0].weight]['step'] == 3
    sys.exit()
model.load_state_dict(saved['model'])
optimizer.load_state_dict(saved['optimizer'])
assert optimizer.resume().step == 4
assert all(torch.equal(p, saved['model'][n]) for n, p in model.named_parameters())
train(model, optimizer, 4, 8)
torch.save(model.state_dict(), 'model.pt')
'''


@pytest.mark.parametrize('arrays', [1, 2])
def test_a_load_that_was_cut_off_is_made_again(arrays, tmp_path):
    run(tmp_path, CUT_OFF, expect=-9, LEFT=str(arrays))
    run(tmp_path, CUT_OFF, LEFT='-1')
    twin = mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    checkpoint = torch.load(tmp_path / 'saved.pt')
    twin.load_state_dict(checkpoint['model'])
    theirs.load_state_dict(checkpoint['optimizer'])
    train(twin, theirs, 4, 8)
    model = mlp()
    model.load_state_dict(torch.load(tmp_path / 'model.pt'))
    assert_models_close(model, twin)


def test_a_load_that_was_cut_off_can_be_rolled_back(tmp_path):
    run(tmp_path, CUT_OFF, expect=-9, LEFT='2')
    run(tmp_path, CUT_OFF, LEFT='-1', ROLLBACK='1')


def test_a_whole_load_stands_whatever_dies_next(tmp_path):
    """Masters of the edited model, two moments: behind the third commit nothing is missing."""
    run(tmp_path, CUT_OFF, expect=-9, LEFT='3')
    body = CUT_OFF[:CUT_OFF.index("if os.path.exists('died')")] + '''
assert optimizer.resume().step == 4
assert all(torch.equal(p, saved['model'][n]) for n, p in model.named_parameters())
assert torch.equal(optimizer.state[model[3].bias]['exp_avg'], saved['optimizer']['state'][5]['exp_avg'])
'''
    run(tmp_path, body)
