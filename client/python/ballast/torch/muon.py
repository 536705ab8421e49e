"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), as torch.optim.Muon has it: the part that the trainer computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ballast.errors import warn

# Coefficients of the quintic Newton-Schulz iteration (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ADJUSTMENTS = (None, 'original', 'match_rms_adamw')


class Orthogonal:
    """Muon's assisted.Rule. Its state is the running mean of gradients, whose weight decay and step the servers compute."""

    def direction(self, group: Mapping[str, Any], gradient: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        momentum = float(group['momentum'])
        gradient = gradient.to(state.dtype)
        mean = state.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(mean, momentum) if group['nesterov'] else mean).bfloat16()

    def update(self, group: Mapping[str, Any], direction: torch.Tensor) -> torch.Tensor:
        return orthogonalised(direction, group['ns_coefficients'], float(group['eps']), int(group['ns_steps']))

    def scale(self, group: Mapping[str, Any], shape: Sequence[int]) -> float:
        rows, columns = shape
        if group['adjust_lr_fn'] == 'match_rms_adamw':  # Liu et al. 2025, "Muon is scalable for LLM training", section 2.2
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def orthogonalised(matrix: torch.Tensor, coefficients: Sequence[float], eps: float, steps: int) -> torch.Tensor:
    """Returns about U V of the singular value decomposition U S V, in bfloat16."""
    a, b, c = coefficients
    with torch.autocast(matrix.device.type, enabled=False):
        x = matrix.bfloat16()
        if matrix.size(0) > matrix.size(1):
            x = x.T
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def muon_groups(model: torch.nn.Module, **adamw: Any) -> list[dict[str, Any]]:
    """Returns two param_groups for Muon: the hidden matrices of `model`, and with use_muon=False the rest. The rest are parameters that are
    no matrices, embeddings, and the output layer: that of get_output_embeddings(), or else the last linear layer, if it has the shape of an
    embedding.

    adamw: options of the second group, such as lr, betas and weight_decay."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    linear = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    head = getattr(getattr(model, 'get_output_embeddings', lambda: None)(), 'weight', None)
    if head is None and linear and linear[-1].shape in {weight.shape for weight in embeddings}:
        head = linear[-1]
    outer = {id(weight) for weight in [*embeddings, head]}
    groups: list[dict[str, Any]] = [{'params': []}, {'params': [], 'use_muon': False, **adamw}]
    for name, parameter in model.named_parameters():
        groups[0 if parameter.dim() == 2 and id(parameter) not in outer else 1]['params'].append((name, parameter))
    if not groups[0]['params']:
        warn('muon_groups() finds no hidden matrix in this model: all parameters are for AdamW')
    return groups
