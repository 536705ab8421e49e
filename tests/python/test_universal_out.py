"""A job saved as a universal checkpoint: the layout, one tensor at a time, refusals, and saves that do not end."""
import os
import pathlib
import signal
import textwrap
import weakref

import pytest
import torch
from own_process import Process
from universal_deepspeed import AFTER, ARGUMENTS, BEFORE, model_of
from universal_ours import GROUPS, TAG, losses, of, state_of

import ballast.torch as bt
from ballast import Error
from ballast.torch.universal import layout, saving

HERE = pathlib.Path(__file__).parent


def trained(job, steps=BEFORE, **more):
    model = model_of(width=7)
    optimizer = of(model, job, **{**ARGUMENTS, **more})
    losses(model, optimizer, 0, steps)
    return model, optimizer


def test_layout(job, tmp_path):
    """All that DeepSpeed's loaders read, of both layouts, and one tensor in memory at a time."""
    model, optimizer = trained(job)
    path = pathlib.Path(bt.save_universal(optimizer, tmp_path, lr_scheduler={'last_batch_iteration': 3}, client_state={'cursor': 9}))
    assert path == tmp_path / TAG and (tmp_path / layout.LATEST).read_text() == TAG
    assert sorted(os.listdir(tmp_path)) == [TAG, layout.LATEST]
    state = state_of(optimizer, model)
    for name, entry in state.items():
        assert sorted(os.listdir(path / 'zero' / name)) == ['exp_avg.pt', 'exp_avg_sq.pt', 'fp32.pt', 'step.pt']
        for what, file in layout.FILES.items():
            assert torch.equal(torch.load(path / 'zero' / name / file, weights_only=True)['param'], entry[what])
        assert torch.equal(torch.load(path / 'zero' / name / 'step.pt', weights_only=True), torch.tensor(float(BEFORE)))
    held = torch.load(path / layout.OPTIMIZER, weights_only=True)
    assert held['ds_version'] and [{key: group[key] for key in GROUPS[0]} for group in held['param_groups']] == GROUPS
    of_zero3 = held['optimizer_state_dict']
    assert of_zero3['state'][0]['step'] == BEFORE and 'weight_decay' not in of_zero3['param_groups'][0]
    for file in (layout.MODEL, layout.MODEL_ZERO3):
        states = torch.load(path / file, weights_only=True)
        expected = {'global_steps': BEFORE, 'skipped_steps': 0, 'dp_world_size': 1, 'mp_world_size': 1,
                    'lr_scheduler': {'last_batch_iteration': 3}, 'cursor': 9}
        assert {key: states[key] for key in expected} == expected
    again = model_of(width=7)
    other = of(again, {**job, 'name': job['name'] + '-again'})
    assert bt.load_universal(other, tmp_path) == (BEFORE, {'last_batch_iteration': 3}, {'cursor': 9})
    assert losses(again, other) == losses(model, optimizer)


def test_one_tensor_at_a_time(job, tmp_path, monkeypatch):
    _, optimizer = trained(job)
    alive, most = [], []

    def read(*arguments):
        most.append(sum(each() is not None for each in alive))
        tensor = real(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor
    real = saving.read_array
    monkeypatch.setattr(saving, 'read_array', read)
    bt.save_universal(optimizer, tmp_path)
    assert len(most) == 18 and max(most) == 0


def test_edits_are_saved(job, tmp_path):
    model, optimizer = trained(job)
    with torch.no_grad():
        model[3].bias.copy_(torch.arange(5.0))
    path = bt.save_universal(optimizer, tmp_path)
    assert torch.equal(torch.load(os.path.join(path, 'zero', '3.bias', 'fp32.pt'))['param'], torch.arange(5.0))


def test_save_refused(job, tmp_path):
    model, optimizer = trained(job)
    path = bt.save_universal(optimizer, tmp_path)
    with pytest.raises(Error, match='is there already; give another tag'):
        bt.save_universal(optimizer, tmp_path)
    with pytest.raises(Error, match='cannot be the name of a folder'):
        bt.save_universal(optimizer, tmp_path, '../other')
    with pytest.raises(Error, match="the key 'param_shapes', which is DeepSpeed's own"):
        bt.save_universal(optimizer, tmp_path, 'other', client_state={'param_shapes': 1})
    model[0].weight.requires_grad_(False)
    losses(model, optimizer)
    model[0].weight.requires_grad_(True)
    with pytest.raises(Error, match=f"'0.weight' has made {BEFORE} steps and '3.weight' {BEFORE + AFTER}"):
        bt.save_universal(optimizer, tmp_path, 'other')
    assert os.listdir(tmp_path / TAG) and sorted(os.listdir(tmp_path)) == [TAG, layout.LATEST] and path


def test_save_that_fails(job, tmp_path, monkeypatch):
    """A full disk, say: nothing is left, and the job goes on."""
    _, optimizer = trained(job)

    def save(*_):
        raise RuntimeError('unexpected pos 64 vs 0')
    monkeypatch.setattr(torch, 'save', save)
    with pytest.raises(Error, match='cannot be written: unexpected pos') as raised:
        bt.save_universal(optimizer, tmp_path)
    assert raised.value.reason == 'IO' and os.listdir(tmp_path) == []
    monkeypatch.undo()
    assert bt.save_universal(optimizer, tmp_path)


KILLED = textwrap.dedent('''
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    import torch
    from universal_deepspeed import ARGUMENTS, BEFORE, groups_of, loss_of, model_of
    import ballast.torch as bt
    from ballast.torch.universal import saving
    folder, module, name, calls = sys.argv[2], *sys.argv[3].split('.'), int(sys.argv[4])
    model = model_of(width=7)
    optimizer = bt.AdamW(groups_of(model, named=True), dram='64MiB', threads=1, **ARGUMENTS)
    def step(i):
        optimizer.zero_grad()
        loss_of(model, i, rank=0).backward()
        optimizer.step()
    step(0)
    bt.save_universal(optimizer, folder, 'first')
    step(1)
    where = {'saving': saving, 'os': os}[module]
    real, left = getattr(where, name), [calls]
    def dies(*arguments):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    setattr(where, name, dies)
    bt.save_universal(optimizer, folder, 'second')
    ''')


@pytest.mark.parametrize(('where', 'calls'), [('saving._save', 0), ('saving._save', 11), ('saving._save', 26), ('os.rename', 0),
                                              ('os.replace', 0)])
def test_killed_save(job, tmp_path, where, calls):
    """A folder with a checkpoint's name is a whole one, and `latest_universal` names one."""
    script, folder = tmp_path / 'killed.py', tmp_path / 'saved'
    script.write_text(KILLED)
    process = Process(script, tmp_path, tmp_path / 'log', HERE, folder, where, calls)
    assert process.wait() == -signal.SIGKILL, process.output
    assert (folder / layout.LATEST).read_text() == 'first'
    named = where == 'os.replace'
    assert (folder / 'second').exists() == named and (folder / '.second.unfinished').exists() != named
    model = model_of(width=7)
    optimizer = of(model, job)
    assert bt.load_universal(optimizer, folder).step == 1
    if named:
        assert bt.load_universal(optimizer, folder, 'second').step == 2
    else:
        bt.save_universal(optimizer, folder, 'second')
        assert (folder / layout.LATEST).read_text() == 'second' and not (folder / '.second.unfinished').exists()
