"""What a model calls the tensors of a checkpoint: by the caller's renames, by those of transformers, and by peft's."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import nn

from ballast.errors import Error


class Names(NamedTuple):
    """Names of a checkpoint, and what the model calls them."""
    of: dict[str, str]  # by the checkpoint's name
    converted: dict[str, str]  # of those that transformers computes from others: what it makes of them


def translated(model: nn.Module, keys: Collection[str], wanted: Collection[str], rename: Sequence[tuple[str, str]]) -> Names:
    """wanted: the model's own names."""
    base = _base(model)
    rules = _Rules(base)
    # peft puts its own words into names of the model that it wraps.
    plain = {name: name for name in wanted} if base is model else {_without_peft(name): name for name in wanted}
    of, converted = {}, {}
    for key in keys:
        name = key
        for pattern, replacement in rename:
            name = re.sub(pattern, replacement, name)
        if name not in plain:
            name, is_computed = rules.apply(name, plain)
            if is_computed:
                converted[key] = name
        of[key] = plain.get(name, name)
    return Names(of, converted)


def ignored(model: nn.Module) -> list[str]:
    """Returns patterns of tensors that the model's own class does not want, such as masks of old checkpoints."""
    return list(getattr(_base(model), '_keys_to_ignore_on_load_unexpected', None) or ())


def _base(model: nn.Module) -> nn.Module:
    """Returns the model itself, or the one that peft has wrapped."""
    peft = sys.modules.get('peft')
    return model.get_base_model() if peft is not None and isinstance(model, peft.PeftModel) else model


def _without_peft(name: str) -> str:
    return name.removeprefix('base_model.model.').replace('.base_layer.', '.')


class _Rules:
    """transformers' renames. It has conversions of values, too, which stack or transpose tensors: those are not done here."""

    def __init__(self, model: nn.Module) -> None:
        self._prefix: str = ''
        self._renames: list[Any] = []
        self._conversions: list[Any] = []
        self._older: dict[str, str] = {}  # of transformers before 5
        transformers = sys.modules.get('transformers')
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            return
        self._prefix = model.base_model_prefix
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter
        except ImportError:
            self._older = dict(getattr(model, '_checkpoint_conversion_mapping', None) or {})
            return
        for each in get_model_conversion_mapping(model):
            (self._conversions if isinstance(each, WeightConverter) else self._renames).append(each)

    def apply(self, name: str, wanted: Collection[str]) -> tuple[str, bool]:
        """Returns the name in the model, and whether a conversion computes it."""
        for pattern, replacement in self._older.items():
            name = re.sub(pattern, replacement, name)
        for rename in self._renames:
            name = rename.rename_source_key(name)[0]
        for conversion in self._conversions:
            made, pattern = conversion.rename_source_key(name)
            if pattern is not None:
                return self._with_prefix(made, wanted), True
        return self._with_prefix(name, wanted), False

    def _with_prefix(self, name: str, wanted: Collection[str]) -> str:
        """A checkpoint of the base model has no prefix, and a base model has none itself."""
        if not self._prefix or name in wanted:
            return name
        within = name.removeprefix(self._prefix + '.')
        return next((each for each in (within, f'{self._prefix}.{name}') if each in wanted), name)


def refuse_converted(path: str, key: str, name: str) -> Error:
    return Error(f"'{path}' has tensor '{key}', of which transformers computes '{name}' by stacking, cutting or transposing, and shard() "
                 'only renames. Load the checkpoint into a model by from_pretrained() on one host, write its state_dict() by '
                 'safetensors.torch.save_model(), which keeps the names of the model, and give that as weights=', 'UNSUPPORTED')
