"""One rank of test_tiled.py: tiled_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py."""
import math

import torch
import torch.distributed as dist
from shard_main import VOCABULARY, main, ours, script, theirs, train, whole, whole_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ballast.torch as bt

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = bt.TiledLinear(WIDTH, 3 * WIDTH, in_tiles=2, out_tiles=3)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = bt.TiledLinear(WIDTH, VOCABULARY, bias=False, in_tiles=2, out_tiles=2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made():
    torch.manual_seed(3)
    return Net()


@script
def trains():
    """Losses, gradients of two steps and parameters: of FSDP2 whose units are blocks, and of shard(), whose units are tiles, too."""
    twin, model = made(), bt.shard(made(), push_early=False)
    for block in twin.blocks:
        fully_shard(block)
    fully_shard(twin)
    results = [[*train(twin, theirs(twin.parameters()), 10), whole(twin)]]
    optimizer = ours(model)
    results.append([*train(model, optimizer, 10), whole_of(model)])
    assert len({p._local_tensor.of.home for p in model.parameters()}) == 2 * 6 + 4 + 2 + 1
    optimizer.close()
    return results


@script
def one_at_a_time():
    """Tiles; how many are gathered at once in forward, and in backward; bytes of each pull in forward; bytes of a tile's part here."""
    torch.manual_seed(3)
    model = nn.Sequential(bt.TiledLinear(32, 64, bias=False, in_tiles=4, out_tiles=2), nn.Flatten())
    tiles = list(model[0].tiles)
    bt.shard(model, prefetch_bytes=1)
    optimizer = ours(model)
    model_of = next(iter(model.parameters()))._local_tensor.of.home.model
    pulls = model_of.pulls
    most, pulled = {'forward': 0, 'backward': 0}, []
    take, begin, way = pulls.take, pulls._begin, 'forward'

    def taken(unit):
        most[way] = max(most[way], 1 + sum(not isinstance(tile.weight, DTensor) for tile in tiles))
        return take(unit)

    def begun(unit, job):
        pulled.append(unit.bytes(4))
        return begin(unit, job)
    optimizer.resume()
    for unit in model_of.units:
        unit._pull = taken
    pulls._begin = begun
    loss = model(torch.randn(3, 32)).square().mean()
    forward, way = pulled[:], 'backward'
    loss.backward()
    optimizer.step()
    dist.barrier()
    optimizer.close()
    return len(tiles), most['forward'], most['backward'], forward, 8 * 32 // 2 * 4


@script
def from_meta():
    """The largest magnitude of a new job's values, its bound, and their deviation."""
    with torch.device('meta'):
        model = nn.Sequential(bt.TiledLinear(128, 96, in_tiles=4, out_tiles=3))
    bt.shard(model)
    optimizer = ours(model, name='from_meta')
    optimizer.resume()
    values = torch.cat([p.flatten() for p in whole_of(model)])
    optimizer.close()
    return values.abs().max().item(), 1 / math.sqrt(128), values.std().item()


if __name__ == '__main__':
    main()
