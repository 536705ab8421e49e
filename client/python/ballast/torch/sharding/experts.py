"""Fused experts of transformers, split into a module for each expert, so that shard() can gather one without the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.sharding.routing import reached_experts
from ballast.torch.tensors.kinds import is_sharded
from ballast.torch.tensors.remote import part_of

# What transformers' decorator use_experts_implementation tells of a class.
_TOLD = 'has_gate', 'has_bias', 'is_transposed', 'num_experts'
_classes: dict[type[nn.Module], type[Split]] = {}  # of split modules, by their own class


class Expert(nn.Module):
    """One expert's slices of the fused parameters, under their names."""

    def __init__(self, up: str, is_transposed: bool, std: float) -> None:
        """up: the name of the first projection. is_transposed: weights are [in, out]. std: of values that a new job draws."""
        super().__init__()
        self._up, self._is_transposed, self._std = up, is_transposed, std

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith('_bias'):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self._std)

    def forward(self, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self._linear(activate(self._linear(x, self._up)), 'down_proj')

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.get_parameter(name), self._parameters.get(f'{name}_bias')
        if not self._is_transposed:
            return nn.functional.linear(x, weight, bias)
        return x @ weight if bias is None else x @ weight + bias


class Split(nn.Module):
    """Base of the classes that split_experts() gives to fused modules. They compute as their own class, but with tokens of one expert at a
    time, and only with experts that tokens reach. Threads: as their own class."""

    own_class: type[nn.Module]
    # Of the module's own class.
    num_experts: int
    has_gate: bool
    config: Any
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    post_expert_norm: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    def _split(self, experts: list[Expert], leaves: list[str]) -> None:
        """leaves: names of the fused parameters, which are gone."""
        self._leaves = leaves
        for i, expert in enumerate(experts):
            self.add_module(str(i), expert)
        hooks: Any = self  # torch gives their methods no types
        hooks.register_state_dict_post_hook(_stack)
        hooks.register_load_state_dict_pre_hook(_slice)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickles and copies: no module has the class that split_class() makes."""
        if type(self) is not split_class(self.own_class):  # fully_shard has made a class of this one
            return super().__reduce_ex__(protocol)
        return _empty, (self.own_class,), self.__dict__

    def __getattr__(self, name: str) -> Any:
        """Returns a copy of a fused tensor, for whoever looks for the names of state_dict(), as Distributed Checkpoint does. If experts are
        sharded it has a shape alone."""
        if name not in self.__dict__.get('_leaves', ()):
            return super().__getattr__(name)
        parts = [self.get_submodule(str(i)).get_parameter(name).detach() for i in range(self.num_experts)]
        if is_sharded(parts[0]):
            return torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device='meta')
        return torch.stack(parts)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden_states [tokens, width]; top_k_index, top_k_weights [tokens, k]."""
        # The order of sums is that of transformers: eager adds experts in their order, the others a token's experts in the router's.
        is_eager = getattr(self.config, '_experts_implementation', None) == 'eager'
        tokens, k = top_k_index.shape
        index, weights = (top_k_index.t(), top_k_weights.t()) if is_eager else (top_k_index, top_k_weights)
        of_expert, order = index.reshape(-1).sort(stable=True)
        token = order % tokens if is_eager else order // k
        counts = of_expert.bincount(minlength=self.num_experts)
        experts = [self.get_submodule(str(i)) for i in range(self.num_experts)]
        reached, sizes = reached_experts(experts, counts), counts.tolist()
        rows = hidden_states[token].split(sizes)
        done = torch.cat([hidden_states[:0], *(experts[i](rows[i], self._activate) for i in reached)])
        if getattr(self, 'has_post_expert_norm', False):
            done = self.post_expert_norm(done)
        done = done * weights.reshape(-1)[order, None]
        if is_eager:
            return torch.zeros_like(hidden_states).index_add_(0, token, done.to(hidden_states.dtype))
        return done[order.argsort()].view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_gate(x) if self.has_gate else self.act_fn(x)


def split_class(kind: type[nn.Module]) -> type[Split]:
    """Returns the class of split modules that were of class `kind`: one for each."""
    made = _classes.get(kind)
    if made is None:
        made = _classes[kind] = type(f'Split{kind.__name__}', (Split, kind), {'own_class': kind})
    return made


def _empty(kind: type[nn.Module]) -> Split:
    """Returns a split module without anything in it, which a pickle or a copy fills."""
    made = split_class(kind)
    return made.__new__(made)


def split_experts(model: nn.Module) -> nn.Module:
    """Splits the fused experts of a transformers model, whose layers have one tensor for all experts, into a module for each expert. Call
    it before shard(), and then give the optimizer model.named_parameters(). Returns `model`.

    An expert that no token reaches takes no part in the step: it is not pulled and has no gradient, and neither its weights nor its state
    move. Fused, it has a gradient of zeros, with which the optimizer decays its moments and weights.

    state_dict() still has the fused tensors, so save_pretrained() writes what from_pretrained() reads, and load_state_dict() takes them.
    named_parameters() has each expert: 'layers.0.mlp.experts.17.down_proj'. The experts of a layer are in memory twice while they are
    split. For a model on the meta device a new job draws them from the config's initializer_range.

    Errors: BAD_SPEC if the model has no fused experts; UNSUPPORTED, with the module's name, for experts of another form. The model is then
    as before."""
    found = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    if not found:
        raise Error(f'split_experts({type(model).__name__}): the model has no fused experts of transformers 5. Without this call, '
                    "shard() gathers members of a ModuleList whose name has 'expert' one at a time", 'BAD_SPEC')
    leaves = {module: _leaves(name, module) for name, module in found}
    for module, its in leaves.items():
        made = [Expert(its[0], bool(module.is_transposed), getattr(module.config, 'initializer_range', 0.02))
                for _ in range(int(module.num_experts))]
        for leaf in its:
            fused = module.get_parameter(leaf)
            for expert, part in zip(made, fused.detach().unbind()):
                expert.register_parameter(leaf, nn.Parameter(part.clone(), requires_grad=fused.requires_grad))
            del module._parameters[leaf]
        module.__class__ = split_class(type(module))
        if isinstance(module, Split):
            module._split(made, its)
    return model


def has_fused(model: nn.Module) -> bool:
    """Says whether split_experts() finds something in the model."""
    return any(_is_fused(module) for module in model.modules())


def _is_fused(module: nn.Module) -> bool:
    return not isinstance(module, Split) and 'Experts' in type(module).__name__ and any(p.ndim == 3 for p in module._parameters.values()
                                                                                        if p is not None)


def _leaves(name: str, module: nn.Module) -> list[str]:
    """Returns the names of the fused parameters, the first projection first. name: the module's."""
    kind = type(module).__name__
    if not all(hasattr(module, told) for told in (*_TOLD, '_apply_gate', 'config')):
        raise Error(f"split_experts(): '{name}' is a {kind}, which does not say how its experts compute (transformers' "
                    'use_experts_implementation). Write its experts as a ModuleList, which shard() gathers one at a time', 'UNSUPPORTED')
    weights = ['gate_up_proj' if module.has_gate else 'up_proj', 'down_proj']
    expected = [*weights, *(f'{weight}_bias' for weight in weights if module.has_bias)]
    there = {leaf: parameter for leaf, parameter in module._parameters.items() if parameter is not None}
    if there.keys() != set(expected) or any(len(parameter) != module.num_experts for parameter in there.values()):
        raise Error(f"split_experts(): '{name}', a {kind}, has parameters { {leaf: list(p.shape) for leaf, p in there.items()} }; expected "
                    f'{expected}, each with {module.num_experts} experts in its first dimension', 'UNSUPPORTED')
    if getattr(module, '_is_expert_parallel', False) or any(is_sharded(p) or part_of(p) is not None for p in there.values()):
        raise Error(f"split_experts(): the experts of '{name}' are divided among ranks already; call it before shard(), fully_shard and "
                    "transformers' expert parallelism", 'UNSUPPORTED')
    return expected


def _stack(module: Split, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Gives a state_dict() fused tensors in the place of the experts' own."""
    for leaf in module._leaves:
        names = [f'{prefix}{i}.{leaf}' for i in range(module.num_experts)]
        if all(name in state for name in names):
            state[prefix + leaf] = torch.stack([state.pop(name) for name in names])


def _slice(module: Split, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Slices the fused tensors of a state that is being loaded. A tensor of another shape stays, and torch tells of it."""
    for leaf in module._leaves:
        fused = state.get(prefix + leaf)
        if isinstance(fused, torch.Tensor) and fused.ndim > 0 and len(fused) == module.num_experts:
            del state[prefix + leaf]
            state.update((f'{prefix}{i}.{leaf}', fused[i]) for i in range(module.num_experts))
