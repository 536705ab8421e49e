"""One rank of test_apart.py: apart_main.py FOLDER, as agreement_main.py, of ranks that come apart within a call, or make different ones."""
import contextlib
import functools
import sys

import torch
import torch.distributed as dist
from agreement_main import backward, make, model_of, parameters_of, run_cases, told
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.job import registration
from ballast.torch.ranks import groups
from ballast.torch.tensors import marks

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def stepped(**more):
    """A model and its optimizer, of the calling case's name, after a step."""
    model = model_of()
    optimizer = make(model.named_parameters(),
                     **{'name': sys._getframe(1).f_code.co_name, 'step_timeout': 60.0, 'open_timeout': 60.0, **more})
    backward(model)
    optimizer.step()
    return model, optimizer


def step_of(model, optimizer):
    backward(model)
    return told(optimizer.step)


class Failing:
    """A session one of whose calls fails on rank 1."""

    def __init__(self, session, call):
        self._session, self._call = session, call

    def __getattr__(self, name):
        if name == self._call and dist.get_rank() == 1:
            def fail(*_):
                raise ballast.Error('no server answers', 'SERVER_DOWN')
            return fail
        return getattr(self._session, name)


@contextlib.contextmanager
def failing(optimizer, call):
    session = optimizer.job.opened.session
    optimizer.job.opened.session = Failing(session, call)
    yield
    optimizer.job.opened.session = session


# --- errors of one rank behind the first agreement of its call

@case
def a_load_of_another_dtype():
    """Of a parameter that was frozen, and registers with the load."""
    model = model_of()
    model[3].bias.requires_grad_(False)
    optimizer = make(model.named_parameters(), step_timeout=60.0, open_timeout=60.0)
    backward(model)
    optimizer.step()
    state = optimizer.full_state_dict()
    last = len(list(model.parameters())) - 1
    state['state'][last] = {'step': torch.tensor(3.0), 'exp_avg': torch.ones(4), 'exp_avg_sq': torch.ones(4)}
    if dist.get_rank() == 1:
        model[3].bias.data = model[3].bias.data.double()
    first = told(lambda: optimizer.load_state_dict(state))
    model[3].bias.data = model[3].bias.data.float()
    return first, told(lambda: optimizer.load_state_dict(state)), step_of(model, optimizer)


@case
def a_load_where_one_rank_wants_a_gradient():
    model = model_of()
    model[3].bias.requires_grad_(False)
    optimizer = make(model.named_parameters(), step_timeout=60.0, open_timeout=60.0)
    backward(model)
    optimizer.step()
    state = optimizer.full_state_dict()
    model[3].bias.requires_grad_(dist.get_rank() == 0)
    first = told(lambda: optimizer.load_state_dict(state))
    model[3].bias.requires_grad_(True)
    return first, told(lambda: optimizer.load_state_dict(state)), step_of(model, optimizer)


@case
def an_entry_beside_another_shape():
    model, optimizer = stepped()
    before = model[3].bias.data
    if dist.get_rank() == 1:
        model[3].bias.data = torch.zeros(5)
    first = told(lambda: optimizer.state.__setitem__(model[0].weight, {}))
    model[3].bias.data = before
    return first, told(lambda: optimizer.state.__setitem__(model[0].weight, {})), step_of(model, optimizer)


@case
def a_rollback_into_another_shape():
    folder = f'{sys.argv[1]}/rollback'
    model, optimizer = stepped(directory=folder, nvme='1GiB')
    optimizer.state_dict()
    version = optimizer.versions()[-1]
    step_of(model, optimizer)
    before = model[3].bias.data
    if dist.get_rank() == 1:
        model[3].bias.data = torch.zeros(5)
    first = told(lambda: optimizer.rollback(version))
    model[3].bias.data = before
    return first, told(lambda: optimizer.rollback(version)), step_of(model, optimizer)


@case
def an_edit_whose_master_one_rank_cannot_read():
    model, optimizer = stepped()
    backward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with failing(optimizer, 'read_part'):
        first = told(optimizer.step)
    return first, told(optimizer.step), step_of(model, optimizer)


@case
def a_load_whose_master_one_rank_cannot_read():
    model, optimizer = stepped()
    state = optimizer.full_state_dict()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    with failing(optimizer, 'read_part'):
        first = told(lambda: optimizer.load_state_dict(state))
    return first, told(lambda: optimizer.load_state_dict(state)), step_of(model, optimizer)


@case
def an_export_that_one_rank_has_not():
    _, optimizer = stepped(name='exported')
    folder = f'{sys.argv[1]}/export'
    if dist.get_rank() == 0:
        bt.export_state(optimizer, folder)
    dist.barrier()
    model, other = stepped()
    first = told(lambda: bt.import_state(other, folder if dist.get_rank() == 0 else folder + '/none'))
    return first, told(lambda: bt.import_state(other, folder)), step_of(model, other)


# --- a registration that was cut off

class Interrupted:
    """A session whose initialise() is not reached, on any rank."""

    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)

    def initialise(self, *_):
        raise KeyboardInterrupt


def grown_step(model, late, optimizer, i):
    backward(model, seed=i)
    late.grad = torch.tensor([1.0, -2.0, 3.0]) * (i + 1)
    optimizer.step()


def torchs_steps():
    """Parameters after three steps, and two more with `late`."""
    model, late = model_of(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        backward(model, seed=i)
        optimizer.step()
    optimizer.add_param_group({'params': [late]})
    for i in (3, 4):
        grown_step(model, late, optimizer, i)
    return torch.cat([parameters_of(model), late.detach()])


@case
def a_registration_that_was_cut_off():
    """The next group of ranks gets the trained values, and `late` is compared."""
    more = {'directory': f'{sys.argv[1]}/cut_off', 'nvme': '1GiB', 'step_timeout': 60.0}
    model, late = model_of(), nn.Parameter(torch.ones(3))
    optimizer = make(model.named_parameters(), **more)
    for i in range(3):
        backward(model, seed=i)
        optimizer.step()
    trained = parameters_of(model)
    optimizer.add_param_group({'params': [('late', late)]})
    optimizer.job.opened.session = Interrupted(optimizer.job.opened.session)
    with contextlib.suppress(KeyboardInterrupt):
        grown_step(model, late, optimizer, 3)
    optimizer.close()
    model, late = model_of(seed=20 + dist.get_rank()), nn.Parameter(torch.ones(3) + dist.get_rank())
    optimizer = make([{'params': list(model.named_parameters())}, {'params': [('late', late)]}], resume='must', **more)
    told_first = told(optimizer.resume)
    late.data.fill_(1)
    result = optimizer.resume().step, torch.equal(parameters_of(model), trained), torch.equal(late, torch.ones(3))
    for i in (3, 4):
        grown_step(model, late, optimizer, i)
    return told_first, result, torch.cat([parameters_of(model), late.detach()]) - torchs_steps()


@case
def a_registration_that_one_rank_could_not_end():
    model, optimizer = stepped()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({'params': [('late', late)]})
    real = registration.Memory
    def fail(*_):
        raise ballast.Error('no memory', 'BUDGET')
    if dist.get_rank() == 1:
        registration.Memory = fail
    first = told(lambda: grown_step(model, late, optimizer, 3))
    registration.Memory = real
    return first, told(lambda: grown_step(model, late, optimizer, 3)), step_of(model, optimizer)


# --- different calls

@case
def sync_on_one_rank():
    model, optimizer = stepped()
    backward(model)
    first = told(optimizer.sync_from_params if dist.get_rank() == 0 else optimizer.step)
    return first, told(optimizer.step), step_of(model, optimizer)


@case
def a_load_on_one_rank():
    model, optimizer = stepped()
    state = optimizer.full_state_dict()
    backward(model)
    first = told((lambda: optimizer.load_state_dict(state)) if dist.get_rank() == 1 else optimizer.step)
    return first, told(lambda: optimizer.load_state_dict(state)), step_of(model, optimizer)


@case
def a_load_on_one_rank_before_the_job_is_open():
    model = model_of()
    optimizer = make(model.named_parameters(), resume='auto', step_timeout=60.0, open_timeout=60.0)
    state = torch.optim.AdamW(model.parameters()).state_dict()
    first = told((lambda: optimizer.load_state_dict(state)) if dist.get_rank() == 1 else optimizer.resume)
    return first, told(lambda: optimizer.load_state_dict(state)), step_of(model, optimizer)


@case
def a_rollback_on_one_rank():
    model, optimizer = stepped()
    backward(model)
    first = told((lambda: optimizer.rollback(0)) if dist.get_rank() == 1 else optimizer.step)
    return first, told(optimizer.step), step_of(model, optimizer)


def found(name):
    """A job of two steps, the first of them kept, as another process finds it: a model of other values, an optimizer, the kept version."""
    more = {'directory': f'{sys.argv[1]}/{name}', 'nvme': '1GiB', 'name': name, 'step_timeout': 60.0}
    model, optimizer = stepped(**more)
    optimizer.state_dict()
    version = optimizer.versions()[-1]
    backward(model)
    optimizer.step()
    optimizer.close()
    dist.barrier()
    other = model_of(seed=5)
    return other, make(other.named_parameters(), resume='must', **more), version, parameters_of(model)


@case
def a_rollback_on_one_rank_of_a_job_that_was_found():
    model, optimizer, version, expected = found('found_resume')
    first = told((lambda: optimizer.rollback(version)) if dist.get_rank() == 0 else optimizer.resume)
    kept = torch.equal(parameters_of(model), parameters_of(model_of(seed=5)))
    resumed = told(optimizer.resume)
    assert kept and torch.equal(parameters_of(model), expected)
    return first, resumed, step_of(model, optimizer)


@case
def a_rollback_beside_a_step_of_a_job_that_was_found():
    model, optimizer, version, _ = found('found_step')
    first = told((lambda: optimizer.rollback(version)) if dist.get_rank() == 0 else lambda: (backward(model), optimizer.step()))
    return first, told(lambda: optimizer.rollback(version)), step_of(model, optimizer)


@case
def a_rollback_that_was_refused():
    """Then one rank alone may ask for a state_dict."""
    model, optimizer, version, expected = found('found_refused')
    first = told(lambda: optimizer.rollback(77))
    if dist.get_rank() == 0:
        optimizer.state_dict()
    dist.barrier()
    resumed = told(optimizer.resume)
    assert torch.equal(parameters_of(model), expected)
    optimizer.job.opened.unpulled = True  # as after Ctrl-C behind a step
    if dist.get_rank() == 0:
        optimizer.full_state_dict()
        optimizer.state_dict()
        assert version in optimizer.versions()
    dist.barrier()
    return first, resumed, step_of(model, optimizer)


@case
def an_edit_that_one_rank_could_not_write():
    """Rank 0 has written it. Each of the calls leads on from there."""
    results = []
    for way in ('load', 'rollback', 'step', 'sync', 'late'):
        model, optimizer = stepped(name=f'half_{way}', directory=f'{sys.argv[1]}/half_{way}', nvme='1GiB')
        state = optimizer.full_state_dict()
        named = optimizer.state_dict()
        assert named
        version = optimizer.job.opened.session.version
        before = parameters_of(model)
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with failing(optimizer, 'read_part'):
            results.append(told(optimizer.sync_from_params if way == 'sync' else optimizer.step))
        late = nn.Parameter(torch.ones(3))
        if way == 'sync':  # as if .data had been written to: no counter tells
            marks.note(optimizer.job.members)
        if way == 'late':
            late.grad = torch.ones(3)
            optimizer.add_param_group({'params': [('late', late)]})
        act = {'load': functools.partial(optimizer.load_state_dict, state),
               'rollback': functools.partial(optimizer.rollback, version)}.get(way, optimizer.step)
        results.append(told(act))
        if way == 'rollback':
            assert torch.equal(parameters_of(model), before)
        if way == 'load':
            assert torch.equal(parameters_of(model), before / 2)
        results.append(step_of(model, optimizer))
        for member in optimizer.job.members:
            assert torch.equal(optimizer.job.read_master(member.parameter), member.parameter), member.name
        optimizer.close()
    return results


@case
def entries_of_different_parameters():
    model, optimizer = stepped()
    parameters = list(model.parameters())
    first = told(lambda: optimizer.state.__setitem__(parameters[dist.get_rank()], {}))
    return first, told(lambda: optimizer.state.__setitem__(parameters[0], {})), step_of(model, optimizer)


# --- gradients

@case
def debug_on_one_rank():
    model, optimizer = stepped(debug=dist.get_rank() == 0)
    same = [step_of(model, optimizer) for _ in range(3)]
    backward(model, seed=7 + dist.get_rank())
    return same, told(optimizer.step), step_of(model, optimizer)


@case
def an_inf_among_gradients():
    """On both ranks, whose last bits differ: the step is skipped. On one alone: it is told."""
    model, optimizer = stepped()
    results = []
    for value, on in ((float('inf'), (0, 1)), (float('nan'), (0, 1)), (float('inf'), (1,))):
        backward(model)
        for member in optimizer.job.members:
            member.agreed = False
        gradient = model[0].weight.grad
        if dist.get_rank() in on:
            gradient[0, 0] = value
        if dist.get_rank() == 1:
            gradient[1, 1] *= 1 + 1e-6
        results.append((told(optimizer.step), optimizer.last_step_skipped))
    return results, step_of(model, optimizer), parameters_of(model)


# --- the first rank's process is gone

@case
def no_store():
    server = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore('127.0.0.1', server.port, is_master=False)
    del server
    real = groups.Group.torchs_store
    groups.Group.torchs_store = property(lambda group: client)
    try:
        return [told(act) for act in (lambda: groups.of().exchange('a test', 2.0)(b''), lambda: groups.of().store('test').decide('x'),
                                      make(nn.Linear(2, 2).named_parameters(), step_timeout=2.0, open_timeout=1.0).resume)]
    finally:
        groups.Group.torchs_store = real


if __name__ == '__main__':
    run_cases(CASES, 'apart')
