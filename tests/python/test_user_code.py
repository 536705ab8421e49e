"""What loops do to an optimizer between its steps: each takes effect as in torch, or is refused by name."""
import gc
import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.job.opened import OpenJob


def backward(model):
    model(torch.ones(1, 4)).sum().backward()


def two_layers():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def test_an_import_takes_nothing_but_ballast_with_it():
    """torch's further parts (distributed.tensor, _dynamo) take seconds to import, and other packages may not be there."""
    script = 'import sys, torch; there = set(sys.modules); import ballast.torch; print(*set(sys.modules) - there)'
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    packages = {name.split('.')[0] for name in done.stdout.split()}
    assert packages - sys.stdlib_module_names == {'ballast', 'nanobind_backend'}, done.stdout


@pytest.mark.parametrize('wrap', [set, frozenset, lambda params: [{'params': set(params)}]])
def test_a_set_has_no_order(wrap, job):
    with pytest.raises(TypeError, match='came as a set, whose order changes'):
        bt.AdamW(wrap(two_layers().parameters()), **job)


def test_names_follow_their_parameters(job):
    """A group that was filtered after construction, as by frameworks that freeze layers."""
    model = two_layers()
    first, second = model.parameters()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    optimizer.param_groups[0]['params'] = [second]
    backward(model)
    optimizer.step()
    assert [(member.name, member.parameter is second) for member in optimizer.job.members] == [('1.weight', True)]
    optimizer.param_groups[0]['params'] = [second, first]
    optimizer.step()
    assert [member.name for member in optimizer.job.members] == ['1.weight', '0.weight']
    assert optimizer.state[second]['step'] == 2 and optimizer.state[first]['step'] == 1


def test_a_parameter_in_the_place_of_another_has_its_name(job):
    """Accelerate replaces parameters by sharded ones."""
    model = two_layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]['params'] = list(model.parameters())
    backward(model)
    optimizer.step()
    assert [member.name for member in optimizer.job.members] == ['0.weight', '1.weight']


def test_a_parameter_that_was_appended_has_no_name(job):
    model = two_layers()
    optimizer = bt.AdamW(model[0].named_parameters(), lr=0.1, **job)
    optimizer.param_groups[0]['params'].append(model[1].weight)
    backward(model)
    optimizer.step()
    assert [member.name for member in optimizer.job.members] == ['weight', 'group0.1[4x4]']


def test_a_loaded_learning_rate_is_a_copy(job):
    model = two_layers()
    optimizer = bt.AdamW(model.named_parameters(), lr=torch.tensor(0.1), **job)
    saved = optimizer.state_dict()
    other = bt.AdamW(two_layers().named_parameters(), lr=torch.tensor(0.3), **{**job, 'name': job['name'] + 'b'})
    other.load_state_dict(saved)
    other.param_groups[0]['lr'].mul_(0.5)
    assert float(optimizer.param_groups[0]['lr']) == float(saved['param_groups'][0]['lr']) == pytest.approx(0.1)


def test_parameters_that_became_wider_are_refused(job):
    model = two_layers().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model.float()
    optimizer.zero_grad()
    backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ballast.Error, match="'0.weight' is torch.float32, the job's are bf16"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.skipif(not hasattr(torch.Tensor, 'grad_dtype'), reason='this torch has no grad_dtype')
def test_gradients_that_would_be_rounded_are_refused(job):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    optimizer = bt.SGD([('p', parameter)], lr=1.0, **job)
    parameter.grad = torch.tensor([1.001, 1.002, 1.003])
    with pytest.raises(ballast.Error, match="'p' has a gradient of torch.float32, the job's are bf16"):
        optimizer.step()


def test_a_wrapper_of_other_tensors_is_refused(job):
    from torch.testing._internal.two_tensor import TwoTensor
    parameter = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    parameter.grad = torch.ones(3)
    optimizer = bt.SGD([('p', parameter)], lr=1.0, **job)
    with pytest.raises(ballast.Error, match="'p' is a TwoTensor, a wrapper of other tensors"):
        optimizer.step()


def test_a_blob_is_bytes(job):
    optimizer = bt.AdamW(two_layers().named_parameters(), **job)
    with pytest.raises(TypeError, match=r'step\(blob=str\): expected bytes'):
        optimizer.step(blob='7')


def test_a_step_without_gradients_counts_and_keeps_its_blob(job, tmp_path):
    """A batch that the loop has passed over must not come again."""
    model = two_layers()
    more = {**job, 'directory': str(tmp_path / 'state'), 'nvme': '512MiB'}
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, **more)
    backward(model)
    optimizer.step(blob=b'1')
    moments = optimizer.state[model[0].weight]['exp_avg'].clone()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step(blob=b'2')
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    optimizer.close()
    again = bt.AdamW(model.named_parameters(), lr=0.1, **{**more, 'resume': 'must'})
    assert again.resume() == (2, b'2')
    assert again.state[model[0].weight]['step'] == 1
    assert torch.equal(again.state[model[0].weight]['exp_avg'], moments)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_jobs_durability_is_its_own(job, tmp_path):
    model = two_layers()
    more = {**job, 'directory': str(tmp_path / 'state'), 'nvme': '512MiB'}
    optimizer = bt.AdamW(model.named_parameters(), lr=0.1, durability='every-K', pin_interval=3, **more)
    backward(model)
    optimizer.step()
    optimizer.close()
    other = bt.AdamW(model.named_parameters(), lr=0.1, durability='step', **{**more, 'resume': 'auto'})
    with pytest.raises(ballast.Error, match='the job has durability every-K with pin_interval 3, this session asks for step'):
        other.resume()


def test_a_second_optimizer_that_takes_a_job_over_says_so(job):
    model = two_layers()
    first = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    backward(model)
    first.step()
    second = bt.AdamW(two_layers().named_parameters(), lr=0.1, **{**job, 'resume': 'auto'})
    with pytest.warns(UserWarning, match=f"job '{job['name']}' was open in another optimizer of this process"):
        second.resume()
    second.close()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        third = bt.AdamW(two_layers().named_parameters(), lr=0.1, **{**job, 'name': job['name'] + 'b', 'resume': 'auto'})
        third.resume()
    del first


def before_the_first_step(job):
    """A state that a job with steps refuses."""
    return bt.AdamW(two_layers().named_parameters(), lr=0.1, **{**job, 'resume': 'auto'}).state_dict()


def test_a_refused_load_leaves_the_job_that_it_found(job):
    """Also one that no disk has, as the advice to load nothing and go on needs."""
    model = two_layers()
    first = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    for _ in range(3):
        backward(model)
        first.step()
    moment = first.state[model[0].weight]['exp_avg']
    second = bt.AdamW(model.named_parameters(), lr=0.1, **{**job, 'resume': 'auto'})
    with pytest.raises(ballast.Error, match='To go on from them, load nothing'), pytest.warns(UserWarning, match='was open in another'):
        second.load_state_dict(before_the_first_step(job))
    assert job['name'] in ballast.jobs()
    with pytest.warns(UserWarning, match='was open in another'):
        assert second.resume().step == 3
    assert torch.equal(second.state[model[0].weight]['exp_avg'], moment)
    first.close()
    assert job['name'] in ballast.jobs()
    second.close()
    assert job['name'] not in ballast.jobs()


def test_ctrl_c_amid_an_open(job, monkeypatch):
    """A job that was found stays, one that was made goes."""
    def interrupted():
        raise KeyboardInterrupt

    def interrupt(optimizer):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(OpenJob, 'take_blob', lambda _: interrupted())
            optimizer.resume()
    model = two_layers()
    first = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    interrupt(first)
    assert job['name'] not in ballast.jobs()
    backward(model)
    first.step()
    second = bt.AdamW(model.named_parameters(), lr=0.1, **{**job, 'resume': 'auto'})
    with pytest.warns(UserWarning, match='was open in another'):
        interrupt(second)
        assert second.resume().step == 1


def test_without_a_directory_the_folder_of_a_closed_optimizer_is_left(tmp_path):
    script = '''
import os, torch, ballast, ballast.torch as bt
model = torch.nn.Linear(4, 4)
def make(**more):
    return bt.AdamW(model.named_parameters(), dram='64MiB', threads=1, **more)
durable = make(directory='state', nvme='512MiB')
durable.resume()
beside = make(name='beside')  # shares the server
beside.resume()
assert ballast.jobs('state') == ['beside', 'default']
durable.close()
beside.close()
other = make()
assert other.resume().step == 0
assert ballast.jobs() == ['default']
other.close()
assert ballast.jobs() == [], ballast.jobs()
assert ballast.jobs('state') == ['beside', 'default']
'''
    subprocess.run([sys.executable, '-c', script], check=True, cwd=tmp_path)


def test_an_optimizer_that_only_a_cycle_keeps_is_in_nobodys_way(job, tmp_path):
    """Of a trainer that another has taken the place of: Lightning's fit() a second time, with a Trainer of its own."""
    def fit(**more):
        trainer = {'optimizer': bt.AdamW(two_layers().named_parameters(), lr=0.1, **{**job, **more})}
        trainer['loop'] = trainer
        assert trainer['optimizer'].resume().step == 0
        backward(model)
        trainer['optimizer'].step()
    model = two_layers()
    gc.disable()
    try:
        fit()
        fit()
        fit(directory=tmp_path / 'state', nvme='512MiB')
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            again = bt.AdamW(two_layers().named_parameters(), lr=0.1, resume='auto', directory=tmp_path / 'state', nvme='512MiB', **job)
            assert again.resume().step == 1
    finally:
        gc.enable()
    again.close()


def test_a_call_amid_an_open_is_told(job, monkeypatch):
    """A signal's handler that saves a checkpoint."""
    optimizer = bt.AdamW(two_layers().named_parameters(), lr=0.1, **job)
    opened = optimizer.job.connection.open

    def interrupted(*arguments, **more):
        with pytest.raises(ballast.Error, match='is being opened by a call that this call interrupted'):
            optimizer.full_state_dict()
        return opened(*arguments, **more)
    monkeypatch.setattr(optimizer.job.connection, 'open', interrupted)
    assert optimizer.resume().step == 0
    optimizer.full_state_dict()


def test_a_directory_is_where_the_constructor_was(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'elsewhere').mkdir()
    script = '''
import os, sys, torch, ballast.torch as bt
model = torch.nn.Linear(4, 4)
optimizer = bt.AdamW(model.named_parameters(), directory='state', dram='128MiB', nvme='512MiB', threads=1)
os.chdir('elsewhere')
optimizer.resume()
'''
    subprocess.run([sys.executable, '-c', script], check=True)
    assert (tmp_path / 'state').is_dir() and not os.listdir(tmp_path / 'elsewhere')


def test_a_call_after_the_server_has_ended_is_refused_at_once(tmp_path):
    script = '''
import atexit, time
import ballast

def late():
    began = time.monotonic()
    try:
        optimizer.state_dict()
    except ballast.Error as error:
        print(error.reason, time.monotonic() - began < 60)
atexit.register(late)  # before the package registers its own, so that this one runs after it

import torch, ballast.torch as bt
model = torch.nn.Linear(4, 4)
optimizer = bt.AdamW(model.named_parameters(), directory='state', dram='128MiB', nvme='512MiB', threads=1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
'''
    script = script.replace('import ballast\n\ndef', 'import sys\n\ndef', 1).replace('except ballast.Error', 'except RuntimeError')
    done = subprocess.run([sys.executable, '-c', script], check=True, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.stdout.split() == ['SERVER_DOWN', 'True']


def test_parameters_that_other_processes_may_write_to_are_told(tmp_path):
    """Hogwild: each process's step undoes what the others wrote, but to parameters that are their own masters, those in fp32."""
    (tmp_path / 'hogwild.py').write_text('''
import torch, torch.multiprocessing as mp, ballast.torch as bt
def train(*models):
    for model in models:
        bt.SGD(model.named_parameters(), name=str(model.weight.dtype)[6:], lr=0.1, dram='64MiB', threads=1).resume()
if __name__ == '__main__':
    models = [torch.nn.Linear(2, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    train(*models)
    for model in models:
        model.share_memory()
    child = mp.get_context('spawn').Process(target=train, args=models)
    child.start()
    child.join()
    assert child.exitcode == 0
''', encoding='utf-8')
    done = subprocess.run([sys.executable, 'hogwild.py'], check=True, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.stderr.count("parameter 'weight' lies in memory that is shared with other processes") == 1, done.stderr


def test_a_warning_that_is_an_error_leaves_no_use_of_the_server(job):
    """A job that is open in another optimizer: its server is free once the other is closed."""
    from ballast import embedded
    model = two_layers()
    first = bt.AdamW(model.named_parameters(), lr=0.1, **job)
    backward(model)
    first.step()
    before = len(embedded._running.uses)
    second = bt.AdamW(model.named_parameters(), lr=0.1, **job, resume='auto')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(UserWarning, match='was open in another optimizer of this process'):
            second.resume()
        assert len(embedded._running.uses) == before
        first.close()
        assert len(embedded._running.uses) == before - 1
        second.close()
    assert len(embedded._running.uses) == before - 1


def test_an_optimizer_that_left_its_folder_finds_it_again(job, tmp_path):
    """Another, that names no folder and opens meanwhile, shares the server instead of starting one."""
    from ballast import embedded
    more = {**job, 'directory': str(tmp_path / 'state'), 'nvme': '512MiB', 'resume': 'auto'}
    model = two_layers()
    first = bt.AdamW(model.named_parameters(), lr=0.1, **more)
    state = bt.AdamW(two_layers().named_parameters(), lr=0.1, **more).state_dict()
    backward(model)
    first.step()
    first.close()
    again = bt.AdamW(model.named_parameters(), lr=0.1, **more)
    with pytest.raises(ballast.Error, match='was taken before its job was open'):
        again.load_state_dict(state)
    other = bt.AdamW(two_layers().named_parameters(), lr=0.1, **{**job, 'name': job['name'] + '-other'})
    other.resume()
    assert again.resume().step == 1
    again.close()
    other.close()
    assert embedded.directory_in_use() is None


def test_a_warning_is_at_the_script_in_a_folder_called_torch(tmp_path):
    script = str(tmp_path / 'torch' / 'train.py')
    names = {}
    exec(compile("import ballast.errors\ndef loop():\n    ballast.errors.warn('that')\n", script, 'exec'), names)
    with pytest.warns(UserWarning, match='that') as warned:
        names['loop']()
    assert (warned[0].filename, warned[0].lineno) == (script, 3)
