"""What autograd saves, put aside by ballast.torch.stash: the bits that training has without it, and which bytes go where."""
import contextlib
import copy
import gc
import os
import threading
import time

import pytest
import torch
from blocks import Stack, batch_of, train
from own_process import run, run_anew
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ballast
import ballast.torch as bt
from ballast.torch.activations import stash as activations

MIB = 1 << 20
WIDTH = 64
TENSOR = 8 * 64 * WIDTH * 4  # bytes of batch_of(WIDTH)

PLACES = {'dram': {'dram': '1GiB'}, 'nvme': {'dram': 0, 'nvme': '1GiB'}, 'both': {'dram': '1MiB', 'nvme': '1GiB'}}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: on a busy machine torch's threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_staging(monkeypatch):
    """Little stays in staging memory by chance."""
    for name in ('_STAGING', '_STAGING_BESIDE_GPU'):
        monkeypatch.setattr(activations, name, 8 * MIB)


@pytest.fixture(params=['host', 'copied', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'))])
def device(request, monkeypatch):
    """copied: the way of a GPU's memory, without a GPU and its streams."""
    if request.param == 'copied':
        monkeypatch.setattr(activations, 'is_elsewhere', lambda tensor: True)
    return torch.device('cuda' if request.param == 'cuda' else 'cpu')


@pytest.fixture
def stash(tmp_path, small_staging):
    with contextlib.ExitStack() as closing:
        def make(model=None, **budgets):
            made = bt.stash(model, directory=tmp_path, **(budgets or PLACES['nvme']))
            closing.callback(made.close)
            return made
        yield make


def assert_same(mine, theirs):
    assert mine[0] == theirs[0]
    for a, b in zip(mine[1], theirs[1]):
        assert torch.equal(a, b)


def held(stash):
    """Bytes. A part that is on its way to the disk, or to a device, goes when it is there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        gc.collect()
        stats = stash.stats()
        if stats['dram'] + stats['nvme'] == 0:
            break
        time.sleep(0.002)
    return stats['dram'] + stats['nvme']


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('recompute', [None, False, True])
def test_training_has_the_bits_that_it_has_without(place, recompute, device, stash):
    model = Stack(WIDTH, recompute=recompute).to(device)
    x = batch_of(WIDTH).to(device).requires_grad_()  # reentrant recompute wants it
    expected = train(copy.deepcopy(model), x, contextlib.nullcontext())
    kept = stash(model, **PLACES[place])
    assert_same(train(model, x, kept), expected)
    stats = kept.stats()
    blocks = 3 * 16 * TENSOR
    assert stats['moved'] > (8 * blocks if recompute is None else 0.9 * blocks)
    assert (stats['written'] > 0) == (place != 'dram')
    assert (stats['read'] > 0) == (place != 'dram' and recompute is None)  # else all is in staging memory still
    assert held(kept) == 0


def test_recompute_inside_the_context_of_backward(device, stash):
    model = Stack(WIDTH, depth=4, recompute=True).to(device)
    x = batch_of(WIDTH).to(device).requires_grad_()
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kept = stash(model)
    with kept:
        model(x).square().mean().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected))
    assert kept.stats()['moved'] > 8 * 4 * TENSOR  # the recomputed tensors, too
    assert held(kept) == 0


def test_the_wrapper_runs_the_model_within_the_context(stash):
    model = Stack(WIDTH, depth=2)
    x = batch_of(WIDTH)
    expected = model(x)
    kept = stash(model)
    assert torch.equal(kept(x), expected)
    assert kept.stats()['moved'] > 0
    moved = kept.stats()['moved']
    model(x)
    assert kept.stats()['moved'] == moved


def test_a_tensor_saved_more_than_once_is_kept_once(device, stash):
    x = batch_of(WIDTH).to(device).requires_grad_()
    layers = [nn.Linear(WIDTH, 1).to(device) for _ in range(3)]
    kept = stash()
    with kept:
        y = x.exp()
        loss = sum(layer(y).sum() for layer in layers)
    stats = kept.stats()
    assert (stats['moved'], stats['shared'], stats['nvme']) == (TENSOR, 3 * TENSOR, TENSOR)  # by exp() and by each layer
    loss.backward()
    y = x.detach().exp()
    assert torch.equal(x.grad, sum(torch.ones_like(y[..., :1]) @ layer.weight for layer in layers) * y)
    for layer in layers:
        assert torch.equal(layer.weight.grad, torch.ones_like(y.view(-1, WIDTH)[:, :1]).T @ y.view(-1, WIDTH))
    if kept.stats()['read']:
        assert kept.stats()['read'] == TENSOR


def test_views_with_gaps_share_their_storage(device, stash):
    """Query, key and value of an attention."""
    both = torch.randn(8, 64, 3 * WIDTH, device=device, requires_grad=True)
    kept = stash()

    def loss_of(whole):
        q, k, v = ((whole * 1).chunk(3, dim=-1))
        return (q * k * v).sum()

    loss_of(both).backward()
    expected, both.grad = both.grad, None
    with kept:
        loss = loss_of(both)
    # q, k, v and the product of two.
    assert kept.stats()['moved'] == 3 * TENSOR + TENSOR
    loss.backward()
    assert torch.equal(both.grad, expected)


class Remember(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, saved, came):
        ctx.save_for_backward(saved)
        ctx.came = came
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.came.append(ctx.saved_tensors[0])
        return gradient, None, None


BASE = torch.arange(1 << 20, dtype=torch.float32)
GEOMETRIES = {
    'plain': lambda base: base,
    'from the middle': lambda base: base[1001:200001],
    'transposed': lambda base: base.view(1024, 1024).t(),
    'permuted part': lambda base: base.view(64, 128, 128)[3:40].permute(2, 0, 1),
    'every second': lambda base: base[::2],
    'every tenth': lambda base: base[7::10],
    'a corner': lambda base: base.view(1024, 1024)[5:300, 17:200],
    'expanded': lambda base: base[:4096].view(4096, 1).expand(4096, 512),
    'overlapping': lambda base: base.unfold(0, 256, 128),
    'bfloat16': lambda base: base.bfloat16()[3:],
    'complex': lambda base: torch.view_as_complex(base.view(-1, 2))[1:],
    'of bytes': lambda base: base.view(torch.uint8)[3:],
    'larger than a part': lambda base: base.repeat(5)[:5 * (1 << 20) - 17],
    'conjugated': lambda base: torch.view_as_complex(base.view(-1, 2)).conj(),
    'sparse': lambda base: torch.eye(400).to_sparse(),
    'empty': lambda base: base[:0],
    'small': lambda base: base[:5],
    'scalar': lambda base: base[7],
}


@pytest.mark.parametrize('geometry', GEOMETRIES)
def test_a_tensor_comes_back_as_it_lay(geometry, device, stash):
    saved = GEOMETRIES[geometry](BASE.to(device))
    at = saved.data_ptr() % 64 if saved.layout is torch.strided else 0
    expected = saved.clone()
    x, came = torch.ones(1, device=device, requires_grad=True), []
    with stash():
        y = Remember.apply(x, saved, came)
    y.backward(retain_graph=True)
    del saved
    y.backward()
    for tensor in came:
        assert (tensor.shape, tensor.dtype, tensor.layout) == (expected.shape, expected.dtype, expected.layout)
        assert torch.equal(tensor.to_dense() if tensor.is_sparse else tensor, expected.to_dense() if expected.is_sparse else expected)
        if tensor.layout is torch.strided:
            assert tensor.stride() == GEOMETRIES[geometry](BASE.to(device)).stride()
            assert tensor.is_conj() == (geometry == 'conjugated')
            if geometry not in ('every tenth', 'a corner'):  # packed
                assert tensor.data_ptr() % 64 == at


@pytest.mark.parametrize('with_model', [False, True])
def test_weights_stay(with_model, device, stash):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
            self.register_buffer('mask', torch.rand(4 * WIDTH, 128 * WIDTH))

        def forward(self, x):
            return self.linear(x) @ self.mask

    model = Model().to(device)
    weight, buffer = model.linear.weight.numel() * 4, model.mask.numel() * 4
    assert weight >= activations.SMALL_BYTES
    kept = stash(model if with_model else None)
    x = batch_of(WIDTH).to(device).requires_grad_()
    with kept:
        loss = model(x).sum()
    stats = kept.stats()
    assert stats['weights'] == weight + (buffer if with_model else 0)
    assert stats['moved'] == TENSOR + (0 if with_model else buffer)
    loss.backward()
    assert x.grad is not None


def test_backward_twice(device, stash):
    model = Stack(WIDTH, depth=4).to(device)
    x = batch_of(WIDTH).to(device)
    kept = stash(model)
    with kept:
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    assert kept.stats()['nvme'] > 0
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once))
    assert held(kept) == 0


def test_gradients_of_gradients(device, stash):
    x = batch_of(WIDTH).to(device).requires_grad_()
    layer = nn.Linear(WIDTH, WIDTH).to(device)

    def second(around):
        with around:
            first, = torch.autograd.grad(layer(x).tanh().square().sum(), x, create_graph=True)
            loss = first.square().sum()
        return torch.autograd.grad(loss, [x, *layer.parameters()])

    expected = second(contextlib.nullcontext())
    kept = stash()
    assert all(torch.equal(a, b) for a, b in zip(second(kept), expected))
    assert kept.stats()['moved'] > 0


def test_a_forward_pass_without_backward_gives_its_space_back(device, stash):
    model = Stack(WIDTH, depth=4).to(device)
    kept = stash(model, dram='2MiB', nvme='1GiB')
    with kept:
        y = model(batch_of(WIDTH).to(device))
    assert kept.stats()['dram'] > 0 and kept.stats()['nvme'] > 10 * TENSOR
    del y
    assert held(kept) == 0


def file_of(kept, folder):
    """The stash's file, which has no name."""
    names = {int(fd): os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if os.path.islink(f'/proc/self/fd/{fd}')}
    mine, = (fd for fd, name in names.items() if name.startswith(f'{folder}/stash-'))
    return f'/proc/self/fd/{mine}'


def test_a_flipped_byte_is_refused(device, stash, tmp_path):
    model = Stack(WIDTH, depth=16).to(device)
    kept = stash(model)
    with kept:
        loss = model(batch_of(WIDTH).to(device)).square().mean()
    assert not list(tmp_path.iterdir())
    with open(file_of(kept, tmp_path), 'r+b') as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(ballast.Error, match='damaged') as raised:
        loss.backward()
    assert (raised.value.reason, raised.value.code) == ('CHECKSUM', 'DATA_LOSS')
    assert model.blocks[0].before_attention.weight.grad is None  # what was saved first comes back last
    assert model.blocks[15].up.weight.grad is not None
    del loss, raised
    assert held(kept) == 0
    with kept:
        model(batch_of(WIDTH).to(device)).square().mean().backward()


def test_a_spent_budget_is_named_with_its_numbers(device, stash):
    model = Stack(WIDTH, depth=16).to(device)
    kept = stash(model, dram='1MiB', nvme='3MiB')
    for _ in range(2):
        with pytest.raises(ballast.Error, match=r'1048576 of 1048576 bytes of dram and 3145728 of 3145728 bytes of nvme') as raised, kept:
            model(batch_of(WIDTH).to(device))
        assert (raised.value.reason, raised.value.code) == ('BUDGET', 'RESOURCE_EXHAUSTED')
        del raised
        assert held(kept) == 0
    with kept:
        model.blocks[0](batch_of(WIDTH, batch=2).to(device)).sum().backward()


def test_threads(device, stash):
    model = Stack(WIDTH, depth=6).to(device)
    models = [copy.deepcopy(model) for _ in range(3)]
    batches = [batch_of(WIDTH, seed=i).to(device) for i in range(3)]
    expected = [train(copy.deepcopy(model), x, contextlib.nullcontext()) for x in batches]
    kept, results = stash(), [None] * 3

    def run(i):
        results[i] = train(models[i], batches[i], kept)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(results, expected):
        assert_same(mine, theirs)
    assert held(kept) == 0


def test_changes_after_forward(device, stash):
    """What stays in place must not change before backward, as without a stash. What went comes back as it was."""
    small = torch.randn(8, device=device, requires_grad=True)
    large = batch_of(WIDTH).to(device).requires_grad_()
    with stash():
        a, b = small.exp(), large.exp()
        loss, other = a.sum(), b.sum()
    expected = b.detach().clone()
    with torch.no_grad():
        a.zero_()
        b.zero_()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()
    other.backward()
    assert torch.equal(large.grad, expected)


def test_a_changed_tensor_is_saved_anew(device, stash):
    """Also where it is seen by way of `.data`, which has a version of its own."""
    x = torch.ones(1, device=device, requires_grad=True)
    values, came = torch.zeros(1 << 16, device=device), []
    kept = stash()
    with kept:
        y = Remember.apply(x, values, came)
        values.add_(1)
        y = Remember.apply(y, values, came)
        values.add_(1)
        y = Remember.apply(y, values.data, came)
    y.backward()
    assert [tensor[0].item() for tensor in came] == [2, 1, 0]
    assert kept.stats()['shared'] == 0


def test_memory_that_is_used_again_is_another_tensor(stash):
    x, came = torch.ones(1, requires_grad=True), []
    y, kept = x, stash()
    with kept:
        for i in range(20):
            y = Remember.apply(y, torch.full((1 << 16,), float(i)), came)  # the same addresses, and the same version
    y.backward()
    assert [tensor[0].item() for tensor in came] == list(range(19, -1, -1))


def test_a_small_output_goes_with_its_graph(stash):
    """An operation that saves its own output must not keep itself alive."""
    x = torch.ones(8, requires_grad=True)
    with stash():
        y = x.exp()
    alive = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert alive.expired()


def test_what_came_back_is_shared_until_each_has_taken_it(device, stash):
    x, came = torch.ones(1, device=device, requires_grad=True), []
    values = torch.randn(1 << 16, device=device)
    with stash():
        y = Remember.apply(Remember.apply(x, values, came), values, came)
    for _ in range(2):
        y.backward(retain_graph=True)
        first, second = came
        assert torch.equal(first, values) and first.data_ptr() == second.data_ptr() != values.data_ptr()
        alive = StorageWeakRef(first.untyped_storage())
        came.clear()
        del first, second
        assert alive.expired()


@pytest.mark.parametrize('backend', ['eager', 'aot_eager'])
def test_compiled_models(backend, stash):
    model = Stack(WIDTH, depth=2)
    x = batch_of(WIDTH)
    expected = train(copy.deepcopy(model), x, contextlib.nullcontext(), steps=1)
    kept = stash(model)
    compiled = torch.compile(copy.deepcopy(model), backend=backend)
    mine = train(compiled, x, kept, steps=1)
    torch.testing.assert_close(mine, expected)
    assert kept.stats()['moved'] > 0 and held(kept) == 0


def test_autocast(device, stash):
    model = Stack(WIDTH, depth=4).to(device)
    x = batch_of(WIDTH).to(device)

    class Around(contextlib.ExitStack):
        def __init__(self, *contexts):
            super().__init__()
            self.contexts = contexts

        def __enter__(self):
            for context in self.contexts:
                self.enter_context(context)

    expected = train(copy.deepcopy(model), x, Around(torch.autocast(device.type, torch.bfloat16)))
    kept = stash(model)
    assert_same(train(model, x, Around(torch.autocast(device.type, torch.bfloat16), kept)), expected)
    assert kept.stats()['moved'] > 0


def test_a_graph_outlives_the_stash(device, stash):
    model = Stack(WIDTH, depth=4).to(device)
    x = batch_of(WIDTH).to(device)
    expected = train(copy.deepcopy(model), x, contextlib.nullcontext(), steps=1)
    kept = stash(model)
    with kept:
        loss = model(x).square().mean()
    kept.close()
    for use in (kept.__enter__, kept.stats, kept):
        with pytest.raises(ballast.Error, match='closed') as raised:
            use()
        assert raised.value.reason == 'BAD_REQUEST'
    del kept, use, raised
    loss.backward()
    assert_same(([loss.item()], [p.grad for p in model.parameters()]), expected)


@pytest.mark.parametrize('arguments, says', [
    ({}, "expected a budget, such as dram='8GiB'" if not torch.cuda.is_available() else None),
    ({'dram': 0, 'nvme': 0}, 'expected a budget'),
    ({'model': 7, 'dram': '1MiB'}, r'model=int: expected a torch\.nn\.Module'),
    ({'dram': 'many'}, "dram='many': expected bytes"),
    ({'dram': '900TiB'}, 'of memory; lower dram'),
    ({'nvme': '900TiB'}, 'lower nvme'),
    ({'nvme': '1GiB', 'directory': '/proc/no'}, 'expected a folder that can be created'),
])
def test_bad_arguments(arguments, says):
    if says is None:
        pytest.skip('has a default beside a GPU')
    with pytest.raises(ballast.Error, match=says) as raised:
        bt.stash(**arguments)
    assert raised.value.reason == 'BAD_CONFIG'


def test_a_stash_without_a_model_cannot_be_called(stash):
    with pytest.raises(ballast.Error, match='no model') as raised:
        stash()(batch_of(WIDTH))
    assert raised.value.reason == 'BAD_REQUEST'


def test_a_forked_child_is_refused(tmp_path):
    run(tmp_path, '''
        torch.set_num_threads(1)  # a child has none of the others
        kept = bt.stash(dram='1MiB', nvme='1GiB', directory='.')
        x = torch.ones(1 << 20, requires_grad=True)
        with kept:
            loss = x.exp().sum()
        child = os.fork()
        if child == 0:
            try:
                with kept:
                    x.exp()
            except ballast.Error as error:
                del loss
                sys.exit(0 if error.reason == 'UNSUPPORTED' else 2)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()
        assert torch.equal(x.grad, x.detach().exp())
        ''')


def test_a_script_may_end_with_a_graph(tmp_path):
    ended = run_anew(tmp_path, '''
        kept = bt.stash(nvme='1GiB', directory='.')
        x = torch.ones(1 << 20, requires_grad=True)
        with kept:
            loss = x.exp().sum()
        print(os.listdir('.'))
        ''')
    assert (ended.stdout, ended.stderr) == ("['script.py']\n", '')
