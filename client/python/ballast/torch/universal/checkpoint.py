"""Reads a universal checkpoint in a folder, by name of the parameter. It trusts nothing in the folder."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from ballast.errors import Error
from ballast.torch.job.naming import unwrapped
from ballast.torch.universal import layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Stored:
    """One parameter's state, as states.entries.Entry. It maps a file for each look."""

    def __init__(self, checkpoint: Checkpoint, name: str, shape: torch.Size, steps: int) -> None:
        self.steps = steps
        self._checkpoint, self._name, self._shape = checkpoint, name, shape

    @property
    def master(self) -> torch.Tensor:
        return self.tensor('master')

    def moment(self, name: str) -> torch.Tensor:
        return self.tensor(name)

    def tensor(self, what: str) -> torch.Tensor:
        """Returns a whole tensor, of which the caller reads the part that it wants. what: a key of layout.FILES."""
        return self._checkpoint.tensor(self._name, what, self._shape)


class Checkpoint:
    """Reads the description of the checkpoint. tensor() reads parameters."""

    def __init__(self, folder: str | os.PathLike[str], tag: str | None) -> None:
        """tag: None for the one of `latest_universal`. Without that file, `folder` itself is the checkpoint."""
        self.path = _path(os.fspath(folder), tag)
        self._folders = self._find_parameters()
        self._optimizer = self._dict(layout.OPTIMIZER)
        files = sorted(glob.glob(os.path.join(glob.escape(self.path), 'mp_rank_*_model_states.pt'))
                       or glob.glob(os.path.join(glob.escape(self.path), 'zero_pp_rank_0_mp_rank_*_model_states.pt')))
        if not files:
            raise Error(f"'{self.path}' has no '{layout.MODEL}', nor '{layout.MODEL_ZERO3}'; expected a universal checkpoint", 'BAD_CONFIG')
        self._described = [os.path.relpath(file, self.path) for file in files]
        states = [self._dict(file) for file in self._described]
        self.model = states[0]
        self.steps_of_loop = _count(f"'global_steps' of '{files[0]}'", self.model.get('global_steps'))
        # Stages of a pipeline, and ranks of tensor parallelism, have a file each.
        self._shapes = [_shapes(file, state) for file, state in zip(files, states)]
        self._numbers = {name: number for lists in self._shapes for number, shapes in enumerate(lists) for name in shapes}

    def _find_parameters(self) -> dict[str, str]:
        zero = os.path.join(self.path, 'zero')
        found: dict[str, str] = {}
        for entry in sorted(os.scandir(zero), key=lambda entry: entry.name):
            if not entry.is_dir():
                continue
            name = unwrapped(entry.name)
            if name in found:
                raise Error(f"'{zero}' has two folders of parameter '{name}': '{os.path.basename(found[name])}' and '{entry.name}'",
                            'BAD_SPEC')
            found[name] = entry.path
        return found

    def _dict(self, file: str) -> dict[str, Any]:
        value = layout.read(os.path.join(self.path, file))
        if not isinstance(value, dict):
            raise Error(f"'{os.path.join(self.path, file)}' has a {type(value).__name__}; expected a dict", 'BAD_SPEC')
        return value

    # --- parameters

    @property
    def trained(self) -> set[str]:
        """Names of parameters that have moments."""
        return {name for name in self._folders if any(self._has(name, layout.FILES[what]) for what in ('exp_avg', 'exp_avg_sq'))}

    def _has(self, name: str, file: str) -> bool:
        return name in self._folders and os.path.exists(os.path.join(self._folders[name], file))

    def lacks(self, name: str) -> str | None:
        """Returns the first file that parameter `name` lacks."""
        return next((file for file in layout.FILES.values() if not self._has(name, file)), None)

    def files(self, names: list[str]) -> list[str]:
        """Returns all files that a load of parameters `names` reads."""
        found = [os.path.join(self.path, file) for file in [layout.OPTIMIZER, *self._described]]
        for name in names:
            found += [os.path.join(self._folders[name], file) for file in [*layout.FILES.values(), layout.STEP] if self._has(name, file)]
        return found

    def tensor(self, name: str, what: str, shape: torch.Size) -> torch.Tensor:
        path = os.path.join(self._folders[name], layout.FILES[what])
        value = layout.read(path)
        flat = not isinstance(value, dict)
        value = value if flat else value.get(layout.PARAM)
        if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES or value.layout != torch.strided:
            raise Error(f"'{path}' has no tensor of fp32, bf16 or fp16 for parameter '{name}'", 'BAD_DTYPE')
        there = self._shape(name) if flat else value.shape
        if there != shape or value.numel() != math.prod(shape):
            raise Error(f"parameter '{name}' has shape {list(there)} in '{path}', and {list(shape)} here", 'BAD_SPEC')
        return value.detach().reshape(shape)

    def _shape(self, name: str) -> torch.Size:
        """Returns the shape in the model states, since a flat tensor would fit any shape with as many elements."""
        found = next((shapes[name] for lists in self._shapes for shapes in lists if name in shapes), None)
        if found is None:
            raise Error(f"'param_shapes' of '{self.path}' has no parameter '{name}', whose tensors are flat", 'BAD_SPEC')
        return found

    def steps(self, name: str) -> int:
        if self._has(name, layout.STEP):
            path = os.path.join(self._folders[name], layout.STEP)
            return _count(f"'{path}'", layout.read(path))
        state = self._optimizer.get('optimizer_state_dict')  # of ZeRO-3
        state = state.get('state') if isinstance(state, dict) else None
        entry = state.get(self.group(name)) if isinstance(state, dict) else None
        if not isinstance(entry, dict) or 'step' not in entry:
            raise Error(f"parameter '{name}' has no '{layout.STEP}', and '{os.path.join(self.path, layout.OPTIMIZER)}' has no 'step' of it",
                        'BAD_SPEC')
        return _count(f"the 'step' of parameter '{name}'", entry['step'])

    # --- groups

    def group(self, name: str) -> int:
        """Returns the number of the group that DeepSpeed keeps the parameter in. DeepSpeed counts the steps of a group."""
        if name not in self._numbers:
            raise Error(f"'param_shapes' of '{self.path}' has no parameter '{name}'; expected it in a group", 'BAD_SPEC')
        return self._numbers[name]

    def options(self, name: str) -> dict[str, Any]:
        """Returns the param_group of a parameter."""
        groups = self._optimizer.get('param_groups')
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and isinstance(group.get('params'), list) and self.group(name) in group['params']:
                return group
        raise Error(f"'{os.path.join(self.path, layout.OPTIMIZER)}' has no param_group of parameter '{name}'", 'BAD_SPEC')


def _path(folder: str, tag: str | None) -> str:
    latest = os.path.join(folder, layout.LATEST)
    if tag is None and os.path.exists(latest):
        with open(latest, encoding='utf-8', errors='replace') as file:
            tag = file.read(4096).strip()
    path = folder if tag is None else os.path.join(folder, layout.check_tag(tag))
    if not os.path.isdir(os.path.join(path, 'zero')):
        raise Error(f"'{path}' has no folder 'zero', so it is not a universal checkpoint. DeepSpeed makes one from a checkpoint of its "
                    f'own: python -m deepspeed.checkpoint.ds_to_universal --input_folder {path} --output_folder {path}_universal '
                    '--inject_missing_state', 'BAD_CONFIG')
    return path


def _shapes(file: str, state: Mapping[str, Any]) -> list[dict[str, torch.Size]]:
    """Returns shapes of parameters, by number of the group."""
    lists = state.get('param_shapes')
    if not isinstance(lists, list) or not all(isinstance(shapes, dict) for shapes in lists):
        raise Error(f"'{file}' has no 'param_shapes'; expected model states of ZeRO", 'BAD_SPEC')
    try:
        return [{unwrapped(name): torch.Size(shape) for name, shape in shapes.items()} for shapes in lists]
    except (TypeError, AttributeError) as error:
        raise Error(f"'param_shapes' of '{file}' cannot be read: {error}", 'BAD_SPEC') from error


def _count(what: str, value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or value != int(value):
        raise Error(f'{what} is {value!r}; expected a whole number of steps', 'BAD_SPEC')
    return int(value)
