"""A process that evaluates a job which another process trains."""
import hashlib
import json
import pathlib
import time

import pytest
import torch
from conftest import two_state_servers
from own_process import Process
from scripts import batches, loss_of, mlp
from torch import nn

import ballast
import ballast.torch as bt

HERE = pathlib.Path(__file__).parent
STEPS = 60

TRAINER = f'''
import json, os, pathlib, sys, time
sys.path.insert(0, {str(HERE)!r})
import torch
import ballast.torch as bt
from scripts import batches, loss_of, mlp
torch.manual_seed(3)
model = mlp()
optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, name=sys.argv[1])
probe = next(batches(1, seed=11))
told = []  # by version
def tell():
    with torch.no_grad():
        told.append(loss_of(model, probe).item())
optimizer.resume()
tell()
losses = []
for i, batch in enumerate(batches({STEPS})):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    tell()
    while sys.argv[2] == 'watched' and len(os.listdir('read')) < i // 8:
        time.sleep(0.005)
while sys.argv[2] == 'watched' and not os.path.exists('read/{STEPS}'):
    time.sleep(0.005)
optimizer.close()
pathlib.Path(f'{{sys.argv[1]}}.json').write_text(json.dumps([losses, told]))
'''


@pytest.fixture
def trained(two_servers, job):
    """Arguments of a reader, and the model of a job of one step."""
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, name=job['name'], servers=two_servers)
    loss_of(model, (torch.ones(2, 16), torch.zeros(2, dtype=torch.long))).backward()
    optimizer.step()
    yield {'name': job['name'], 'servers': two_servers, 'timeout': 120}, model, optimizer
    optimizer.close()


def refused(call, *arguments, **more):
    with pytest.raises(ballast.Error) as error:
        call(*arguments, **more)
    return str(error.value)


def same(model, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters()))


def test_a_trainer_and_its_evaluator(two_servers, tmp_path):
    """What is read is what the trainer had after some step, and the trainer does not notice."""
    script = tmp_path / 'trainer.py'
    script.write_text(TRAINER, encoding='utf-8')
    (tmp_path / 'read').mkdir()  # a file for each version that was read: the trainer waits for some of them
    trainers = {name: Process(script, tmp_path, tmp_path / f'{name}.log', name, how, BALLAST_SERVERS=two_servers)
                for name, how in (('watched', 'watched'), ('alone', 'alone'))}
    probe, model, seen = next(batches(1, seed=11)), mlp(), {}
    until = time.monotonic() + 600
    reader = bt.Reader('watched', servers=two_servers, timeout=120)
    while max(seen, default=0) < STEPS and time.monotonic() < until:
        try:
            read = reader.read(model)
        except ballast.Error as error:
            assert error.reason in ('JOB_MISSING', 'BAD_REQUEST') and not seen, error  # the trainer has not begun
            time.sleep(0.01)
            continue
        assert read.version == read.steps and read.missing == read.unexpected == ()
        with torch.no_grad():
            seen[read.version] = loss_of(model, probe).item()
        (tmp_path / 'read' / str(read.version)).touch()
    assert [trainer.wait() for trainer in trainers.values()] == [0, 0], '\n'.join(each.output for each in trainers.values())
    losses, told = json.loads((tmp_path / 'watched.json').read_text())
    assert len(seen) > 5 and max(seen) == STEPS
    assert {version: told[version] for version in seen} == seen
    assert losses == json.loads((tmp_path / 'alone.json').read_text())[0]
    reader.close()


def test_masters_and_models_of_other_kinds(trained):
    arguments, model, optimizer = trained
    with bt.Reader(**arguments) as reader:
        assert reader.newest() == 1
        copy = mlp()
        assert reader.read(copy, masters=True) == (1, 1, (), ())
        assert same(copy, model)
        copy = mlp()
        with torch.device('meta'):
            reader.read(copy)
        assert same(copy, model)
        # Wrapped, and in another memory format: names are the same, values are copied into place.
        wrapped = nn.Sequential()
        wrapped.add_module('module', mlp())
        wrapped.module[0].weight.data = torch.zeros(16, 64).t()
        version = wrapped.module[0].weight._version
        reader.read(wrapped)
        assert same(wrapped.module, model) and wrapped.module[0].weight._version > version
        assert wrapped.module[0].weight.requires_grad
        # A job of fp32 parameters rounds for a model of 16 bits, as a trainer's does.
        half = mlp().bfloat16()
        reader.read(half)
        assert same(half, mlp_of(model).bfloat16())
        refused(reader.read, half, masters=True)
    # The trainer was not disturbed.
    optimizer.zero_grad()
    loss_of(model, (torch.ones(2, 16), torch.zeros(2, dtype=torch.long))).backward()
    optimizer.step()
    assert "the reader was closed" in refused(reader.newest)


def mlp_of(model):
    copy = mlp()
    copy.load_state_dict(model.state_dict())
    return copy


def test_what_does_not_fit_is_refused_by_name(trained):
    arguments, model, _ = trained
    reader = bt.Reader(**arguments)
    before = mlp()
    other = mlp_of(before)
    other[0] = nn.Linear(16, 32)
    assert "parameter '0.weight' has shape [32, 16], and the job's has [64, 16] [BAD_SPEC]" in refused(reader.read, other)
    assert torch.equal(other[3].weight, before[3].weight)  # nothing was copied
    assert "parameter '0.weight' is torch.float64" in refused(reader.read, mlp().double())
    assert "parameter '0.weight' is a DTensor, lives on servers or is on the meta device" in refused(reader.read, mlp().to('meta'))
    more = nn.Sequential(*mlp(), nn.Linear(4, 4))
    assert refused(reader.read, more).startswith("the job lacks '4.weight', '4.bias'; expected the trainer's model")
    fewer = mlp()[:3]
    assert refused(reader.read, fewer).startswith("the model lacks '3.weight', '3.bias'; ")
    both = nn.Sequential(mlp()[0], nn.Linear(3, 3))
    read = reader.read(nn.Sequential(*mlp()[:3], nn.ReLU(), nn.Linear(4, 4)), strict=False)
    assert read.missing == ('4.weight', '4.bias') and read.unexpected == ('3.weight', '3.bias')
    assert refused(reader.read, both).startswith("the job lacks '1.weight', '1.bias' and the model lacks '2.weight'")
    with pytest.raises(ballast.Error) as error:
        reader.read(both)
    assert error.value.details == {'missing': '2.weight\0002.bias\0003.weight\0003.bias', 'unknown': '1.weight\0001.bias'}
    reader.close()


def test_sixteen_bits(two_servers, job):
    model = mlp().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, name=job['name'], servers=two_servers)
    loss_of(model, (torch.ones(2, 16), torch.zeros(2, dtype=torch.long))).backward()
    optimizer.step()
    with bt.Reader(job['name'], servers=two_servers) as reader:
        copy, wide, masters = mlp().bfloat16(), mlp(), mlp()
        for each in (copy, wide):
            reader.read(each)
        reader.read(masters, masters=True)
        assert same(copy, model) and same(wide, mlp_of(model)) and not same(masters, wide)
        assert same(mlp_of(masters).bfloat16(), model)
        assert "parameter '0.weight' is torch.float16, and the job's is torch.bfloat16" in refused(reader.read, mlp().half())
        assert "and masters are torch.float32" in refused(reader.read, copy, masters=True)
    optimizer.close()


def test_arguments(two_servers, job):
    assert refused(bt.Reader).startswith('servers: expected those that the trainer names')
    assert refused(bt.Reader, servers=two_servers, timeout=0).startswith('timeout=0: expected seconds')
    reader = bt.Reader(job['name'], servers=two_servers)
    assert refused(reader.newest).startswith(f"the servers have no job '{job['name']}'")


def test_the_right_to_read_is_enough(tmp_path, job):
    tokens = {who: tmp_path / who for who in ('trainer', 'evaluator')}
    for who, file in tokens.items():
        file.write_text(who * 8)
    digests = {who: hashlib.sha256((who * 8).encode()).hexdigest() for who in tokens}
    (tmp_path / 'tokens.yaml').write_text('tokens:\n' + ''.join(
        f'- {{identity: {who}, sha256: {digest}}}\n' for who, digest in digests.items()))
    (tmp_path / 'rights.yaml').write_text("rights:\n- {identity: trainer, kind: token, jobs: '*', can: [train, pin]}\n"
                                          "- {identity: evaluator, kind: token, jobs: 'job*', can: [read]}\n")
    (tmp_path / 'servers').mkdir()
    with two_state_servers(tmp_path / 'servers', '--tokens', str(tmp_path / 'tokens.yaml'), '--rights', str(tmp_path / 'rights.yaml'),
                           '--audit_log', 'none') as servers:
        model = mlp()
        optimizer = bt.AdamW(model.named_parameters(), name=job['name'], servers=servers, token_file=tokens['trainer'])
        optimizer.resume()
        with bt.Reader(job['name'], servers=servers, token_file=tokens['evaluator']) as reader:
            copy = mlp()
            assert reader.read(copy).version == 0 and same(copy, model)
            other = bt.Reader('other', servers=servers, token_file=tokens['evaluator'])
            assert 'NO_RIGHT' in refused(other.read, copy)
        optimizer.close()
