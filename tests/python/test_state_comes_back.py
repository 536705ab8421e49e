"""States from before the first step, states of other jobs, and loads that are refused and then made as the refusal advises."""
import copy
import itertools

import pytest
import state_ways
import torch
from scripts import batches, loss_of, mlp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ballast
import ballast.torch as bt
from ballast.torch.states import marker

_jobs = itertools.count()


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    with state_ways.server(tmp_path_factory.mktemp('state') / 'server') as address:
        yield address


@pytest.fixture
def make(server):
    """An optimizer of a job of this test's, on the server, where it is durable unless told."""
    made, name = [], f'job{next(_jobs)}'

    def optimizer(model, **more):
        made.append(bt.AdamW(model.named_parameters(), **{'lr': 1e-2, 'name': name, 'servers': server, **more}))
        return made[-1]
    yield optimizer
    for each in made:
        each.close()


def train(model, optimizer, count, first=0):
    for batch in list(batches(first + count))[first:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def assert_same(model, twin):
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('durability', ['step', 'none'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('resume', ['never', 'auto'])
def test_a_learning_rate_finder_leaves_nothing_behind(durability, dtype, resume, make):
    """As those of Lightning, fastai and torch_lr_finder: save model and optimizer, train on, load both."""
    model = mlp().to(dtype)
    untouched = copy.deepcopy(model)
    optimizer = make(model, durability=durability, resume=resume)
    saved = copy.deepcopy({'model': model.state_dict(), 'optimizer': optimizer.state_dict()})
    optimizer.param_groups[0]['lr'] = 0.5
    train(model, optimizer, 4)
    model.load_state_dict(saved['model'])
    optimizer.load_state_dict(saved['optimizer'])
    assert optimizer.param_groups[0]['lr'] == 1e-2 and optimizer.resume().step == 0
    assert optimizer.state[model[0].weight]['step'] == 0
    train(model, optimizer, 4)
    other = make(untouched, durability=durability, name=optimizer.job.options.job + '-untouched')
    train(untouched, other, 4)
    for p, q in zip(model.parameters(), untouched.parameters()):
        assert torch.equal(p, q)


def test_a_checkpoint_of_step_0_is_not_overridden_by_the_job(make):
    model = mlp()
    first = make(model)
    saved = copy.deepcopy({'model': model.state_dict(), 'optimizer': first.state_dict()})
    train(model, first, 3)
    first.close()
    model = mlp()
    model.load_state_dict(saved['model'])
    again = make(model, resume='auto')
    again.load_state_dict(saved['optimizer'])
    assert again.resume().step == 0 and again.state[model[0].weight]['step'] == 0
    for name, value in saved['model'].items():
        assert torch.equal(value, model.state_dict()[name])


def test_one_that_does_not_say_which_state_it_is_is_refused(make):
    """Of resume='auto', before the job was open: of a job that has made steps since nobody knows."""
    model = mlp()
    first = make(model, resume='auto')
    saved = copy.deepcopy(first.state_dict())
    train(model, first, 3)
    first.close()
    second = make(mlp(), resume='auto')
    second.load_state_dict(second.state_dict())  # Accelerate's prepare() does, of an optimizer that is not open: nothing comes of it
    words = r"does not say which state that was. Job '\w+' has made 3 steps.*call resume\(\) before"
    with pytest.raises(ballast.Error, match=words) as error:
        second.load_state_dict(saved)
    assert second.job.opened is None and second.resume().step == 3
    kept = second.state_dict()
    train(model, second, 1, first=3)
    with pytest.raises(ballast.Error, match='does not say which state that was') as error:
        second.load_state_dict(saved)
    assert error.value.reason == 'BAD_SPEC'
    second.load_state_dict(kept)
    assert second.resume().step == 3


def test_one_of_the_version_that_the_job_was_found_at_changes_nothing(make):
    model = mlp()
    first = make(model)
    train(model, first, 2)
    first.close()
    second = make(model, resume='must')
    saved = second.state_dict()
    second.resume()
    saved['param_groups'][0]['lr'] = 0.5
    second.load_state_dict(saved)
    assert second.resume().step == 2 and second.param_groups[0]['lr'] == 0.5


def test_torchs_state_of_no_steps_begins_anew(make):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    first = make(model)
    train(model, first, 2)
    first.close()
    other = torch.optim.AdamW(twin.named_parameters(), lr=1e-2)
    model.load_state_dict(twin.state_dict())
    second = make(model, resume='auto')
    second.load_state_dict(other.state_dict())
    train(model, second, 3)
    train(twin, other, 3)
    assert_same(model, twin)


@pytest.mark.parametrize('state', ['gone', 'missing', 'other'])
def test_a_refused_load_leaves_nothing_behind(state, make):
    """With the exception and what it holds kept, as in a notebook."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    said = marker.of(saved['param_groups'])
    wrong = copy.deepcopy(saved)
    change, name, text = {'gone': ({'version': 1}, said.job, 'VERSION_GONE'),
                          'missing': ({'job': said.job + 'x'}, said.job + 'x', 'JOB_MISSING'),
                          'other': ({'job': 'another'}, said.job, "of job 'another' at version 2, but this optimizer is of")}[state]
    wrong['param_groups'][0][marker.KEY] = said._replace(**change).tensor()
    model = mlp()
    second = make(model, name=name, lr=0.5)
    kept = []
    with pytest.raises(ballast.Error, match=text) as refused:
        second.load_state_dict(wrong)
    kept.append(refused)
    assert second.job.opened is None and second.job.options.resume == 'never' and second.param_groups[0]['lr'] == 0.5
    if state == 'missing':
        train(model, second, 1)  # a new job, as it had been
        assert second.resume().step == 1
    else:
        with pytest.raises(ballast.Error, match='JOB_EXISTS'):
            second.resume()  # and not the job that was opened for the load
        second.load_state_dict(saved)
        assert second.resume().step == 2
    assert kept


def test_versions_of_two_jobs_are_not_mixed():
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 4))
    first = bt.AdamW([{'params': [('0.weight', model[0].weight)]}, {'params': [('1.weight', model[1].weight)]}], name='mix')
    state = first.state_dict()
    state['param_groups'][1][marker.KEY] = marker.of(state['param_groups'])._replace(job='other').tensor()
    with pytest.raises(ballast.Error, match="group 0 is of job 'mix' at version -1, group 1 of job 'other'"):
        first.load_state_dict(state)
    del state['param_groups'][1][marker.KEY]
    with pytest.raises(ballast.Error, match="group 0 is of a job's state_dict.., and group 1 is not"):
        first.load_state_dict(state)
    state['param_groups'][1][marker.KEY] = state['param_groups'][0][marker.KEY] = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ballast.Error, match='which no state_dict.. of ballast.torch has'):
        first.load_state_dict(state)


def test_the_version_of_an_earlier_job_of_that_name_is_refused(make):
    """Also where the job happens to be at that version."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = make(model, name=optimizer.job.options.job + '-later')
    train(model, other, 2)
    said = marker.of(saved['param_groups'])
    saved['param_groups'][0][marker.KEY] = said._replace(job=other.job.options.job).tensor()
    with pytest.raises(ballast.Error, match="is of an earlier job 'job"):
        other.load_state_dict(saved)


@pytest.mark.parametrize('options', [{}, {'flatten_optimizer_state_dict': True}, {'full_state_dict': True, 'cpu_offload': True}])
def test_param_groups_stay_torchs(options, make):
    """Nothing of what torch's functions take along stays in the optimizer, and schedulers go on."""
    model = mlp()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    train(model, optimizer, 1, first=2)
    schedule.step()
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**options))
    assert optimizer.resume().step == 2 and optimizer.param_groups[0]['lr'] == 1e-2
    assert not any(isinstance(value, torch.Tensor) for value in optimizer.param_groups[0].values())
    schedule.step()
    train(model, optimizer, 1, first=2)
    assert 'params' in optimizer.full_state_dict()['param_groups'][0] and marker.KEY not in optimizer.full_state_dict()['param_groups'][0]


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_torchs_functions_take_moments_into_an_optimizer_that_made_no_step(flat, dtype, make):
    """Of a job that is not durable, and masters of 16-bit parameters, with the same bits."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = mlp().to(dtype)
    optimizer = make(model, durability='none')
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimizer, options=options)))
    other = mlp().to(dtype)
    other.load_state_dict(saved[0])
    second = make(other, durability='none', name=optimizer.job.options.job + '-second')
    set_optimizer_state_dict(other, second, saved[1], options=options)
    train(model, optimizer, 2, first=3)
    train(other, second, 2, first=3)
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize('ours,arguments', [(bt.AdamW, {}), (bt.SGD, {'momentum': 0.9}), (bt.SGD, {'momentum': 0.9, 'dampening': 0.1}),
                                            (bt.Adagrad, {'initial_accumulator_value': 0.5}), (bt.Lion, {}), (bt.AdEMAMix, {})])
def test_distributed_checkpoint_by_hand_into_an_optimizer_that_made_no_step(ours, arguments, job, tmp_path):
    """It reads what its template has: all of the state, or the load is refused by name."""
    import torch.distributed.checkpoint as dcp
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    first = ours(model.named_parameters(), lr=1e-3, **arguments, **job)
    train(model, first, 3)
    dcp.save({'model': model.state_dict(), 'optimizer': first.full_state_dict()}, checkpoint_id=tmp_path)
    second = ours(twin.named_parameters(), lr=1e-3, **arguments, **{**job, 'name': job['name'] + '-second'})
    saved = {'model': twin.state_dict(), 'optimizer': second.full_state_dict()}
    dcp.load(saved, checkpoint_id=tmp_path)
    twin.load_state_dict(saved['model'])
    if arguments.get('dampening'):
        with pytest.raises(ballast.Error, match="the state of parameter '0.weight' has no 'momentum_buffer'"):
            second.load_state_dict(saved['optimizer'])
    else:
        second.load_state_dict(saved['optimizer'])
        train(model, first, 2, first=3)
        train(twin, second, 2, first=3)
        for p, q in zip(model.parameters(), twin.parameters()):
            assert torch.equal(p, q)
    unopened = ours(twin.named_parameters(), lr=1e-3, **arguments, **{**job, 'name': job['name'] + '-third'})
    with pytest.raises(dcp.api.CheckpointException, match=r'Missing key in checkpoint state_dict: optimizer\.param_groups\.0\.ballast'):
        dcp.load({'optimizer': unopened.state_dict()}, checkpoint_id=tmp_path)
    for each in (first, second):
        each.close()


@pytest.mark.parametrize('options', [{}, {'flatten_optimizer_state_dict': True}])
def test_a_named_state_is_no_state_of_a_job_that_is_not_durable(options, make):
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, 2)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    for name in (optimizer.job.options.job, optimizer.job.options.job + '-other'):
        other = bt.AdamW(model.named_parameters(), dram='256MiB', threads=2, name=name)  # as the fixture `job` has it
        train(model, other, 2)  # at the same version
        with pytest.raises(ballast.Error, match="of an earlier job|give it name=|flattened state has no 'step' of parameter '0.weight'"):
            set_optimizer_state_dict(model, other, copy.deepcopy(saved), options=StateDictOptions(**options))
        assert other.state[model[0].weight]['step'] == 2
        other.close()
