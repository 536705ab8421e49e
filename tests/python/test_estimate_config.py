"""ballast.estimate from a Hugging Face configuration, and for a card: which call it names, and what it refuses."""
import json
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from own_process import Process

import ballast
import ballast.torch
from ballast.torch.estimate.__main__ import main

transformers = pytest.importorskip('transformers')
LLAMA = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': 4096, 'intermediate_size': 11008,
         'num_hidden_layers': 32, 'num_attention_heads': 32, 'num_key_value_heads': 32, 'vocab_size': 32000, 'torch_dtype': 'bfloat16'}
PARAMETERS = 6738415616  # of Llama 2 7B
SMALL = {**LLAMA, 'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'num_key_value_heads': 4,
         'vocab_size': 512}


def write(folder, given):
    (folder / 'config.json').write_text(given if isinstance(given, str) else json.dumps(given), encoding='utf-8')
    return folder / 'config.json'


def resident():
    status = pathlib.Path('/proc/self/status').read_text(encoding='ascii')
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith('VmHWM')) << 10


def test_paths_folders_and_objects_tell_the_same(tmp_path):
    """Without weights: 12.55 GiB of them would show."""
    path = write(tmp_path, LLAMA)
    before = resident()
    one = ballast.estimate(path, dram='200GiB', card='80GiB')
    assert resident() - before < 1 << 30
    assert one.fits and f'{PARAMETERS} parameters' in one.text
    assert one.card == one.rank_bytes == 4 * PARAMETERS
    config = transformers.LlamaConfig(**{**LLAMA, 'dtype': 'bfloat16'})
    for same in (str(tmp_path), config):
        assert ballast.estimate(same, dram='200GiB', card='80GiB') == one
    wide = ballast.estimate(path, dram='200GiB', dtype='float32')
    assert dict(wide.tiers)['dram'] >= 8 * PARAMETERS and wide.rank_bytes == 8 * PARAMETERS


@pytest.mark.parametrize('given, expected', [
    ({'card': '80GiB', 'dram': '200GiB'}, "optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-4, dram='200GiB')"),
    ({'card': '80GiB', 'dram': '64GiB'}, "optimizer = ballast.torch.AdamW8bit(model.named_parameters(), lr=1e-4, dram='64GiB')"),
    ({'card': '24GiB', 'dram': '64GiB', 'nvme': '1TB'}, "model = ballast.torch.shard(model, weights='.')\n"
     "optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-4, directory='state', dram='64GiB', nvme='1TB')"),
    ({'card': '24GiB', 'dram': '64GiB', 'nvme': '100GB'}, "model = ballast.torch.shard(model, weights='.')\n"
     "optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-4, directory='state', dram='64GiB', nvme='100GB', "
     "durability='none')"),
    ({'dram': '64GiB', 'nvme': '1TB', 'servers': 2, 'optimizer': 'lion'},
     "optimizer = ballast.torch.Lion(model.named_parameters(), lr=1e-4, servers='host1:7070,host2:7070')"),
    ({'dram': '200GiB', 'optimizer': 'ademamix'}, "optimizer = ballast.torch.AdEMAMix(model.named_parameters(), lr=1e-4, dram='200GiB')"),
    ({'dram': '200GiB', 'optimizer': 'adamw_schedule_free'},
     "optimizer = ballast.torch.AdamWScheduleFree(model.named_parameters(), lr=1e-4, dram='200GiB')"),
])
def test_the_call_is_the_least_change_that_fits(given, expected, tmp_path, monkeypatch):
    write(tmp_path, LLAMA)
    monkeypatch.chdir(tmp_path)
    told = ballast.estimate('config.json', **given)
    assert told.fits and told.call == expected, told.text
    assert all(f'    {line}' in told.text for line in told.call.splitlines())


MIXTRAL = {**SMALL, 'architectures': ['MixtralForCausalLM'], 'model_type': 'mixtral', 'num_local_experts': 64, 'intermediate_size': 256,
           'torch_dtype': 'float32'}


def test_fused_experts_are_split_where_they_do_not_fit(tmp_path):
    """A block has 64 experts of 192 KiB: a rank gathers one at a time once they are modules of their own."""
    where = {'card': '4MiB', 'dram': '512MiB'}
    told = ballast.estimate(write(tmp_path, MIXTRAL), **where)
    assert told.fits and told.card < 4 << 20, told.text
    assert told.call.splitlines()[:2] == ['model = ballast.torch.split_experts(model)', 'model = ballast.torch.shard(model)']
    assert 'Read weights by from_pretrained() before split_experts()' in told.text
    with torch.device('meta'):
        model = transformers.MixtralForCausalLM(transformers.AutoConfig.for_model(**MIXTRAL))
    fused = ballast.estimate(model, **where)
    assert not fused.fits and 'call ballast.torch.split_experts(model) before estimate() and shard()' in fused.text, fused.text
    split = ballast.estimate(ballast.torch.split_experts(model), **where)
    assert split.fits and (split.card, split.rows, split.tiers) == (told.card, told.rows, told.tiers)
    # In the memory of one rank alone nothing is split.
    whole = ballast.estimate(tmp_path, card='1GiB', dram='512MiB')
    assert whole.fits and 'split' not in whole.text and whole.rank_bytes == split.rank_bytes


def test_muon_of_a_configuration(tmp_path):
    write(tmp_path, LLAMA)
    told = ballast.estimate(tmp_path, optimizer='muon', card='80GiB', dram='200GiB')
    assert told.fits and told.call == "optimizer = ballast.torch.Muon(ballast.torch.muon_groups(model), lr=1e-4, dram='200GiB')", told.text
    hidden, rest = PARAMETERS - 2 * 32000 * 4096 - 65 * 4096, 2 * 32000 * 4096 + 65 * 4096
    assert 8 * hidden + 12 * rest <= dict(told.tiers)['dram'] <= 1.01 * (8 * hidden + 12 * rest)
    assert 4 * PARAMETERS + 2 * hidden < told.card < 4 * PARAMETERS + 2 * hidden + (2 << 30)
    assert not ballast.estimate(tmp_path, optimizer='muon', card='32GiB', dram='200GiB').call.startswith('optimizer')


def test_the_call_runs(tmp_path):
    """With tiles: a card has no room for the embedding's layer of outputs."""
    config = {**SMALL, 'vocab_size': 65536, 'torch_dtype': 'float32'}
    told = ballast.estimate(write(tmp_path, config), card='72MiB', dram='256MiB')
    assert told.fits and 'TiledLinear' in told.call and 'the root' in told.text, told.text
    script = tmp_path / 'script.py'
    script.write_text(f'''
import torch, torch.distributed as dist, transformers, ballast.torch
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
config = transformers.AutoConfig.from_pretrained({str(tmp_path)!r})
transformers.AutoModelForCausalLM.from_config(config).save_pretrained({str(tmp_path)!r})
with torch.device('meta'):
    model = transformers.AutoModelForCausalLM.from_config(config)
{told.call}
model(torch.arange(4)[None]).logits.square().mean().backward()
optimizer.step()
print(sorted(len(m.tiles) for m in model.modules() if isinstance(m, ballast.torch.TiledLinear)))
optimizer.close()
''', encoding='utf-8')
    process = Process(script, tmp_path, tmp_path / 'script.log')
    assert process.wait() == 0 and re.search(r'^\[\d', process.output, re.M), process.output


def test_what_no_call_can_mend_is_named(tmp_path):
    told = ballast.estimate(write(tmp_path, LLAMA), card='256MiB', dram='200GiB')
    assert not told.fits and not told.call and "'model.embed_tokens'" in told.text and 'larger card' in told.text
    told = ballast.estimate(tmp_path, dram='4GiB')
    assert not told.fits and not told.call and 'It does not fit' in told.text


def test_bytes_of_each_process_add_up(tmp_path):
    told = ballast.estimate(write(tmp_path, LLAMA), card='24GiB', dram='300GiB', nvme='1TB', ranks=2)
    for process, size in told.processes:
        assert size == sum(row.size for row in told.rows if row.process == process and row.place == 'memory')
    assert told.card == sum(row.size for row in told.rows if row.place == 'card') < 24 << 30
    assert told.disk == sum(row.size for row in told.rows if row.place == 'disk') > 12 * PARAMETERS
    processes = dict(told.processes)
    shared = sum(row.size for row in told.rows if row.is_shared)
    assert told.host == 2 * processes['trainer'] + processes['server'] - shared
    # An object does not tell where its weights are, and transformers' models cannot make them on the meta device, so each rank begins with
    # all of them.
    assert processes['trainer'] < 2 * PARAMETERS
    told = ballast.estimate(transformers.LlamaConfig(**{**LLAMA, 'dtype': 'bfloat16'}), card='24GiB', dram='300GiB', ranks=2)
    assert dict(told.processes)['trainer'] > 2 * PARAMETERS


@pytest.mark.parametrize('given, expected', [
    ('{', 'is not JSON'),
    ([1], 'expected an object'),
    ({'hidden_size': 64}, 'expected a config.json of transformers, with a model_type'),
    ({'model_type': 'nonesuch', 'auto_map': {}, 'hidden_size': 8, 'num_layers': 2}, 'which transformers .* does not know.*runs no'),
    ({**SMALL, 'architectures': ['NoneSuch']}, "architecture 'NoneSuch'.*Correct architectures"),
    ({'model_type': 'llama'}, 'has no hidden_size'),
    ({'model_type': 'gpt2', 'n_embd': 64}, 'has no num_hidden_layers'),
    ({key: value for key, value in SMALL.items() if key != 'vocab_size'}, 'has no vocab_size'),
    ({**SMALL, 'num_attention_heads': 3}, 'multiple of the number of attention heads'),
    ({**SMALL, 'hidden_size': -64}, 'Correct the configuration'),
    ({**SMALL, 'torch_dtype': 'float8_e4m3fn'}, 'expected one of float32, bfloat16, float16'),
    ({'model_type': 'vit', 'hidden_size': 64, 'num_hidden_layers': 2, 'intermediate_size': 64}, 'names no architectures'),
])
def test_what_is_wrong_is_said(given, expected, tmp_path):
    with pytest.raises(ballast.Error, match=expected) as caught:
        ballast.estimate(write(tmp_path, given), dram='1GiB')
    assert caught.value.reason == 'BAD_CONFIG'


def test_wrong_arguments(tmp_path):
    for source in (tmp_path / 'nothing', 'an/organisation'):
        with pytest.raises(ballast.Error, match='expected the path of a config.json'):
            ballast.estimate(source, dram='1GiB')
    write(tmp_path, SMALL)
    with pytest.raises(ballast.Error, match="dtype='int8'"):
        ballast.estimate(tmp_path, dram='1GiB', dtype='int8')
    with pytest.raises(ballast.Error, match='the model has one'):
        ballast.estimate(torch.nn.Linear(4, 4), dram='1GiB', dtype='float32')
    for card in ('24 cards', 0):
        with pytest.raises(ballast.Error, match='card='):
            ballast.estimate(tmp_path, dram='1GiB', card=card)


def test_transformers_comes_with_a_configuration_alone():
    script = ('import sys, torch, ballast; ballast.estimate(torch.nn.Linear(4, 4), dram="64MiB", card="1GiB"); '
              'sys.exit("transformers" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 0


def test_the_command(tmp_path, capsys):
    write(tmp_path, SMALL)
    assert main([str(tmp_path), '--card', '1GiB', '--dram', '64MiB', '--nvme', '1GB']) == 0
    said = capsys.readouterr().out
    assert 'It fits. The call:' in said and "nvme='1GB'" in said and 'gradient log' in said
    assert main([str(tmp_path), '--dram', '100KiB']) == 1
    assert 'It does not fit' in capsys.readouterr().out
    wrong = subprocess.run([sys.executable, '-m', 'ballast.torch.estimate', str(tmp_path / 'nothing')], capture_output=True, text=True,
                           check=False)
    assert wrong.returncode == 2 and wrong.stderr.startswith('estimate: ') and 'Traceback' not in wrong.stderr


def test_what_an_optimizer_takes_may_be_an_iterator():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    sources = (model.named_parameters(), list(model.named_parameters()))
    told = [ballast.estimate(source, dram='1GiB', card='4MiB').call for source in sources]
    assert told[0] == told[1]
    model.requires_grad_(False)
    frozen = list(model.named_parameters())
    assert not ballast.estimate(frozen, dram='1GiB', card='4MiB').fits
    with pytest.raises(ballast.Error, match='no tensors'):
        ballast.estimate(frozen, dram='1GiB', card='1GiB')
