"""torch.optim.Optimizer's hooks around state dicts, for our methods that replace torch's. torch itself adds the hooks around step()."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def around_state_dict(state_dict: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(state_dict)
    def wrapped(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        for hook in optimizer._optimizer_state_dict_pre_hooks.values():
            hook(optimizer)
        result = state_dict(optimizer)
        for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
            changed = post_hook(optimizer, result)
            result = result if changed is None else changed
        return result
    return wrapped


def around_load_state_dict(load_state_dict: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    @functools.wraps(load_state_dict)
    def wrapped(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict = state_dict.copy()
        for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(optimizer, state_dict)
            state_dict = state_dict if changed is None else changed
        load_state_dict(optimizer, state_dict)
        for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            post_hook(optimizer)
    return wrapped
