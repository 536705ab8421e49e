"""DeepSpeed's universal checkpoints: against DeepSpeed where it is installed, and against what it left in two archives."""
import copy
import importlib.util
import os
import pathlib
import pickle
import shutil

import pytest
import torch
from own_process import Process, free_port
from universal_deepspeed import ARGUMENTS, BEFORE, model_of
from universal_ours import GROUPS, TAG, close, differing, losses, of, state_of, unpacked

import ballast.torch as bt
from ballast import Error
from ballast.torch.universal import layout

HERE = pathlib.Path(__file__).parent


def run(world, what, folder):
    port = str(free_port())
    ranks = [Process(HERE / 'universal_main.py', folder, folder / f'{rank}.log', what, folder, MASTER_ADDR='127.0.0.1', MASTER_PORT=port,
                     WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world), DS_ACCELERATOR='cpu')
             for rank in range(world)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * world, '\n'.join(rank.output for rank in ranks)
    found = [torch.load(folder / f'found-{rank}.pt', weights_only=False) for rank in range(world)]
    for each in found:
        assert not isinstance(each, str), each
    return found


@pytest.mark.skipif(importlib.util.find_spec('deepspeed') is None, reason='deepspeed is not installed')
@pytest.mark.parametrize('world', [1, 2])
def test_deepspeed(tmp_path, world):
    """ZeRO-1 and 3, fp32 and bf16, into plain, FSDP2 and shard() and out of them: what is held is the same bits, and losses go on."""
    for found in run(world, 'deepspeed', tmp_path):
        for (way, *_), came in found.items():
            start = came.pop('theirs' if way == 'into' else 'ours')
            for where, each in came.items():
                if where == 'again':
                    assert each == start, 'our own checkpoint, bit for bit'
                    continue
                assert each['differing'] == []
                close(each['losses'], start)
                assert each['came'] == ((BEFORE, {'cursor': 5}, BEFORE) if way == 'into' else (BEFORE, 7))
                assert each.get('groups', GROUPS) == GROUPS


# --- what DeepSpeed left: universal_deepspeed.py

@pytest.fixture(params=[1, 3], ids=['zero1', 'zero3'])
def left(request, tmp_path):
    """The folder, and what the engine held and did next."""
    return tmp_path / 'left', unpacked(tmp_path / 'left', request.param)


def test_of_deepspeed(left, job):
    folder, expected = left
    model = model_of(width=7)
    optimizer = of(model, job)
    came = bt.load_universal(optimizer, folder)
    assert came == (BEFORE, None, {'cursor': 5})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected['state'][name]['master'])
    assert differing(state_of(optimizer, model), expected['state']) == []
    assert all(optimizer.state[parameter]['step'] == BEFORE for parameter in model.parameters())
    assert optimizer.resume().step == BEFORE
    assert [{key: group[key] for key in GROUPS[0]} for group in optimizer.param_groups] == GROUPS
    close(losses(model, optimizer), expected['losses'])


def test_of_deepspeed_on_two_ranks(tmp_path):
    """Into one layout, out of it into the next, and so on: always the bits that DeepSpeed held."""
    expected = {stage: unpacked(tmp_path / f'zero{stage}', stage) for stage in (1, 3)}
    shutil.copytree(tmp_path / 'zero3', tmp_path / 'without-0.weight', ignore=shutil.ignore_patterns('0.weight'))
    for rank, found in enumerate(run(2, 'alone', tmp_path)):
        assert "not there' has no folder 'zero'" in found.pop('refused')
        assert found.pop('frozen') == (True, True)
        assert {kind for _, kind in found} == {'plain', 'fsdp2', 'tensor', 'shard'}
        for (stage, _), came in found.items():
            assert differing(came['state'], expected[stage]['state']) == []
            if 'losses' in came:
                close(came['losses'], expected[stage]['losses'][rank])
            if 'edited' in came:
                assert came['kept'] == []
                assert all(torch.equal(value, 2 * came['state'][name]['master']) for name, value in came['edited'].items())
    assert '0.bias' in os.listdir(tmp_path / 'again-frozen' / TAG / 'zero')
    assert '0.weight' not in os.listdir(tmp_path / 'again-frozen' / TAG / 'zero')


def test_into_an_open_job(left, job, tmp_path):
    """In place of what the job has and the loop has edited, and durably."""
    folder, expected = left
    model = model_of(width=7)
    optimizer = of(model, job, directory=str(tmp_path / 'state'))
    losses(model, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(3)
    bt.load_universal(optimizer, folder / TAG)
    assert differing(state_of(optimizer, model), expected['state']) == []
    optimizer.close()
    again = model_of(width=7)
    resumed = of(again, job, directory=str(tmp_path / 'state'), resume='must', **ARGUMENTS)
    assert resumed.resume().step == BEFORE
    close(losses(again, resumed), expected['losses'])


def test_skipped_steps(left, job):
    """The loop counts them, and the optimizer does not."""
    folder, _ = left
    for path in (folder / TAG).glob('*model_states.pt'):
        change(folder, '', lambda value: {**value, 'global_steps': BEFORE + 2, 'skipped_steps': 2}, path.name)
    model = model_of(width=7)
    optimizer = of(model, job)
    assert bt.load_universal(optimizer, folder).step == optimizer.resume().step == BEFORE + 2
    assert optimizer.state[model[0].weight]['step'] == BEFORE
    path = bt.save_universal(optimizer, folder / 'again')
    again = torch.load(os.path.join(path, layout.MODEL), weights_only=True)
    assert (again['global_steps'], again['skipped_steps']) == (BEFORE + 2, 2)


def test_bf16(left, job):
    """Parameters are what masters round to."""
    folder, expected = left
    model = model_of(width=7, dtype=torch.bfloat16)
    optimizer = of(model, job)
    bt.load_universal(optimizer, folder)
    assert differing(state_of(optimizer, model), expected['state']) == []
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected['state'][name]['master'].bfloat16())


def test_frozen_stays(left, job):
    folder, _ = left
    shutil.rmtree(folder / TAG / 'zero' / '0.weight')
    model = model_of(width=7)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    bt.load_universal(of(model, job), folder)
    assert torch.equal(model[0].weight, before)


# --- refused, before anything is changed

def change(folder, name, edit, file='exp_avg.pt'):
    path = folder / TAG / 'zero' / name / file if name else folder / TAG / file
    value = torch.load(path, weights_only=False)
    torch.save(edit(value), path)


def tensors(edit):
    """For files of either stage."""
    return lambda value: {**value, 'param': edit(value['param'])} if isinstance(value, dict) else edit(value)


def groups(edit):
    def of_file(value):
        for group in value['param_groups']:
            edit(group)
        return value
    return lambda folder: rewrite_optimizer(folder, of_file)


def rewrite_optimizer(folder, edit):
    path = folder / TAG / layout.OPTIMIZER
    torch.save(edit({**layout.read(path), 'zero_stage': 1, 'loss_scaler': None}), folder / 'edited')  # the file is mapped
    os.replace(folder / 'edited', path)


def truncate(folder):
    path = folder / TAG / 'zero' / '3.weight' / 'fp32.pt'
    path.write_bytes(path.read_bytes()[:-40])


def flip(folder):
    path = folder / TAG / 'zero' / '3.weight' / 'exp_avg_sq.pt'
    value = torch.load(path, weights_only=True)
    tensor = value['param'] if isinstance(value, dict) else value
    found = bytearray(path.read_bytes())
    at = found.index(tensor.flatten()[3].numpy().tobytes())
    found[at] ^= 1  # of the mantissa: torch.load takes it without a word
    path.write_bytes(found)
    torch.load(path, weights_only=True)


def reshape_flat(folder):
    """Of ZeRO-3: as many elements, and another shape."""
    for path in (folder / TAG).glob('*model_states.pt'):
        value = torch.load(path, weights_only=True)
        value['param_shapes'][0]['3.weight'] = torch.Size((7, 5))
        torch.save(value, path)
    change(folder, '3.weight', lambda value: value['param'].flatten() if isinstance(value, dict) else value, 'fp32.pt')


class Runs:
    """A pickle that makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def run_code(file, name=''):
    return lambda folder: change(folder, name, lambda value: {**value, 'x': Runs(str(folder / 'ran'))} if isinstance(value, dict)
                                 else [value, Runs(str(folder / 'ran'))], file)


def run_code_unzipped(folder):
    (folder / TAG / 'zero' / '0.bias' / 'exp_avg.pt').write_bytes(pickle.dumps(Runs(str(folder / 'ran'))))


def two_steps(folder):
    """ZeRO-3 has one count, unless someone adds another."""
    for name in ('0.weight', '3.weight'):
        torch.save(torch.tensor(7.0 if name == '0.weight' else 4.0), folder / TAG / 'zero' / name / 'step.pt')


def no_step(folder):
    (folder / TAG / 'zero' / '2.bias' / 'step.pt').unlink(missing_ok=True)
    rewrite_optimizer(folder, lambda value: {key: each for key, each in value.items() if key != 'optimizer_state_dict'})


REFUSED = {
    'missing': (lambda folder: shutil.rmtree(folder / TAG / 'zero' / '2.bias'), "no parameter '2.bias'.*optimizer trains", 'BAD_SPEC'),
    'left over': (lambda folder: shutil.copytree(folder / TAG / 'zero' / '2.bias', folder / TAG / 'zero' / '4.bias'),
                  "has parameter '4.bias' with moments", 'BAD_SPEC'),
    'twice': (lambda folder: shutil.copytree(folder / TAG / 'zero' / '2.bias', folder / TAG / 'zero' / 'module.2.bias'),
              "two folders of parameter '2.bias'", 'BAD_SPEC'),
    'no moments': (lambda folder: [(folder / TAG / 'zero' / '0.weight' / file).unlink() for file in ('exp_avg.pt', 'exp_avg_sq.pt')],
                   "no 'exp_avg.pt' of parameter '0.weight'", 'BAD_SPEC'),
    'one moment': (lambda folder: (folder / TAG / 'zero' / '0.weight' / 'exp_avg_sq.pt').unlink(),
                   "no 'exp_avg_sq.pt' of parameter '0.weight'", 'BAD_SPEC'),
    'shape': (lambda folder: change(folder, '0.weight', lambda value: {'param': torch.zeros(13, 7)}),
              r"'0.weight' has shape \[13, 7\] in .*, and \[7, 13\] here", 'BAD_SPEC'),
    'elements': (lambda folder: change(folder, '0.weight', lambda value: torch.zeros(90)), "'0.weight' has shape", 'BAD_SPEC'),
    'flat shape': (reshape_flat, r"'3.weight' has shape \[7, 5\] in .*, and \[5, 7\] here", 'BAD_SPEC'),
    'integers': (lambda folder: change(folder, '0.weight', tensors(torch.Tensor.int)), "no tensor of fp32.*'0.weight'", 'BAD_DTYPE'),
    'doubles': (lambda folder: change(folder, '0.weight', tensors(torch.Tensor.double)), "no tensor of fp32.*'0.weight'", 'BAD_DTYPE'),
    'sparse': (lambda folder: change(folder, '0.weight', tensors(torch.Tensor.to_sparse)), "no tensor of fp32.*'0.weight'", 'BAD_DTYPE'),
    'text': (lambda folder: change(folder, '0.weight', lambda value: 'text'), "no tensor of fp32.*'0.weight'", 'BAD_DTYPE'),
    'nan': (lambda folder: change(folder, '2.weight', tensors(lambda value: value.index_fill(0, torch.tensor([2]), float('nan')))),
            "'exp_avg.pt' of parameter '2.weight' has an Inf or a NaN", 'BAD_REQUEST'),
    'inf': (lambda folder: change(folder, '2.weight', tensors(lambda value: -value / 0), 'fp32.pt'),
            "'fp32.pt' of parameter '2.weight' has an Inf or a NaN", 'BAD_REQUEST'),
    'steps': (two_steps, "'0.weight' has made 7 steps, and '3.weight' of the same group 4", 'BAD_SPEC'),
    'no step': (no_step, "has no 'step.pt', and .*optimizer_state.pt' has no 'step' of it", 'BAD_SPEC'),
    'half a step': (lambda folder: torch.save(1.5, folder / TAG / 'zero' / '2.bias' / 'step.pt'), 'is 1.5; expected a whole number',
                    'BAD_SPEC'),
    'truncated': (truncate, "3.weight/fp32.pt' cannot be read: .*truncated", 'CHECKSUM'),
    'flipped': (flip, "3.weight/exp_avg_sq.pt' is damaged: part .* has another CRC-32|CRC", 'CHECKSUM'),
    'empty': (lambda folder: (folder / TAG / 'zero' / '0.bias' / 'fp32.pt').write_bytes(b''), "0.bias/fp32.pt' cannot be read", 'CHECKSUM'),
    'no model states': (lambda folder: [path.unlink() for path in (folder / TAG).glob('*model_states.pt')], 'expected a universal',
                        'BAD_CONFIG'),
    'no optimizer': (lambda folder: (folder / TAG / layout.OPTIMIZER).unlink(), "optimizer_state.pt' is not there", 'BAD_CONFIG'),
    'not converted': (lambda folder: shutil.rmtree(folder / TAG / 'zero'), 'deepspeed.checkpoint.ds_to_universal', 'BAD_CONFIG'),
    'elsewhere': (lambda folder: (folder / layout.LATEST).write_text(f'../left/{TAG}'), 'cannot be the name of a folder', 'BAD_CONFIG'),
    'no groups': (lambda folder: rewrite_optimizer(folder, lambda value: {**value, 'param_groups': 3}), 'no param_group of', 'BAD_SPEC'),
    'no lr': (groups(lambda group: group.pop('lr')), "no number for lr.*'lr'", 'BAD_SPEC'),
    'no bias correction': (groups(lambda group: group.update(bias_correction=False)), 'bias_correction=False; expected True',
                           'UNSUPPORTED'),
    'Adam': (groups(lambda group: group.update(decoupled_weight_decay=False)), 'is of Adam, whose weight decay works', 'BAD_SPEC'),
    'code in a moment': (run_code('exp_avg.pt', '0.bias'), "0.bias/exp_avg.pt' names .*mkdir, which would run code", 'BAD_REQUEST'),
    'code in a step': (lambda folder: torch.save(Runs(str(folder / 'ran')), folder / TAG / 'zero' / '0.bias' / 'step.pt'),
                       "0.bias/step.pt' names .*mkdir", 'BAD_REQUEST'),
    'code in the optimizer': (lambda folder: rewrite_optimizer(folder, lambda value: {**value, 'x': Runs(str(folder / 'ran'))}),
                              "optimizer_state.pt' names .*mkdir", 'BAD_REQUEST'),
    'code in model states': (lambda folder: [run_code(path.name)(folder) for path in (folder / TAG).glob('*model_states.pt')],
                             "model_states.pt' names .*mkdir", 'BAD_REQUEST'),
    'code without a zip': (run_code_unzipped, "0.bias/exp_avg.pt' cannot be read", 'CHECKSUM'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_refused(left, job, case):
    folder, _ = left
    harm, words, reason = REFUSED[case]
    harm(folder)
    model = model_of(width=7)
    before = copy.deepcopy(model.state_dict())
    optimizer = of(model, job)
    with pytest.raises(Error, match=words) as raised:
        bt.load_universal(optimizer, folder)
    assert raised.value.reason == reason
    assert not (folder / 'ran').exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]['lr'] == 0.5 and optimizer.job.opened is None


def test_refused_by_an_open_job(left, job):
    """It goes on as if nobody had asked."""
    folder, _ = left
    pair = []
    for harmed in (False, True):
        model = model_of(width=7)
        optimizer = of(model, {**job, 'name': f'{job["name"]}-{harmed}'}, lr=1e-2)
        losses(model, optimizer, 0, 2)
        if harmed:
            REFUSED['nan'][0](folder)
            with pytest.raises(Error, match='Inf or a NaN'):
                bt.load_universal(optimizer, folder)
        pair.append(losses(model, optimizer, 2, 2))
    assert pair[0] == pair[1]


@pytest.mark.parametrize(('make', 'words'), [
    (lambda model, job: bt.SGD(model.named_parameters(), lr=0.1, **job), 'this optimizer is sgd'),
    (lambda model, job: bt.AdamW(model.named_parameters(), amsgrad=True, **job), 'adamw with amsgrad'),
    (lambda model, job: bt.AdamW(model.parameters(), **job), 'has no name'),
    (lambda model, job: bt.AdamW(model.named_parameters(), **job), "weight_decay of one is 0.1 and of the other 0.0; give the optimizer")])
def test_refused_optimizer(left, job, make, words):
    with pytest.raises(Error, match=words):
        bt.load_universal(make(model_of(width=7), job), left[0])
