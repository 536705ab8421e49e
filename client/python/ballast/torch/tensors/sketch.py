"""Whether ranks' tensors whose bits differ are of equal numbers, but for rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_PARTS = 64
_ROUNDING = 0.01


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> list[float]:
    """Sums of some parts, then the norm: see near()."""
    parts = torch.tensor_split(tensor.detach().reshape(-1), _PARTS)
    sums = [float(part.sum(dtype=torch.float64)) for part in parts]
    return [*sums, float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))]


def near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sketches may be of tensors that differ by rounding alone; with an Inf or a NaN, whether they have it in the same
    parts."""
    if not (is_finite(one) and is_finite(other)):
        return [math.isfinite(a) for a in one] == [math.isfinite(b) for b in other]
    return all(abs(a - b) <= _ROUNDING * max(one[-1], other[-1]) for a, b in zip(one, other))


def is_finite(one: Sequence[float]) -> bool:
    """Whether the tensor of a sketch is."""
    return math.isfinite(one[-1])
