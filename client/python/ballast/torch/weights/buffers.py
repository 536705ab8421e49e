"""Buffers of a model that was made on the meta device, where they have no values. No checkpoint has those that are not persistent, such as
the frequencies of rotary embeddings, so the module that owns them makes them again."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ballast.errors import Error

# A module that is made again for its buffers may have so many elements of parameters.
_ELEMENTS_MAX = 1 << 26


def persistent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a state_dict() has, by name."""
    return {f'{path}.{leaf}' if path else leaf: buffer for path, module in model.named_modules() for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set}


def on_meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Yields modules that have buffers on the meta device: path, module, these buffers."""
    for path, module in model.named_modules():
        lacking = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        if lacking:
            yield path, module, lacking


def made_again(model: nn.Module, given: Mapping[str, torch.Tensor]) -> dict[tuple[nn.Module, str], torch.Tensor]:
    """Returns values, on the host, of all buffers on the meta device that `given` lacks. Changes nothing.

    given: by name, buffers that have values elsewhere. Errors: BAD_SPEC names a buffer that no module makes again."""
    found = {}
    for path, module, lacking in on_meta(model):
        there = {leaf for leaf in lacking if (f'{path}.{leaf}' if path else leaf) in given}
        if there == lacking.keys():
            continue
        values = _made(model, path, module, lacking)
        for leaf in lacking.keys() - there:
            found[module, leaf] = values[leaf]
    return found


def _made(model: nn.Module, path: str, module: nn.Module, lacking: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = f'{path}.{next(iter(lacking))}' if path else next(iter(lacking))
    reset = _transformers_reset(model, path)
    values = None if reset is None else _written_by(lambda: reset(module), module, lacking)
    if values is None:
        values, why = _of_another(module, lacking)
    if values is None:
        raise Error(f"buffer '{name}' is on the meta device, where it has no values, the checkpoint has none, and {type(module).__name__} "
                    f'does not make it again ({why}). Give it values before shard(): set model.get_submodule({path!r}).'
                    f'{next(iter(lacking))}, or make the model within accelerate.init_empty_weights(), which keeps buffers real',
                    'BAD_SPEC')
    return values


def _transformers_reset(model: nn.Module, path: str) -> Callable[[nn.Module], None] | None:
    """Returns the function by which transformers' models give first values to a module, buffers included. None: there is none here."""
    transformers = sys.modules.get('transformers')
    if transformers is None:
        return None
    parts = path.split('.') if path else []
    above = [model.get_submodule('.'.join(parts[:count])) for count in range(len(parts), -1, -1)]
    return next((each._init_weights for each in above if isinstance(each, transformers.PreTrainedModel)), None)


def _written_by(reset: Callable[[], None], module: nn.Module, lacking: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Returns what reset() writes to the buffers. None: it leaves elements out, which shows if they begin with other values."""
    seen = []
    for first in (0, 1):
        with _lent(module, {leaf: torch.full_like(buffer, first, device='cpu') for leaf, buffer in lacking.items()}) as lent:
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device('cpu'):
                    torch.manual_seed(0)
                    reset()
            except Exception:  # it cannot, whatever the module's own code raises
                return None
            if any(module._buffers.get(leaf) is not buffer for leaf, buffer in lent.items()):
                return None
            seen.append({leaf: buffer.clone() for leaf, buffer in lent.items()})
    return seen[0] if all(torch.equal(seen[0][leaf], seen[1][leaf]) for leaf in lacking) else None


@contextlib.contextmanager
def _lent(module: nn.Module, buffers: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Gives the module these buffers for the time of the block, and parameters without values in place of its own."""
    inner = list(module.modules())
    parameters, before = [dict(each._parameters) for each in inner], dict(module._buffers)
    try:
        for each in inner:
            for leaf, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[leaf] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device='meta'),
                                                          requires_grad=False)
        module._buffers.update(buffers)
        yield buffers
    finally:
        for each, own in zip(inner, parameters):
            each._parameters.update(own)
        module._buffers.clear()
        module._buffers.update(before)


def _of_another(module: nn.Module, lacking: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Returns the buffers of another module of this class, made on the host with the arguments that this one keeps as attributes; or says
    why there is none. It counts only if all its plain attributes are this one's."""
    if sum(parameter.numel() for parameter in module.parameters()) > _ELEMENTS_MAX:
        return None, 'it has many parameters of its own'
    arguments, lost = _arguments(module)
    if lost is not None:
        return None, f"its argument '{lost}' is no attribute"
    try:
        with torch.random.fork_rng(devices=[]), torch.device('cpu'):
            torch.manual_seed(0)  # random ones are the same on all ranks, and after a restart
            other = type(module)(**arguments)
    except Exception as error:  # whatever the module's own code raises
        return None, f'made again it raises {type(error).__name__}: {error}'
    differs = _differing(module, other)
    if differs is not None:
        return None, f"made again it has another attribute '{differs}'"
    values = {leaf: value for leaf, value in other._buffers.items() if value is not None and _is_like(value, lacking.get(leaf))}
    unlike = next((leaf for leaf in lacking if leaf not in values), None)
    return (values, '') if unlike is None else (None, f"made again it has another '{unlike}'")


def _arguments(module: nn.Module) -> tuple[dict[str, Any], str | None]:
    """Returns the constructor's arguments, which are attributes, and the first one that is none."""
    arguments = {}
    for name, about in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if name in ('device', 'dtype'):
            continue
        if about.kind in (about.VAR_POSITIONAL, about.VAR_KEYWORD) or name not in vars(module):
            return {}, name  # nothing tells what it was, whatever its default is
        arguments[name] = vars(module)[name]
    return arguments, None


def _is_like(value: torch.Tensor, lacking: torch.Tensor | None) -> bool:
    return lacking is not None and not value.is_meta and (value.shape, value.dtype) == (lacking.shape, lacking.dtype)


def _differing(module: nn.Module, other: nn.Module) -> str | None:
    """Returns the name of an attribute that two modules of one class have differently."""
    mine, its = _plain(module), _plain(other)
    return next((name for name in {**mine, **its} if name not in mine or name not in its or not _same(mine[name], its[name])), None)


def _plain(module: nn.Module) -> dict[str, Any]:
    own = vars(nn.Module())  # what every module has
    return {name: value for name, value in vars(module).items() if name not in own and not isinstance(value, torch.Tensor)}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # as arrays do
        return False
