"""Tells whether tensors of ranks, whose bits differ, differ only by rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_PARTS = 64
_ROUNDING = 0.01


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> list[float]:
    """Returns sums of some parts, then the norm. See near()."""
    parts = torch.tensor_split(tensor.detach().reshape(-1), _PARTS)
    sums = [float(part.sum(dtype=torch.float64)) for part in parts]
    return [*sums, float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))]


def near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Two sketches may be of tensors that differ only by rounding. If there is an Inf or a NaN, both have it in the same parts."""
    if not (is_finite(one) and is_finite(other)):
        return [math.isfinite(a) for a in one] == [math.isfinite(b) for b in other]
    return all(abs(a - b) <= _ROUNDING * max(one[-1], other[-1]) for a, b in zip(one, other))


def is_finite(one: Sequence[float]) -> bool:
    """The tensor of this sketch is finite."""
    return math.isfinite(one[-1])
