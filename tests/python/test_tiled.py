"""TiledLinear against nn.Linear, and under shard() on two ranks one tile at a time."""
import math

import pytest
import torch
from test_shard import check_near, run
from torch import nn

from ballast import Error
from ballast.torch import TiledLinear

SHAPES = [(12, 20, 3, 2), (13, 7, 4, 3), (8, 8, 1, 1), (5, 6, 5, 6)]


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(('in_features', 'out_features', 'in_tiles', 'out_tiles'), SHAPES)
def test_like_a_linear(in_features, out_features, in_tiles, out_tiles, bias):
    linear = nn.Linear(in_features, out_features, bias)
    tiled = TiledLinear.of(linear, in_tiles=in_tiles, out_tiles=out_tiles)
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in linear.parameters())
    x, y = (torch.randn(3, 4, in_features, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    expected, came = linear(x), tiled(y)
    torch.testing.assert_close(came, expected, rtol=1e-5, atol=1e-6)
    for out in (expected, came):
        out.square().mean().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-6)
    rows = [torch.cat([tile.weight.grad for tile in tiled.tiles[o * in_tiles:(o + 1) * in_tiles]], 1) for o in range(out_tiles)]
    torch.testing.assert_close(torch.cat(rows), linear.weight.grad, rtol=1e-5, atol=1e-6)
    if bias:
        torch.testing.assert_close(torch.cat([tile.bias.grad for tile in tiled.tiles[::in_tiles]]), linear.bias.grad)


def test_products_are_added_in_float32():
    """300 sums of products that bf16 would lose one after another: 1 of 256 is below its last bit."""
    linear = nn.Linear(300, 1, bias=False, dtype=torch.bfloat16)
    linear.weight.data.fill_(1.0)
    x = torch.ones(1, 300, dtype=torch.bfloat16)
    came = TiledLinear.of(linear, in_tiles=300)(x)
    assert came.dtype == torch.bfloat16 and came.item() == torch.tensor(300.0).bfloat16().item()


def test_a_layer_from_meta_has_a_linears_distribution():
    with torch.device('meta'):
        tiled = TiledLinear(400, 300, in_tiles=4, out_tiles=3)
    assert all(p.is_meta for p in tiled.parameters())
    tiled.to_empty(device='cpu')
    torch.manual_seed(1)
    for tile in tiled.tiles:
        tile.reset_parameters()
    bound = 1 / math.sqrt(400)
    for p in tiled.parameters():
        assert 0.9 * bound < p.abs().max() <= bound
    weights = torch.cat([tile.weight.flatten() for tile in tiled.tiles])
    assert weights.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert weights.std().item() == pytest.approx(nn.Linear(400, 300).weight.std().item(), rel=0.02)


def test_a_copy_of_a_layer_is_like_it():
    linear = nn.Linear(4, 6, dtype=torch.float64).requires_grad_(False)
    tiled = TiledLinear.of(linear, in_tiles=2, out_tiles=2)
    assert all(p.dtype == torch.float64 and not p.requires_grad for p in tiled.parameters())
    assert all(p.is_meta for p in TiledLinear.of(nn.Linear(4, 6, device='meta'), out_tiles=2).parameters())
    linear.weight.fill_(0.0)
    assert all((tile.weight != 0).any() for tile in tiled.tiles), 'memory of their own'


@pytest.mark.parametrize(('arguments', 'text'), [
    ({'in_tiles': 5}, 'TiledLinear(in_tiles=5): expected an integer from 1 to in_features, 4'),
    ({'out_tiles': 0}, 'TiledLinear(out_tiles=0): expected an integer from 1 to out_features, 6'),
    ({'out_tiles': True}, 'TiledLinear(out_tiles=True): expected an integer')])
def test_bad_tiles(arguments, text):
    with pytest.raises(Error) as error:
        TiledLinear(4, 6, **arguments)
    assert text in str(error.value)


def test_of_what_is_no_linear():
    with pytest.raises(Error, match=r'TiledLinear.of\(LayerNorm\): expected an nn.Linear'):
        TiledLinear.of(nn.LayerNorm(4), in_tiles=2)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return run(['trains', 'one_at_a_time', 'from_meta'], tmp_path_factory.mktemp('tiled'), script='tiled_main.py')


def test_trains_from_servers_as_torchs(pair):
    """An embedding, two blocks of tiled layers, a tiled head: FSDP2 with torch's optimizer, and shard()."""
    for results in pair['trains']:
        check_near(results, 'tiled')


def test_one_tile_at_a_time(pair):
    """Backward gathers the next tile while one computes: that is FSDP2's prefetch."""
    for tiles, most_forward, most_backward, pulled, tile_bytes in pair['one_at_a_time']:
        assert tiles == 8
        assert most_forward == 1
        assert most_backward <= 2
        assert pulled == [tile_bytes] * tiles, 'bytes of a pull: half a tile'


def test_a_sharded_layer_from_meta(pair):
    for largest, bound, deviation in pair['from_meta']:
        assert 0.95 * bound < largest <= bound
        assert deviation == pytest.approx(bound / math.sqrt(3), rel=0.02)
