"""The tensors of a model, as a checkpoint names and divides them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ballast.torch.job.naming import unwrapped
from ballast.torch.tiled import TiledLinear
from ballast.torch.weights import buffers


class Whole(NamedTuple):
    """A tensor of a checkpoint. rows: what the model has of it, by rows, and each row by columns: a single tensor, or the tiles of a layer.
    A tensor that is tied comes once for each name."""
    name: str
    rows: list[list[torch.Tensor]]
    is_parameter: bool

    @property
    def first(self) -> torch.Tensor:
        return self.rows[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        if len(self.rows) == len(self.rows[0]) == 1:
            return tuple(self.first.shape)
        height = sum(row[0].shape[0] for row in self.rows)
        return (height, sum(each.shape[1] for each in self.rows[0])) if self.first.dim() > 1 else (height,)

    def placed(self) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yields each tensor of the model, and where it begins in the whole one."""
        height = 0
        for row in self.rows:
            width = 0
            for each in row:
                yield each, (height, width, *(0,) * each.dim())[:each.dim()]
                width += each.shape[1] if each.dim() > 1 else 0
            height += row[0].shape[0] if row[0].dim() > 0 else 0


def wholes(model: nn.Module) -> Iterator[Whole]:
    """Yields parameters under all of their names, then persistent buffers."""
    tiles: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, TiledLinear):
            dot = f'{path}.' if path else ''
            tiles.update(dot + name for name, _ in module.named_parameters())
            yield from (Whole(unwrapped(dot + leaf), rows, True) for leaf, rows in module.whole().items())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tiles:
            yield Whole(unwrapped(name), [[parameter]], True)
    for name, buffer in buffers.persistent(model).items():
        yield Whole(unwrapped(name), [[buffer]], False)
