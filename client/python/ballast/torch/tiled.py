"""A linear layer in tiles, for a layer that is larger than memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ballast.errors import Error


class _Tile(nn.Linear):
    """A part of a larger layer: some columns of some rows of its weight; the rows' bias is with the first columns."""

    def __init__(self, in_features: int, out_features: int, bias: bool, device: Any, dtype: Any, whole_in_features: int) -> None:
        self.whole_in_features = whole_in_features
        super().__init__(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        """As nn.Linear's of the larger layer: weight and bias uniform within 1 / sqrt(its in_features)."""
        bound = 1 / math.sqrt(self.whole_in_features)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)


class TiledLinear(nn.Module):
    """nn.Linear(in_features, out_features, bias), cut into in_tiles x out_tiles tiles. Each tile is a layer of its own. shard() gathers one
    at a time, so no rank needs memory for the whole weight. tiles[o * in_tiles + i] takes the i-th part of the inputs to the o-th part of
    the outputs. Parts are those of torch.tensor_split: of equal size, and if that does not divide, the first ones are larger by one.

    in_tiles, out_tiles: from 1 up to the number of features.
    bias, device, dtype: as in nn.Linear. On the meta device, reset_parameters() draws from the distribution of nn.Linear, but gives other
        values, since the same ones would need the whole weight.

    forward() takes x [..., in_features] to [..., out_features], as nn.Linear but for rounding: it adds the products of input tiles in
    float32, in their order. Autograd keeps x, as for nn.Linear. It computes the gradient of x even if nobody wants it, because FSDP2 frees
    a unit in backward once it has the gradients of the unit's inputs. Threads: any, as nn.Linear. Errors: an Error names the argument."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, in_tiles: int = 1, out_tiles: int = 1,
                 device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.in_tiles, self.out_tiles = in_tiles, out_tiles
        rows, columns = _parts('out', out_features, out_tiles), _parts('in', in_features, in_tiles)
        self.tiles = nn.ModuleList(_Tile(column, row, bias and i == 0, device, dtype, in_features)
                                   for row in rows for i, column in enumerate(columns))

    @classmethod
    def of(cls, linear: nn.Linear, *, in_tiles: int = 1, out_tiles: int = 1) -> TiledLinear:
        """Returns a tiled copy of `linear`, with its values, dtype, device and requires_grad."""
        if not isinstance(linear, nn.Linear):
            raise Error(f'TiledLinear.of({type(linear).__name__}): expected an nn.Linear', 'BAD_CONFIG')
        weight, bias = linear.weight, linear.bias
        made = cls(linear.in_features, linear.out_features, bias is not None, in_tiles=in_tiles, out_tiles=out_tiles, device='meta',
                   dtype=weight.dtype)
        row = 0
        for o in range(out_tiles):
            column, tiles = 0, made._row(o)
            for tile in tiles:
                part = weight.detach()[row:row + tile.out_features, column:column + tile.in_features]
                tile.weight = _copy(part, weight)
                column += tile.in_features
            if bias is not None:
                tiles[0].bias = _copy(bias.detach()[row:row + tiles[0].out_features], bias)
            row += tiles[0].out_features
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not x.requires_grad and any(p.requires_grad for p in self.parameters()):
            x = x.detach().requires_grad_()
        inputs = x.tensor_split(self.in_tiles, dim=-1)
        return torch.cat([self._rows(inputs, o) for o in range(self.out_tiles)], dim=-1)

    def whole(self) -> dict[str, list[list[torch.Tensor]]]:
        """Returns what nn.Linear calls weight and bias: by rows of tiles, and each row by columns."""
        rows = [self._row(o) for o in range(self.out_tiles)]
        whole: dict[str, list[list[torch.Tensor]]] = {'weight': [[tile.weight for tile in row] for row in rows]}
        if rows[0][0].bias is not None:
            whole['bias'] = [[row[0].bias] for row in rows]
        return whole

    def _row(self, o: int) -> list[nn.Linear]:
        """The tiles of the o-th part of the outputs."""
        return [tile for tile in self.tiles[o * self.in_tiles:(o + 1) * self.in_tiles] if isinstance(tile, nn.Linear)]

    def _rows(self, inputs: Sequence[torch.Tensor], o: int) -> torch.Tensor:
        """The o-th part of the outputs."""
        first, *rest = self._row(o)
        total: torch.Tensor = first(inputs[0])
        dtype = total.dtype
        for tile, part in zip(rest, inputs[1:]):
            total = total.to(torch.promote_types(dtype, torch.float32)) + tile(part)
        return total.to(dtype)

    def extra_repr(self) -> str:
        return f'in_features={self.in_features}, out_features={self.out_features}'


def _parts(side: str, features: int, tiles: int) -> list[int]:
    """Sizes of torch.tensor_split's parts."""
    if not isinstance(tiles, int) or isinstance(tiles, bool) or not 1 <= tiles <= features:
        raise Error(f'TiledLinear({side}_tiles={tiles!r}): expected an integer from 1 to {side}_features, {features}',
                    'BAD_CONFIG')
    return [features // tiles + (i < features % tiles) for i in range(tiles)]


def _copy(part: torch.Tensor, of: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=of.requires_grad)
