"""Models from the meta device whose values stream in from safetensors, on one rank, and weights that go out again."""
import contextlib
import json
import os
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.weights import shards

safetensors = pytest.importorskip('safetensors.torch')
transformers = pytest.importorskip('transformers')
VOCABULARY = 64


@pytest.fixture(scope='module', autouse=True)
def rank():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def config(tied=True, **more):
    return transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, **more)


def llama(tied=True, dtype=torch.float32, **more):
    torch.manual_seed(4)
    model = transformers.LlamaForCausalLM(config(tied, **more)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms too
            parameter.add_(0.01 * torch.randn_like(parameter))
    return model


def on_meta(make):
    with torch.device('meta'):
        return make()


def from_meta(tied=True, dtype=torch.float32, **more):
    return on_meta(lambda: transformers.LlamaForCausalLM(config(tied, **more)).to(dtype))


def optimizer_of(model, job, **more):
    return bt.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, **{**job, **more})


def batch():
    tokens = (torch.randint(VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(3)) + torch.arange(16)) % VOCABULARY
    return {'input_ids': tokens, 'labels': tokens}


def train(model, optimizer, steps=8):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def read(folder):
    """The tensors of all files."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith('.safetensors'):
            found.update(safetensors.load_file(folder / name))
    return found


def assert_equal(came, expected):
    assert came.keys() == expected.keys()
    for name, value in expected.items():
        assert came[name].dtype == value.dtype and torch.equal(came[name], value), name


def refused(model, weights, job=None):
    """What is told, at shard() or, with a job, when it opens."""
    with pytest.raises(ballast.Error) as told:
        bt.shard(model, weights=weights)
        if job is not None:
            optimizer_of(model, job).resume()
    return str(told.value)


# --- in and out

@pytest.mark.parametrize('tied', [True, False])
def test_trains_as_from_pretrained_and_saves_the_same(tied, job, tmp_path):
    llama(tied).save_pretrained(tmp_path / 'in', max_shard_size='20KB')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'in', dtype=torch.float32)
    model = bt.shard(from_meta(tied), weights=tmp_path / 'in')
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    bt.save_weights(model, tmp_path / 'untrained')
    assert_equal(read(tmp_path / 'untrained'), read(tmp_path / 'in'))
    names = {name for name in os.listdir(tmp_path / 'in') if 'safetensors' in name}
    assert len(names) > 5 and names <= set(os.listdir(tmp_path / 'untrained'))
    total = sum(value.nbytes for value in read(tmp_path / 'in').values())
    assert optimizer.stats()['weights_bytes'] == total
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1))
    came = train(model, optimizer)
    torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    bt.save_weights(model, tmp_path / 'trained')
    with bt.gathered(model):
        whole = {name: value.clone() for name, value in model.named_parameters()}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'trained', dtype=torch.float32)
    assert_equal(dict(again.named_parameters()), whole)
    optimizer.close()


@pytest.mark.parametrize('kept,made', [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                       (torch.float16, torch.float32)])
def test_dtypes_keep_all_bits(kept, made, job, tmp_path):
    """A checkpoint of more bits than the parameters lives on in their masters."""
    llama(dtype=kept).save_pretrained(tmp_path / 'in')
    model = bt.shard(from_meta(dtype=made), weights=tmp_path / 'in/model.safetensors')
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    bt.save_weights(model, tmp_path / 'out')
    assert_equal(read(tmp_path / 'out'), read(tmp_path / 'in'))
    bt.save_weights(model, tmp_path / 'other', dtype=torch.bfloat16, shard_bytes=15_000)
    assert_equal(read(tmp_path / 'other'), {name: value.bfloat16() for name, value in read(tmp_path / 'in').items()})
    index = json.loads((tmp_path / 'other/model.safetensors.index.json').read_text())
    assert len(set(index['weight_map'].values())) > 2 and index['weight_map'].keys() == read(tmp_path / 'in').keys()
    optimizer.close()


def test_a_model_with_values_gets_the_checkpoints(job, tmp_path):
    llama().save_pretrained(tmp_path)
    torch.manual_seed(9)
    model = bt.shard(transformers.LlamaForCausalLM(config()), weights=tmp_path)
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    with bt.gathered(model):
        assert_equal(dict(model.named_parameters()), dict(llama().named_parameters()))
    optimizer.close()


def test_a_frozen_reference(tmp_path):
    llama().save_pretrained(tmp_path)
    model = bt.shard(from_meta().requires_grad_(False), weights=tmp_path)
    with torch.no_grad():
        assert model(**batch()).loss.item() == llama()(**batch()).loss.item()


def test_without_a_checkpoint_names_are_the_models(job, tmp_path):
    model = bt.shard(llama())
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    bt.save_weights(model, tmp_path / 'out')
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    assert_equal(dict(again.named_parameters()), dict(llama().named_parameters()))
    with pytest.raises(ballast.Error, match=r"has 'model.safetensors' already"):
        bt.save_weights(model, tmp_path / 'out')
    optimizer.close()
    with pytest.raises(ballast.Error, match='no parameter of this model lives on the servers'):
        bt.save_weights(llama(), tmp_path / 'plain')


def test_tiles_of_a_layer(job, tmp_path):
    torch.manual_seed(5)
    layer = nn.Linear(10, 14)
    safetensors.save_file({f'0.{name}': value.detach() for name, value in layer.named_parameters()}, tmp_path / 'in.safetensors')
    model = bt.shard(on_meta(lambda: nn.Sequential(bt.TiledLinear(10, 14, in_tiles=3, out_tiles=4))), weights=tmp_path / 'in.safetensors')
    optimizer = optimizer_of(model, job)
    x = torch.randn(3, 10)
    with torch.no_grad():
        torch.testing.assert_close(model(x), layer(x))
    bt.save_weights(model, tmp_path / 'out')
    assert_equal(read(tmp_path / 'out'), {f'0.{name}': value for name, value in layer.state_dict().items()})
    optimizer.close()


def test_a_header_of_any_length(job, tmp_path):
    """The format asks for no alignment of the data."""
    safetensors.save_file({'weight': torch.arange(6.0).view(2, 3), 'bias': torch.ones(2)}, tmp_path / 'even.safetensors')
    data = (tmp_path / 'even.safetensors').read_bytes()
    length = struct.unpack('<Q', data[:8])[0]
    header = data[8:8 + length].rstrip(b' ') + b'   '
    header += b' ' * (1 - len(header) % 2)
    (tmp_path / 'odd.safetensors').write_bytes(struct.pack('<Q', len(header)) + header + data[8 + length:])
    model = bt.shard(on_meta(lambda: nn.Linear(3, 2)), weights=tmp_path / 'odd.safetensors')
    optimizer = optimizer_of(model, job)
    with torch.no_grad():
        assert torch.equal(model(torch.eye(3)), torch.arange(6.0).view(2, 3).T + 1)
    optimizer.close()


# --- buffers

class Frequencies(nn.Module):
    """Has a buffer that no checkpoint has."""

    def __init__(self, width, base=10.0):
        super().__init__()
        self.width, self.base = width, base
        self.register_buffer('inverse', 1.0 / base ** (torch.arange(width) / width), persistent=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequencies, self.norm, self.head = Frequencies(6, base=3.0), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.norm(x * self.frequencies.inverse))


def test_buffers(job, tmp_path):
    torch.manual_seed(6)
    real = Net()
    real(torch.randn(20, 6))
    assert real.norm.num_batches_tracked == 1
    safetensors.save_file(real.state_dict(), tmp_path / 'in.safetensors')
    model = bt.shard(on_meta(Net), weights=tmp_path / 'in.safetensors')
    assert_equal(dict(model.named_buffers()), dict(real.named_buffers()))
    optimizer = optimizer_of(model, job)
    with torch.no_grad():
        assert torch.equal(model.eval()(torch.ones(2, 6)), real.eval()(torch.ones(2, 6)))
    bt.save_weights(model, tmp_path / 'out')
    assert_equal(read(tmp_path / 'out'), real.state_dict())
    optimizer.close()
    has_values = bt.shard(Net(), weights=tmp_path / 'in.safetensors')
    assert_equal(dict(has_values.named_buffers()), dict(real.named_buffers()))


@pytest.mark.parametrize('rope', [None, {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 5000.0}])
def test_rotary_frequencies_are_made_again(rope, tmp_path):
    more = {} if rope is None else {'rope_parameters': rope}
    llama(**more).save_pretrained(tmp_path)
    model = bt.shard(from_meta(**more), weights=tmp_path)
    expected = dict(llama(**more).named_buffers())
    assert expected
    assert_equal(dict(model.named_buffers()), expected)


def test_rotary_frequencies_without_the_help_of_transformers(monkeypatch):
    """As with transformers before 5, whose _init_weights() knows no buffers."""
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, '_init_weights', lambda self, module: None)
    model = bt.shard(from_meta())
    assert_equal(dict(model.named_buffers()), dict(llama().named_buffers()))


class Doubled(Frequencies):
    """What it keeps of its argument is not what it was given."""

    def __init__(self, width, base=10.0):
        super().__init__(width, base)
        self.base = 2 * base


class Lost(Frequencies):
    def __init__(self, size):
        super().__init__(size)


class Forgetful(Frequencies):
    """Its argument has a default, which it may not have been given."""

    def __init__(self, width, scale=1.0):
        super().__init__(width)
        self.inverse *= scale


@pytest.mark.parametrize('make,why', [(lambda: Doubled(6), "made again it has another attribute 'base'"),
                                      (lambda: Forgetful(6, 3.0), "its argument 'scale' is no attribute"),
                                      (lambda: Lost(6), "its argument 'size' is no attribute")])
def test_buffers_that_nothing_makes_again(make, why):
    model = on_meta(lambda: nn.Sequential(nn.Linear(6, 6), make()))
    with pytest.raises(ballast.Error, match="buffer '1.inverse' is on the meta device, where it has no values") as told:
        bt.shard(model)
    assert why in str(told.value) and "model.get_submodule('1').inverse" in str(told.value)
    model.get_submodule('1').inverse = make().inverse
    bt.shard(model)


# --- names

def test_checkpoints_of_the_base_model_and_of_a_head(job, tmp_path):
    model = llama(tied=False)
    model.model.save_pretrained(tmp_path / 'base')
    model.save_pretrained(tmp_path / 'whole')
    base = bt.shard(on_meta(lambda: transformers.LlamaModel(config())), weights=bt.Weights(tmp_path / 'whole', ignore=['lm_head']))
    optimizer = optimizer_of(base, job)
    optimizer.resume()
    with bt.gathered(base):
        assert_equal(dict(base.named_parameters()), dict(model.model.named_parameters()))
    optimizer.close()
    headed = from_meta(tied=False)
    assert "has no tensor for 'lm_head.weight' of the model (1 such)" in refused(from_meta(tied=False), tmp_path / 'base')
    assert "'lm_head.weight' is among Weights(missing=) and on the meta device" in refused(
        from_meta(tied=False), bt.Weights(tmp_path / 'base', missing=['lm_head']))
    headed.lm_head.to_empty(device='cpu')
    torch.nn.init.constant_(headed.lm_head.weight, 0.5)
    bt.shard(headed, weights=bt.Weights(tmp_path / 'base', missing=['lm_head']))
    optimizer = optimizer_of(headed, {**job, 'name': job['name'] + 'headed'})
    optimizer.resume()
    with bt.gathered(headed):
        assert headed.lm_head.weight.eq(0.5).all()
        assert_equal(dict(headed.model.named_parameters()), dict(model.model.named_parameters()))
    optimizer.close()


def test_names_of_older_checkpoints(job, tmp_path):
    """transformers renames gamma and beta; the rest is the caller's."""
    make = lambda: transformers.BertModel(transformers.BertConfig(  # noqa: E731
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=8))
    torch.manual_seed(7)
    real = make()
    old = {f'old.{name}'.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta'): value.detach().clone()
           for name, value in real.named_parameters()}
    safetensors.save_file(old, tmp_path / 'in.safetensors')
    assert "has tensor 'old." in refused(on_meta(make), tmp_path / 'in.safetensors')
    model = bt.shard(on_meta(make), weights=bt.Weights(tmp_path / 'in.safetensors', rename=[(r'^old\.', '')]))
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    with bt.gathered(model):
        assert_equal(dict(model.named_parameters()), dict(real.named_parameters()))
    bt.save_weights(model, tmp_path / 'out')
    assert_equal(read(tmp_path / 'out'), old)
    optimizer.close()


def test_adapters_over_a_base(job, tmp_path):
    """peft's words in names are not the checkpoint's; adapters have their own values."""
    peft = pytest.importorskip('peft')
    llama().save_pretrained(tmp_path)
    torch.manual_seed(8)
    model = peft.get_peft_model(from_meta(), peft.LoraConfig(r=2, target_modules=['q_proj'], task_type='CAUSAL_LM'))
    for module in model.modules():
        if hasattr(module, 'reset_lora_parameters'):
            module.lora_A.to_empty(device='cpu')
            module.lora_B.to_empty(device='cpu')
            module.reset_lora_parameters('default', init_lora_weights=True)
    bt.shard(model, weights=bt.Weights(tmp_path, missing=['lora_']))
    optimizer = optimizer_of(model, job)
    assert model(**batch()).loss.item() == llama()(**batch()).loss.item()
    losses = train(model, optimizer, 5)
    assert losses[-1] < losses[0]
    with pytest.raises(ballast.Error, match='adapters of peft.*within ballast.torch.gathered'):
        bt.save_weights(model, tmp_path / 'out')
    optimizer.close()


def test_values_that_transformers_computes_are_refused(tmp_path):
    """It stacks the experts of a checkpoint."""
    sizes = transformers.MixtralConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
                                       num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
                                       max_position_embeddings=16)
    real = transformers.MixtralForCausalLM(sizes)
    real.save_pretrained(tmp_path / 'in')
    said = refused(on_meta(lambda: transformers.MixtralForCausalLM(sizes)), tmp_path / 'in')
    assert 'experts.0.w1.weight' in said and 'by stacking, cutting or transposing, and shard() only renames' in said
    safetensors.save_model(real, str(tmp_path / 'own.safetensors'))
    bt.shard(on_meta(lambda: transformers.MixtralForCausalLM(sizes)), weights=tmp_path / 'own.safetensors')


# --- what does not fit

def saved(folder, **changes):
    """A checkpoint of a linear layer, in two files. changes: what it has otherwise; None: nothing of that name."""
    folder.mkdir()
    tensors = {'weight': torch.arange(12.0).view(3, 4), 'bias': torch.ones(3), **changes}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    for name, value in tensors.items():
        safetensors.save_file({name: value}, folder / f'{name}.safetensors')
    index = {'weight_map': {name: f'{name}.safetensors' for name in tensors}}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))
    return folder


def cut(folder):
    (folder / 'weight.safetensors').write_bytes((folder / 'weight.safetensors').read_bytes()[:-1])


def without_data(folder):
    (folder / 'weight.safetensors').write_bytes(b'')


def long_header(folder):
    (folder / 'weight.safetensors').write_bytes(b'\xff' * 40)


def no_json(folder):
    data = bytearray((folder / 'weight.safetensors').read_bytes())
    data[9] = 0xff
    (folder / 'weight.safetensors').write_bytes(data)


def wrong_shape(folder):
    data = (folder / 'weight.safetensors').read_bytes()
    (folder / 'weight.safetensors').write_bytes(data.replace(b'[3,4]', b'[3,5]'))


def hole(folder):
    data = (folder / 'weight.safetensors').read_bytes()
    (folder / 'weight.safetensors').write_bytes(data.replace(b'[0,48]', b'[4,52]') + b'1234')


def gone(folder):
    (folder / 'bias.safetensors').unlink()


def elsewhere(folder):
    index = {'weight_map': {'weight': 'weight.safetensors', 'bias': 'weight.safetensors'}}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


def outside(folder):
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'weight': '../weight.safetensors'}}))


def bad_index(folder):
    (folder / 'model.safetensors.index.json').write_text('{')


@pytest.mark.parametrize('harm,said', [
    (cut, "weight.safetensors' is damaged or cut off: its header speaks of 48 bytes of data, and it has 47"),
    (without_data, "weight.safetensors' is damaged or cut off: its 0 bytes do not begin with the length of a header"),
    (long_header, "weight.safetensors' is damaged or cut off: its 40 bytes do not begin with the length of a header that fits"),
    (no_json, "weight.safetensors' is damaged or cut off: its header is no JSON"),
    (wrong_shape, "weight.safetensors' is damaged or cut off: tensor 'weight' of shape [3, 5] and dtype F32 has 48 bytes"),
    (hole, "weight.safetensors' is damaged or cut off: tensor 'weight' begins at byte 4 of the data; expected 0"),
    (gone, "bias.safetensors' cannot be read: No such file"),
    (elsewhere, "has tensor 'bias' in 'weight.safetensors', which does not have it"),
    (outside, "'weight_map' does not name files of the folder"),
    (bad_index, "model.safetensors.index.json' is damaged"),
], ids=lambda value: getattr(value, '__name__', ''))
def test_damage_is_named_before_anything_changes(harm, said, tmp_path):
    folder = saved(tmp_path / 'in')
    harm(folder)
    model = on_meta(lambda: nn.Linear(4, 3))
    assert said in refused(model, folder)
    assert type(model) is nn.Linear and model.weight.is_meta


@pytest.mark.parametrize('changes,said', [
    ({'bias': None}, "has no tensor for 'bias' of the model (1 such)"),
    ({'more': torch.ones(1)}, "has tensor 'more', for which the model has no place (1 such)"),
    ({'weight': torch.ones(4, 3)}, "has shape [4, 3], and 'weight' of the model has [3, 4]"),
    ({'weight': torch.ones(3, 4, dtype=torch.float64)},
     "is F64, and 'weight' of the model is torch.float32; expected float32, bfloat16, float16"),
    ({'weight': torch.ones(3, 4, dtype=torch.int8)}, "is I8, and 'weight' of the model is torch.float32"),
])
def test_what_does_not_fit_is_named_before_anything_changes(changes, said, tmp_path):
    model = on_meta(lambda: nn.Linear(4, 3))
    assert said in refused(model, saved(tmp_path / 'in', **changes))
    assert type(model) is nn.Linear and model.weight.is_meta


def test_paths_that_are_no_checkpoint(tmp_path):
    model = on_meta(lambda: nn.Linear(4, 3))
    assert 'there is no such path' in refused(model, tmp_path / 'none')
    assert 'the folder has no *.safetensors' in refused(model, tmp_path)
    (tmp_path / 'pytorch_model.bin').write_bytes(b'')
    assert "but 'pytorch_model.bin'; load that into a model once" in refused(model, tmp_path)
    for name in ('a.safetensors', 'b.safetensors'):
        (tmp_path / name).write_bytes(b'')
    assert "the folder has a.safetensors, b.safetensors and no 'model.safetensors'" in refused(model, tmp_path)


@pytest.mark.parametrize('weights,said', [
    (7, 'weights=7: expected a path'),
    (bt.Weights('.', ignore='lm_head'), "Weights(ignore='lm_head'): expected a list of patterns"),
    (bt.Weights('.', missing=['(']), "Weights(missing=['(']): missing ), unterminated subpattern"),
    (bt.Weights('.', rename=['old.']), "Weights(rename=['old.']): expected a list of (pattern, replacement) pairs"),
])
def test_arguments_that_are_none(weights, said):
    assert said in refused(on_meta(lambda: nn.Linear(4, 3)), weights)


def test_a_tie_with_two_values(job, tmp_path):
    model = llama(tied=False)
    model.save_pretrained(tmp_path / 'differ')
    said = refused(from_meta(tied=True), tmp_path / 'differ', job)
    assert "parameter 'model.embed_tokens.weight' is tied in the model, but tensor 'lm_head.weight' in" in said
    bt.shard(from_meta(tied=True), weights=bt.Weights(tmp_path / 'differ', ignore=['lm_head']))
    assert "has no tensor for 'model.embed_tokens.weight' of the model (1 such)" in refused(
        from_meta(tied=False), bt.Weights(tmp_path / 'differ', ignore=['embed']))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path / 'same')
    again = bt.shard(from_meta(tied=True), weights=tmp_path / 'same')
    optimizer = optimizer_of(again, {**job, 'name': job['name'] + 'again'})
    optimizer.resume()
    bt.save_weights(again, tmp_path / 'out')
    assert_equal(read(tmp_path / 'out'), read(tmp_path / 'same'))  # under both names
    optimizer.close()


def test_a_value_that_is_not_finite_begins_no_job(job, tmp_path):
    folder = saved(tmp_path / 'in', weight=torch.full((3, 4), float('nan')))
    durable = {**job, 'directory': tmp_path / 'state', 'nvme': '512MiB'}
    assert "element 0 of tensor 'weight' is nan" in refused(on_meta(lambda: nn.Linear(4, 3)), folder, durable)
    good = bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=saved(tmp_path / 'good'))
    optimizer = optimizer_of(good, durable, resume='auto')
    assert optimizer.resume().step == 0
    with torch.no_grad():
        assert good(torch.zeros(1, 4)).tolist() == [[1.0] * 3]
    optimizer.close()


def test_a_checkpoint_that_changes_meanwhile(job, tmp_path):
    model = bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=saved(tmp_path / 'in'))
    safetensors.save_file({'weight': torch.ones(3, 4)}, tmp_path / 'in/weight.safetensors')
    optimizer = optimizer_of(model, job)
    with pytest.raises(ballast.Error, match=r"weight.safetensors' has changed since its header was read"):
        optimizer.resume()
    optimizer.close()


def test_a_file_that_is_cut_off_before_it_is_read(job, tmp_path):
    folder = saved(tmp_path / 'in')
    model = bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=folder)
    size = os.path.getsize(folder / 'weight.safetensors')
    os.truncate(folder / 'weight.safetensors', size - 4)
    optimizer = optimizer_of(model, job)
    with pytest.raises(ballast.Error, match=r"weight.safetensors' was cut off since its header was read: tensor 'weight' is expected up "
                                            rf"to byte {size}, and the file ends at byte {size - 4}\. .*\[CHECKSUM\]"):
        optimizer.resume()
    optimizer.close()


def test_a_file_that_is_cut_off_while_it_is_read(job, tmp_path, monkeypatch):
    """Of a mapped file the process would get SIGBUS."""
    folder = saved(tmp_path / 'in', weight=torch.ones(300, 4), bias=torch.ones(300))
    model = bt.shard(on_meta(lambda: nn.Linear(4, 300)), weights=folder)
    size, read = os.path.getsize(folder / 'weight.safetensors'), os.preadv
    at_once = []

    def reads(file, buffers, offset):
        if os.path.samefile(f'/proc/self/fd/{file}', folder / 'weight.safetensors'):
            os.truncate(folder / 'weight.safetensors', size - 16)
            at_once.append(len(buffers[0]))
        return read(file, [buffers[0][:1000]], offset)
    monkeypatch.setattr(os, 'preadv', reads)
    optimizer = optimizer_of(model, job)
    with pytest.raises(ballast.Error, match=rf"tensor 'weight' is expected up to byte {size}, and the file ends at byte {size - 16}\."):
        optimizer.resume()
    assert at_once[0] == 4800 and len(at_once) > 4  # a read that stops early goes on
    optimizer.close()


@pytest.mark.parametrize('box', [[(0, 7), (0, 5), (0, 3)], [(2, 6), (0, 5), (0, 3)], [(1, 7), (2, 4), (0, 3)], [(0, 7), (0, 5), (1, 2)],
                                 [(3, 3), (0, 5), (0, 3)], [(0, 7), (2, 2), (0, 3)]])
@pytest.mark.parametrize('block', [1, 100, 1 << 20])
def test_parts_of_a_tensor(box, block, tmp_path, monkeypatch):
    """Rows of which some columns are wanted come block by block."""
    monkeypatch.setattr(shards, '_BLOCK_BYTES', block)
    values = torch.arange(105, dtype=torch.bfloat16).view(7, 5, 3)
    safetensors.save_file({'pad': torch.ones(3, dtype=torch.int8), 'values': values}, tmp_path / 'in.safetensors')
    part = shards.File(str(tmp_path / 'in.safetensors')).entries['values'].read(box)
    assert torch.equal(part, values[tuple(slice(*each) for each in box)]) and part.is_contiguous()


# --- a job that is there

def opened_with(weights, job, folder, caplog, steps=0):
    """What is told of a job that opens, and the first row of its parameter."""
    caplog.clear()
    caplog.set_level('INFO', logger='ballast')
    model = bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=weights)
    optimizer = optimizer_of(model, {**job, 'directory': folder / 'state', 'nvme': '512MiB'}, resume='auto')
    try:
        optimizer.resume()
        with bt.gathered(model):
            row = model.weight[0].tolist()
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return caplog.text, row
    finally:
        optimizer.close()


def test_a_job_that_goes_on_says_that_it_reads_no_checkpoint(job, tmp_path, caplog):
    first, other = saved(tmp_path / 'first'), saved(tmp_path / 'other', weight=torch.full((3, 4), 2.0))
    alike = saved(tmp_path / 'alike')
    name = job['name']
    said, row = opened_with(first, job, tmp_path, caplog)
    assert f"job '{name}' is new" in said and row == [0, 1, 2, 3]
    for step in (0, 1):  # before and behind its first step
        said, row = opened_with(alike, job, tmp_path, caplog, steps=1)
        assert said.count(f'goes on after step {step} (version') == 1
        assert said.count(f"; it has its own values, and parameters were not read from weights='{alike}'") == 1
        with pytest.raises(ballast.Error, match=rf"job '{name}' exists and began with another checkpoint than shard\(weights='{other}'"
                                                r"\): its digest is \w+, this one's is \w+\..*\[BAD_SPEC\]"):
            opened_with(other, job, tmp_path, caplog)
    assert row != [0, 1, 2, 3]  # of the step
    said, again = opened_with(None, job, tmp_path, caplog)
    assert 'goes on after step 2' in said and 'weights' not in said and again != row


def test_a_load_and_a_rollback_keep_what_a_job_began_with(job, tmp_path):
    first, other = saved(tmp_path / 'first'), saved(tmp_path / 'other', weight=torch.full((3, 4), 2.0))
    durable = {**job, 'directory': tmp_path / 'state', 'nvme': '512MiB'}
    model = bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=first)
    with contextlib.closing(optimizer_of(model, durable)) as optimizer:
        optimizer.resume()
        kept = optimizer.state_dict()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step(blob=b'position')
        optimizer.load_state_dict(optimizer.full_state_dict())
        optimizer.load_state_dict(kept)
        assert optimizer.resume() == (0, b'')
    with pytest.raises(ballast.Error, match='exists and began with another checkpoint'):
        optimizer_of(bt.shard(on_meta(lambda: nn.Linear(4, 3)), weights=other), durable, resume='must').resume()


# --- what users meet first

def test_parameters_without_names_have_the_models(job, tmp_path):
    """As optimizers get them from trainers."""
    llama().save_pretrained(tmp_path / 'in')
    model = bt.shard(from_meta(), weights=tmp_path / 'in')
    durable = {**job, 'directory': tmp_path / 'state', 'nvme': '512MiB'}
    optimizer = bt.AdamW(list(model.parameters()), lr=1e-2, **durable)
    assert optimizer.param_groups[0]['param_names'] == [name for name, _ in model.named_parameters()]
    losses = train(model, optimizer, 3)
    optimizer.close()
    again = bt.shard(from_meta(), weights=tmp_path / 'in')
    named = bt.AdamW([*again.named_parameters()][::-1], lr=1e-2, **durable, resume='must')  # in another order
    assert named.resume().step == 3
    assert train(again, named, 1)[0] < losses[-1]
    named.close()


def test_a_model_on_meta_needs_shard(job):
    model = from_meta()
    with pytest.raises(ballast.Error, match=r"parameter 'model.embed_tokens.weight' is on meta; .*shard\(model, weights='folder'\)"):
        optimizer_of(model, job).resume()


def test_a_conversion_that_changes_nothing_passes(tmp_path):
    model = bt.shard(from_meta())
    assert model.to('cpu') is model and model.to(torch.device('cpu', 0)) is model and model.cpu() is model and model.float() is model
    nn.ModuleList([model]).to(device='cpu', dtype=torch.float32)
    with pytest.raises(ballast.Error, match="parameter '.*' lives on Ballast's servers .* a change to torch.float16 on cpu"):
        model.half()
    with pytest.raises(ballast.Error, match='a change of values, as by to_empty'):
        model.to_empty(device='cpu')


def test_values_beyond_fp16_are_not_written_in_it(job, tmp_path):
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight[1, 2] = 1e5
    bt.shard(model)
    optimizer = optimizer_of(model, job)
    optimizer.resume()
    with pytest.raises(ballast.Error, match="'weight' has values beyond float16"):
        bt.save_weights(model, tmp_path, dtype=torch.float16)
    assert not any('safetensors' in name for name in os.listdir(tmp_path))
    (tmp_path / 'model.safetensors.tmp').write_bytes(b'of a save that was killed')
    bt.save_weights(model, tmp_path, dtype=torch.bfloat16)
    assert_equal(read(tmp_path), {'weight': model_weight(model).bfloat16()})
    optimizer.close()


def model_weight(model):
    with bt.gathered(model):
        return model.weight.detach().clone()


def test_a_card_that_is_too_small(monkeypatch):
    from ballast.torch.sharding import blocks  # noqa: PLC0415
    monkeypatch.setattr(blocks, 'card_bytes', lambda device: 3 << 20)
    model = on_meta(lambda: nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(8, 8)))
    with pytest.raises(ballast.Error, match=r"unit '\(root\)' takes 4 MiB, and cpu has 3 MiB. .* is '0.weight' \(2 MiB\).*TiledLinear"):
        bt.shard(model)
    bt.shard(on_meta(lambda: nn.Sequential(bt.TiledLinear(1024, 512, out_tiles=4), nn.ReLU(), nn.Linear(8, 8))))
