"""A model without weights, made from a Hugging Face configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ballast.errors import Error

# What configurations call a model's sizes. transformers fills in one that is missing, so that an answer about some other model would look
# like one about this.
_WIDTHS = ('hidden_size', 'n_embd', 'd_model', 'dim', 'n_embed', 'embed_dim', 'hidden_dim', 'hidden_sizes', 'embed_dims', 'model_dim')
_DEPTHS = ('num_hidden_layers', 'n_layer', 'n_layers', 'num_layers', 'depths', 'depth', 'encoder_layers', 'decoder_layers',
           'layers_block_type', 'block_configs')
# Sizes that a configuration may have none of: by the name that its class then lacks.
_OTHERS = {'vocab_size': ('vocab_size', 'n_vocab', 'padded_vocab_size'),
           'intermediate_size': ('intermediate_size', 'd_ff', 'ffn_dim', 'n_inner', 'ffn_hidden_size', 'encoder_ffn_dim', 'hidden_dim',
                                 'moe_intermediate_size', 'block_configs', 'block_ff_dim')}
_DTYPES = {'float32': torch.float32, 'f32': torch.float32, 'fp32': torch.float32, 'bfloat16': torch.bfloat16, 'bf16': torch.bfloat16,
           'float16': torch.float16, 'f16': torch.float16, 'fp16': torch.float16}


def is_config(source: object) -> bool:
    """The source is a path, or a configuration of transformers, and not parameters."""
    return isinstance(source, (str, os.PathLike)) or (hasattr(source, 'model_type') and hasattr(source, 'to_dict'))


def folder_of(source: object) -> str | None:
    """Returns the folder of a configuration's file, where its weights would be. None: the source is no path."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    return os.path.dirname(_path(source)) or '.'


def model_of(source: Any, dtype: torch.dtype | str | None = None) -> torch.nn.Module:
    """Returns the model on the device 'meta', in `dtype`. None: in that of the configuration, or else float32.

    source: the path of a config.json, or of the folder that has it; or a configuration of transformers."""
    given = _read(source) if isinstance(source, (str, os.PathLike)) else None
    where = f"'{_path(source)}'" if given is not None else type(source).__name__
    if given is not None:
        _check(given, where)
    wanted = None if dtype is None else dtype_of(dtype)  # before the import, which takes seconds
    transformers = _transformers(where)
    config = source if given is None else _config(transformers, given, where)
    if wanted is None:
        wanted = dtype_of(getattr(config, 'dtype', None) or torch.float32)
    try:
        with torch.device('meta'):
            return _make(transformers, config, where).to(wanted)
    except Error:
        raise
    except Exception as error:  # whatever a model's constructor makes of sizes that do not fit together
        raise Error(f'{where}: transformers {transformers.__version__} cannot make this model: {_said(error)} Correct the configuration, '
                    'or give estimate() the model, made on the device meta', 'BAD_CONFIG') from error


def dtype_of(value: torch.dtype | str) -> torch.dtype:
    """Returns the dtype of a name, such as 'bf16' or 'torch.bfloat16'."""
    found = value if isinstance(value, torch.dtype) else _DTYPES.get(str(value).removeprefix('torch.'))
    if found is None or found not in _DTYPES.values():
        raise Error(f'dtype={value!r}: expected one of float32, bfloat16, float16, which parameters are trained in. Give dtype=',
                    'BAD_CONFIG')
    return found


def _path(source: str | os.PathLike[str]) -> str:
    path = os.fspath(source)
    return os.path.join(path, 'config.json') if os.path.isdir(path) else path


def _read(source: str | os.PathLike[str]) -> dict[str, Any]:
    path = _path(source)
    try:
        with open(path, encoding='utf-8') as file:
            given = json.load(file)
    except OSError as error:
        raise Error(f"'{path}': {error.strerror}; expected the path of a config.json, or of the folder that has it. For a model of the "
                    'hub download its config.json first', 'BAD_CONFIG') from None
    except ValueError as error:
        raise Error(f"'{path}' is not JSON ({error}); expected a config.json as transformers saves it", 'BAD_CONFIG') from None
    if not isinstance(given, dict):
        raise Error(f"'{path}' has a JSON {type(given).__name__}; expected an object, as in a config.json of transformers", 'BAD_CONFIG')
    return given


def _check(given: Mapping[str, Any], where: str) -> None:
    """Refuses a configuration that does not say which model, or how large."""
    if not isinstance(given.get('model_type'), str):
        found = ', '.join(sorted(map(str, given))[:6]) or 'nothing'
        raise Error(f"{where} has no model_type (it has {found}); expected a config.json of transformers, with a model_type such as "
                    "'llama'. For another model give estimate() the model itself, made on the device meta", 'BAD_CONFIG')
    keys = set(_keys(given))
    for names in (_WIDTHS, _DEPTHS):
        if keys.isdisjoint(names):
            raise _without(names, given, where)


def _without(names: Sequence[str], given: Mapping[str, Any], where: str) -> Error:
    """names: of the size that is not there."""
    found = ', '.join(sorted(set(_keys(given)))[:6])
    return Error(f'{where} has no {names[0]}, by this name or another such as {names[1]} (it has {found}); expected all sizes of the '
                 f'model. transformers would fill in that of another {given["model_type"]!r}. Add the sizes', 'BAD_CONFIG')


def _keys(given: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys that have values, also those of parts, such as text_config."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _keys(value)
        elif value is not None:
            yield key


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise Error(f'{where} is a configuration of transformers, which is not installed: pip install transformers, or give estimate() the '
                    'model itself, made on the device meta', 'UNSUPPORTED') from None
    return transformers


def _config(transformers: Any, given: dict[str, Any], where: str) -> Any:
    kind = given['model_type']
    if kind not in transformers.CONFIG_MAPPING:
        code = ' Its code comes with the checkpoint, and estimate() runs no such code.' if 'auto_map' in given else ''
        raise Error(f'{where} is of model_type {kind!r}, which transformers {transformers.__version__} does not know.{code} Install a '
                    'version that does, or give estimate() the model itself, made on the device meta', 'BAD_CONFIG')
    rest = {key: value for key, value in given.items() if key not in ('model_type', 'quantization_config', 'torch_dtype')}
    if 'torch_dtype' in given:  # which is called dtype since version 5
        rest.setdefault('dtype', given['torch_dtype'])
    try:
        made = transformers.AutoConfig.for_model(kind, **rest)
    except Exception as error:  # its classes raise their own kinds
        raise Error(f'{where}: transformers {transformers.__version__} refuses it: {_said(error)} Correct the value',
                    'BAD_CONFIG') from None
    keys = set(_keys(given))
    for name, names in _OTHERS.items():
        if hasattr(made, name) and keys.isdisjoint((*names, made.attribute_map.get(name, name))):
            raise _without(names, given, where)
    return made


def _said(error: Exception) -> str:
    """Returns what an error says, on one line."""
    return (' '.join(str(error.__cause__ or error).split()) or type(error).__name__).rstrip('.') + '.'


def _make(transformers: Any, config: Any, where: str) -> torch.nn.Module:
    """Makes the model of the configuration's first architecture. If it names none: a causal language model."""
    names = getattr(config, 'architectures', None) or []
    if not names:
        try:
            made: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            raise Error(f'{where} names no architectures, and there is no causal language model of model_type {config.model_type!r}; '
                        'expected "architectures": ["..."], the name of a class of transformers. Add it', 'BAD_CONFIG') from None
        return made
    kind = getattr(transformers, str(names[0]), None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        raise Error(f'{where} is of the architecture {names[0]!r}, which transformers {transformers.__version__} does not have; expected a '
                    'class of its models, such as LlamaForCausalLM. Correct architectures, install a version that has it, or give '
                    'estimate() the model itself, made on the device meta', 'BAD_CONFIG')
    return kind(config)
