"""Muon against torch.optim.Muon and AdamW, on one rank and several, and through kills."""
import contextlib
import copy
import os
import pathlib
import re
import subprocess
import textwrap
import time
import urllib.request
import weakref

import pytest
import torch
from conftest import metrics_of, state_servers, two_state_servers
from muon_main import ADAMW, MAX_NORM, MUON, STEPS, Twin, full, made, ours, train
from own_process import Process, free_port

import ballast
import ballast.torch as bt
from ballast import programs
from ballast.torch.steps import assisted

HERE = pathlib.Path(__file__).parent
FULL = os.environ.get('TEST_ROUNDS') == 'full'
CLOSE = {'rtol': 1e-5, 'atol': 1e-5}


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('adjust', [None, 'match_rms_adamw'])
def test_each_step_is_torchs(nesterov, adjust, job):
    arguments = {**MUON, 'nesterov': nesterov, 'adjust_lr_fn': adjust}
    torch.manual_seed(2)
    mine = torch.nn.Sequential(torch.nn.Linear(20, 50, bias=False), torch.nn.GELU(), torch.nn.Linear(50, 30, bias=False))
    twin = copy.deepcopy(mine)
    optimizer, reference = bt.Muon(mine.named_parameters(), **arguments, **job), torch.optim.Muon(twin.parameters(), **arguments)
    for step in range(STEPS):
        twin.load_state_dict(mine.state_dict())
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        for model, each in ((mine, optimizer), (twin, reference)):
            each.zero_grad()
            model(x).square().mean().backward()
            each.step()
        for a, b in zip(mine.parameters(), twin.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for a, b in zip(mine.parameters(), twin.parameters()):
        torch.testing.assert_close(optimizer.state[a]['momentum_buffer'], reference.state[b]['momentum_buffer'], rtol=0, atol=0)


def test_matrices_by_muon_and_the_rest_by_adamw(job):
    model = made()
    twin = Twin(model)
    train(model, ours(model, **job), twin=twin)
    assert twin.worst < 1e-6


def test_on_disk_with_bf16(tmp_path):
    """Parameters and momentum in bf16, as torch.optim.Muon has them, but with fp32 masters; state on disk and in memory."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = made(dtype)
        with contextlib.closing(ours(model, name=str(dtype)[6:], directory=tmp_path / 'state', dram='96MiB', nvme='1GiB')) as optimizer:
            results.append(train(model, optimizer, steps=max(STEPS, 12), clip=False))
    expected, losses = results
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.03, atol=0.03)
    assert losses[-1] < losses[0] / 1.2


class Torchs:
    """torch.optim.Muon for the matrices of a model, and AdamW for the rest."""

    def __init__(self, model):
        matrices, rest = bt.muon_groups(model)
        self._parts = torch.optim.Muon(matrices['params'], **MUON), torch.optim.AdamW(rest['params'], **ADAMW)

    def zero_grad(self):
        for part in self._parts:
            part.zero_grad()

    def step(self):
        for part in self._parts:
            part.step()


@pytest.mark.skipif(not FULL, reason='200 free steps: in full rounds')
def test_free_steps_drift_as_torchs_own_do(job):
    """Two of torch's runs that begin an ulp apart differ by far more than 1e-5 after 200 steps, and ours from torch's by about as much."""
    models = [made() for _ in range(3)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    for model, optimizer in zip(models, (Torchs(models[0]), Torchs(models[1]), ours(models[2], **job))):
        train(model, optimizer, steps=200)
    drifts = [max(float((a - b).detach().abs().max()) for a, b in zip(models[0].parameters(), model.parameters())) for model in models[1:]]
    print(f"after 200 steps torch's runs an ulp apart differ by {drifts[0]:.1e}, ours from torch's by {drifts[1]:.1e}")
    assert drifts[0] > 1e-5, drifts
    assert drifts[1] < 4 * drifts[0], drifts


def test_the_rule_of_the_reference(job):
    """A momentum whose steps have the norm lr, in the words of the reference."""
    page = (HERE.parents[1] / 'client/python/REFERENCE.md').read_text(encoding='utf-8')
    example = {}
    exec(textwrap.dedent(re.search(r'```python\n(  # unit_norm.py\n.*?)  ```', page, re.DOTALL)[1]), example)
    torch.manual_seed(2)
    model = torch.nn.Linear(20, 30, bias=False)
    optimizer = example['NormalisedSGD'](model.named_parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **job)
    expected, mean = model.weight.detach().clone(), torch.zeros(30, 20)
    for step in range(3):
        model.weight.grad = gradient = torch.randn(30, 20, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        direction = gradient.lerp(mean.lerp_(gradient, 0.1), 0.9).bfloat16()
        expected.mul_(1 - 0.1 * 0.1).sub_(0.1 * (direction / direction.norm()).float())
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-7)


def test_most_of_the_state_is_on_nvme(tmp_path):
    """24 matrices on three servers, whose memory takes a part of them: 200 MiB of state in 96 MiB, in full rounds."""
    rows, columns, dram, staging = (512, 2048, '32MiB', '8MiB') if FULL else (128, 512, '6MiB', '4MiB')
    torch.manual_seed(3)
    mine = torch.nn.Sequential(*(torch.nn.Linear(*((columns, rows) if i % 2 else (rows, columns)), bias=False) for i in range(24)))
    twin, metrics, steps = copy.deepcopy(mine), [], 8 if FULL else 3
    (tmp_path / 'servers').mkdir()
    with state_servers(tmp_path / 'servers', '--staging', staging, count=3, dram=dram, metrics=metrics) as servers, contextlib.closing(
            bt.Muon(mine.named_parameters(), **MUON, servers=servers, name='nvme', chunk_elements=1 << 16)) as optimizer:
        reference = torch.optim.Muon(twin.parameters(), **MUON)
        for step in range(steps):
            twin.load_state_dict(mine.state_dict())
            for a, b in zip(mine.parameters(), twin.parameters()):
                a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
                b.grad = a.grad.clone()
            optimizer.step()
            reference.step()
            for a, b in zip(mine.parameters(), twin.parameters()):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(mine.parameters(), twin.parameters()):
            torch.testing.assert_close(optimizer.state[a]['momentum_buffer'], reference.state[b]['momentum_buffer'], rtol=0, atol=0)
        told = [metrics_of(each) for each in metrics]
    state = 24 * rows * columns * 8
    in_memory = sum(each['ballast_tier_part_bytes{tier="dram",part="state"}'] for each in told)
    written = [each['ballast_tier_written_bytes_total{tier="nvme"}'] for each in told]
    print(f'state {state / 2**20:.0f} MiB, {in_memory / 2**20:.0f} in memory; {steps} steps wrote {sum(written) / 2**20:.0f} MiB to NVMe')
    assert in_memory < state / 2, (in_memory, state)
    assert sum(written) >= steps * (state - in_memory) and min(written) > 0, (written, state, in_memory)


def run(ranks, ways, folder, servers=None):
    port = str(free_port())
    processes = [Process(HERE / 'muon_main.py', folder, folder / f'{rank}.log', ways, folder, *([servers] if servers else []),
                         MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
                 for rank in range(ranks)]
    codes = [process.wait() for process in processes]
    assert codes == [0] * ranks, '\n'.join(process.output for process in processes)
    return {way: [torch.load(folder / f'{way}-{rank}.pt') for rank in range(ranks)] for way in ways.split(',')}


def check(found):
    for way, of_ranks in found.items():
        for worst, of_momenta, _ in of_ranks:
            assert worst < 1e-6 and of_momenta < 1e-6, (way, of_ranks)


def test_two_ranks(tmp_path):
    found = run(2, 'ddp,fsdp2,lopsided,max_norm,sharded,options', tmp_path)
    (told, momentum), (_, other) = found.pop('lopsided')
    assert told.startswith('ns_steps of param_groups[0], which Muon updates, is 5 on rank 0 and 4 on rank 1; expected the same'), told
    for rank in range(2):
        said, opened = found['options'][rank]
        assert said == [
            'momentum of param_groups[0], which Muon updates, is 0.9 on rank 0 and 0.95 on rank 1; expected the same on all ranks '
            '[RANKS_DIFFER]',
            'nesterov of param_groups[0], which Muon updates, is True on rank 0 and False on rank 1; expected the same on all ranks '
            '[RANKS_DIFFER]',
            'rank 0 has adjust_lr_fn of param_groups[0], which Muon updates, and 5 more, but rank 1 has not; expected the same on all '
            'ranks [RANKS_DIFFER]'], said
        assert opened == 0
    del found['options']
    torch.testing.assert_close(momentum, other, rtol=0, atol=0)
    assert momentum[:16].any()
    norms = {way: [norm for norm, _ in found.pop(way)] for way in ('max_norm', 'sharded')}
    check(found)
    assert all(len(set(each)) == 1 and each[0] > 0 for each in norms.values()), norms


def test_a_wave_that_fails_leaves_nothing_behind(tmp_path):
    """Each matrix is computed in a wave of its own, and the updates of a wave go to the servers as the next begins."""
    found = run(2, 'waves,sharded_waves', tmp_path)
    for (worst, of_momenta, _), said, waves, went in found['waves']:
        assert worst < 1e-6 and of_momenta < 1e-6, found
        assert [each.endswith('amid a wave') for each in said] == [True], said
        assert waves == 24 and went >= 20, found
    for (expected, values, nothing), (losses, came, said) in found['sharded_waves']:
        assert nothing == [] and losses == expected
        torch.testing.assert_close(came, values, rtol=0, atol=0)
        assert said[0].endswith('amid a wave') and len(said) == 2, said
        assert 'went to the servers for a step that was not made; run forward and backward again' in said[1]


def test_updates_of_a_wave_are_let_go(job, two_servers, monkeypatch):
    """Bytes of updates that the trainer has, once servers have taken those of the waves before."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=i % 2 == 0) for i in range(8)))
    optimizer = bt.Muon(bt.muon_groups(model), servers=two_servers, name=job['name'])
    monkeypatch.setattr(assisted, 'WAVE_BYTES', 4 * 2 * 64 * 64)  # directions and updates of two matrices
    updates, most = [], []
    compute = assisted.Assisted._compute

    def counted(self, job, ready, matrices, factor, done):
        compute(self, job, ready, matrices, factor, done)
        updates.extend(weakref.ref(ready.gradients[matrix.at]) for matrix in matrices)
        deadline = time.monotonic() + 20
        while True:
            most.append(sum(update().nbytes for update in updates if update() is not None))
            if most[-1] <= 2 * 4 * 64 * 64 or time.monotonic() > deadline:
                break
            del most[-1]
            time.sleep(0.01)
    monkeypatch.setattr(assisted.Assisted, '_compute', counted)
    for _ in range(2):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert most == [2 * 4 * 64 * 64] * 8 and len(updates) == 2 * 8


@pytest.mark.parametrize('how', [{}, {'push_early': True}, {'overlap': True, 'push_early': True}])
def test_waves_change_no_bit(how, job, two_servers, monkeypatch):
    """Nor what is told of a gradient that is not finite, whose update has gone."""
    losses, models = [], [made(), made()]
    for model, waves in zip(models, (1, 24)):
        more = {key: model if key == 'overlap' else value for key, value in how.items()} if waves > 1 else {}
        with contextlib.closing(ours(model, name=f'{job["name"]}-{waves}', servers=two_servers, **more)) as optimizer:
            losses.append(train(model, optimizer, steps=4, clip=False))
            optimizer.wait()
            feature = next(each for each in optimizer.job.features if isinstance(each, assisted.Assisted))
            assert len(feature._waves[1]) == waves
            before = full(model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model.blocks[0].query.weight.grad[3, 5] = float('inf')
            with pytest.warns(UserWarning, match="gradient of 'blocks.0.query.weight' is not finite"):
                optimizer.step()
                optimizer.wait()
            torch.testing.assert_close(full(model), before, rtol=0, atol=0)
        monkeypatch.setattr(assisted, 'WAVE_BYTES', 1)
    assert losses[0] == losses[1]
    torch.testing.assert_close(full(models[1]), full(models[0]), rtol=0, atol=0)


def test_an_export_goes_into_another_job(job, tmp_path):
    """Momenta, masters and steps, of matrices and of the rest."""
    models = [made(torch.bfloat16) for _ in range(2)]
    first, second = (ours(model, **{**job, 'name': f'{job["name"]}{i}'}) for i, model in enumerate(models))
    train(models[0], first, steps=3, clip=False)
    bt.export_state(first, tmp_path / 'state')
    models[1].load_state_dict(models[0].state_dict())
    bt.import_state(second, tmp_path / 'state')
    for a, b in zip(*(model.parameters() for model in models)):
        assert first.state[a].keys() == second.state[b].keys()
        torch.testing.assert_close(dict(second.state[b]), dict(first.state[a]), rtol=0, atol=0)
    query = models[0].blocks[0].query.weight
    assert list(first.state[query]) == ['step', 'momentum_buffer', 'master'] and first.state[query]['momentum_buffer'].any()
    assert train(models[1], second, steps=6, start=3, clip=False) == train(models[0], first, steps=6, start=3, clip=False)
    with pytest.raises(ballast.Error, match='the export is of muon, but this optimizer is adamw'):
        bt.import_state(bt.AdamW(made(torch.bfloat16).named_parameters(), **{**job, 'name': f'{job["name"]}adamw'}), tmp_path / 'state')


def test_four_ranks_over_two_servers(tmp_path):
    (tmp_path / 'servers').mkdir()
    with two_state_servers(tmp_path / 'servers') as servers:
        check(run(4, 'fsdp2,tensor_parallel', tmp_path, servers))


def test_max_norm_clips_as_torch_does(job):
    """The momentum is of clipped gradients."""
    states = []
    for clip in (True, False):
        torch.manual_seed(2)
        model = torch.nn.Linear(20, 50, bias=False)
        optimizer = bt.Muon(model.named_parameters(), **MUON, **{**job, 'name': f"{job['name']}{clip}"}, max_norm=0 if clip else MAX_NORM)
        model(torch.ones(4, 20)).sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        states.append((optimizer.state[model.weight]['momentum_buffer'], model.weight.detach()))
    torch.testing.assert_close(states[1], states[0], **CLOSE)


def test_state_dicts_go_to_torch_and_back(job):
    torch.manual_seed(2)
    models = [torch.nn.Linear(20, 50, bias=False) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())

    def steps(optimizer, model, first, count):
        for step in range(first, first + count):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    theirs = torch.optim.Muon(models[0].parameters(), **MUON)
    steps(theirs, models[0], 0, 5)
    mine = bt.Muon(models[1].named_parameters(), **MUON, **job)
    models[1].load_state_dict(models[0].state_dict())
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]['use_muon'] is True
    torch.testing.assert_close(mine.state_dict()['state'][0]['momentum_buffer'], theirs.state_dict()['state'][0]['momentum_buffer'],
                               rtol=0, atol=0)
    back = torch.optim.Muon(models[2].parameters(), **MUON)
    for optimizer, model in ((theirs, models[0]), (mine, models[1])):
        steps(optimizer, model, 5, 1)
    torch.testing.assert_close(models[1].weight, models[0].weight, **CLOSE)
    models[2].load_state_dict(models[1].state_dict())
    back.load_state_dict(mine.full_state_dict())
    for optimizer, model in ((mine, models[1]), (back, models[2])):
        steps(optimizer, model, 6, 1)
    torch.testing.assert_close(models[2].weight, models[1].weight, **CLOSE)


def test_a_version_brings_the_momentum_back(job, tmp_path):
    model = made()
    optimizer = ours(model, **{**job, 'directory': tmp_path / 'state', 'nvme': '1GiB'})
    train(model, optimizer, steps=4)
    kept, values = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    expected = [train(model, optimizer, steps=8, start=4), full(model)]
    optimizer.load_state_dict(kept)
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    assert [train(model, optimizer, steps=8, start=4), full(model)][0] == expected[0]
    torch.testing.assert_close(full(model), expected[1], rtol=0, atol=0)
    optimizer.close()


SCRIPT = '''
import os, signal, sys, threading
sys.path.insert(0, {here!r})
import torch
from muon_main import full, made, ours, train
model = made()
optimizer = ours(model, name='killed', directory={folder!r}, nvme='1GiB', resume='auto')
start, _ = optimizer.resume()
if float(sys.argv[1]) > 0:
    threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
train(model, optimizer, steps=40, start=start)
torch.save(full(model), sys.argv[2])
print(start, flush=True)
os._exit(0)
'''


def test_killed_again_and_again_it_has_the_bits_of_an_undisturbed_run(tmp_path):
    """With its server in its process, which dies too, wherever a step is just then."""
    script = tmp_path / 'script.py'
    results = []
    for name, delays in (('undisturbed', [0]), ('killed', [0.03, 0.07, 0.11, 0.19, 0])):
        script.write_text(SCRIPT.format(here=str(HERE), folder=str(tmp_path / name)))
        for delay in delays:
            process = Process(script, tmp_path, tmp_path / 'script.log', delay, tmp_path / f'{name}.pt')
            assert process.wait() in (0, -9 if delay else 0), process.output
        results.append(torch.load(tmp_path / f'{name}.pt'))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_reader_sees_the_models_parameters(tmp_path):
    (tmp_path / 'servers').mkdir()
    with two_state_servers(tmp_path / 'servers') as servers:
        model, read = made(), made()
        with contextlib.closing(ours(model, name='read', servers=servers)) as optimizer:
            train(model, optimizer, steps=3)
            reader = bt.Reader('read', servers=servers)
            assert reader.read(read).steps == 3
            torch.testing.assert_close(full(read), full(model), rtol=0, atol=0)
            reader.close()


def test_bytes_of_a_step(tmp_path):
    """In bf16, of each parameter of a matrix: the gradient and the update go to the servers; momentum and parameter come back."""
    command = [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen', '127.0.0.1:0',
               '--data_directory', str(tmp_path / 'server'), '--budget.dram', '64MiB', '--log_level', 'warn']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        listen, metrics = re.search(r'listen=(\S+) metrics=(\S+)', server.stdout.readline()).groups()

        def counted():
            with urllib.request.urlopen(f'http://{metrics}/metrics') as answer:
                lines = answer.read().decode().splitlines()
            return [sum(float(line.split()[-1]) for line in lines if line.startswith(f'ballast_{what}_bytes_total{{'))
                    for what in ('received', 'sent')]
        model = torch.nn.Linear(256, 512, bias=False).bfloat16()
        with contextlib.closing(bt.Muon(model.named_parameters(), servers=listen, durability='none')) as optimizer:
            seen = []
            for _ in range(4):
                model(torch.ones(4, 256, dtype=torch.bfloat16)).square().mean().backward()
                optimizer.step()
                seen.append(counted())
        server.terminate()
    for before, after in zip(seen[1:], seen[2:]):
        assert [(b - a) / (256 * 512) for a, b in zip(before, after)] == [4, 4]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_new_job_needs_no_memory_beside_its_state(dtype, job):
    """A server within the trainer reads the first values where they are, as with AdamW; estimate() says that it fits."""
    model = torch.nn.Linear(2048, 1024, bias=False).to(dtype)
    budget = {'dram': 8 * 2048 * 1024 + (2 << 20)}
    assert ballast.estimate([{'params': list(model.named_parameters())}], optimizer='muon', **budget).fits
    optimizer = bt.Muon(model.named_parameters(), **{**job, **budget})
    step_of_ones = torch.ones_like(model.weight)
    for _ in range(2):
        model.weight.grad = step_of_ones.clone()
        optimizer.step()
    mean = (1 - 0.95 ** 2) * torch.ones(1024, 2048)
    torch.testing.assert_close(optimizer.state[model.weight]['momentum_buffer'], mean)


def test_an_overflow_skips_the_step(job):
    model = made()
    optimizer = ours(model, **job)
    train(model, optimizer, steps=2)
    before = full(model)
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.blocks[0].query.weight.grad[3, 5] = float('inf')
    with pytest.warns(UserWarning, match="gradient of 'blocks.0.query.weight' is not finite"):
        optimizer.step()
    assert optimizer.last_step_skipped
    torch.testing.assert_close(full(model), before, rtol=0, atol=0)


@pytest.mark.parametrize('what, words', [
    (lambda model, job: bt.Muon(model.named_parameters(), **job).resume(),
     r"'blocks.0.before_attention.weight' has shape \[32\], but Muon orthogonalises matrices.*use_muon=False; ballast.*muon_groups"),
    (lambda model, job: bt.Muon(bt.muon_groups(model), adjust_lr_fn='rms', **job), "adjust_lr_fn='rms', expected one of None, 'original'"),
    (lambda model, job: bt.Muon(bt.muon_groups(model), momentum=1.0, **job), 'momentum=1.0, expected at least 0 and below 1'),
    (lambda model, job: bt.save_universal(bt.Muon(bt.muon_groups(model), **job), 'folder'), 'this optimizer is muon'),
])
def test_refuses_in_words(what, words, job):
    with pytest.raises((ballast.Error, ValueError), match=words):
        what(made(), job)


def test_a_job_of_adamw_is_not_muons(job, tmp_path):
    durable = {**job, 'directory': tmp_path / 'state', 'nvme': '1GiB'}
    model = made()
    with contextlib.closing(bt.AdamW(model.named_parameters(), **durable)) as optimizer:
        train(model, optimizer, steps=1)
    with pytest.raises(ballast.Error, match="'blocks.0.query.weight' is updated by the job's optimizer.*by the trainer"):
        bt.Muon(bt.muon_groups(model), resume='must', **durable).resume()


def test_groups_of_a_model():
    model = made()
    matrices, rest = bt.muon_groups(model, lr=3e-4)
    names = [name for name, _ in matrices['params']]
    assert len(names) == 4 * 6 and all(name.startswith('blocks.') and name.endswith('.weight') for name in names)
    assert {'embed.weight', 'head.weight', 'head.bias'} < {name for name, _ in rest['params']}
    optimizer = bt.Muon([matrices, rest])
    assert [(group['use_muon'], group['eps'], group['weight_decay'], group['lr']) for group in optimizer.param_groups] == [
        (True, 1e-7, 0.1, 1e-3), (False, 1e-8, 1e-2, 3e-4)]
    # As many positions as a matrix has rows.
    model = torch.nn.ModuleDict({'words': torch.nn.Embedding(99, 16), 'places': torch.nn.Embedding(16, 16), 'up': torch.nn.Linear(16, 16),
                                 'head': torch.nn.Linear(16, 99)})
    assert [name for name, _ in bt.muon_groups(model)[0]['params']] == ['up.weight']
    with pytest.warns(UserWarning, match='no hidden matrix'):
        assert bt.muon_groups(torch.nn.LayerNorm(4))[0]['params'] == []


def step_of(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(4, 20)).square().sum().backward()
    optimizer.step()


def test_groups_that_come_later_keep_their_options(job):
    model = torch.nn.ModuleList(torch.nn.Linear(20, 20, bias=False) for _ in range(10))
    groups = [{'params': [(f'{i}.weight', each.weight)], 'use_muon': i == 7} for i, each in enumerate(list(model)[:8])]
    optimizer = bt.Muon(groups, **job)
    forward = torch.nn.Sequential(*model)
    step_of(forward, optimizer)
    optimizer.add_param_group({'params': [('8.weight', model[8].weight)], 'use_muon': False, 'lr': 0.0})
    optimizer.add_param_group({'params': [('9.weight', model[9].weight)], 'lr': 0.0})
    before = [each.weight.detach().clone() for each in model]
    step_of(forward, optimizer)
    moved = [not torch.equal(each.weight, value) for each, value in zip(model, before)]
    assert moved == [True] * 8 + [False] * 2
    optimizer.param_groups[7]['use_muon'] = False
    with pytest.raises(ballast.Error, match="'7.weight' is of Muon in the job, and its group says use_muon=False"):
        step_of(forward, optimizer)


def test_small_fp16_gradients_move_the_momentum(job):
    model = torch.nn.Linear(20, 30, bias=False).half()
    optimizer = bt.Muon(model.named_parameters(), **MUON, **job)
    gradient = torch.randn(30, 20) * 1e-3
    model.weight.grad = gradient.half()
    with optimizer.gradient_scale(2.0 ** -16):
        optimizer.step()
    expected = model.weight.grad.float() * 2.0 ** -16 * (1 - MUON['momentum'])
    torch.testing.assert_close(optimizer.state[model.weight]['momentum_buffer'], expected, rtol=1e-5, atol=0)


def test_state_and_edits_of_one_parameter(job):
    model = torch.nn.Linear(20, 20, bias=False)
    optimizer = bt.Muon(model.named_parameters(), **MUON, **job)
    step_of(model, optimizer)
    model.weight.data[3, 4] = 7
    optimizer.sync_from_params()
    step_of(model, optimizer)
    assert abs(model.weight[3, 4].item() - 7) < 0.1
    buffer = torch.full((20, 20), 0.5)
    optimizer.state[model.weight] = {'step': torch.tensor(7.0), 'momentum_buffer': buffer}
    assert optimizer.state[model.weight]['step'] == 7
    torch.testing.assert_close(optimizer.state[model.weight]['momentum_buffer'], buffer, rtol=0, atol=0)
    optimizer.state.clear()
    assert optimizer.state[model.weight]['step'] == 0 and not optimizer.state[model.weight]['momentum_buffer'].any()


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_modes_of_the_loop_change_nothing(device, job):
    """Autocast around step(), and a default device."""
    model = torch.nn.Linear(20, 20, bias=False)
    optimizer = bt.Muon(model.named_parameters(), **MUON, **job)
    model(torch.ones(4, 20)).square().sum().backward()
    with torch.autocast('cpu', torch.float16), torch.device(device):
        optimizer.step()
    assert torch.isfinite(model.weight).all()
