"""The layout of a universal checkpoint, as DeepSpeed 0.19 writes and reads it, and the functions that read its files.

    FOLDER/latest_universal                      the tag of the newest checkpoint
    FOLDER/TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt   one parameter: {'param': tensor}, from ZeRO-3 the flat tensor alone
    FOLDER/TAG/zero/NAME/step.pt                 its step count; ZeRO-3 has one in optimizer_state.pt instead
    FOLDER/TAG/zero/optimizer_state.pt           param_groups; 'params' are indices into param_shapes
    FOLDER/TAG/mp_rank_00_model_states.pt        param_shapes, global_steps, lr_scheduler, the caller's client_state
    FOLDER/TAG/zero_pp_rank_0_mp_rank_00_model_states.pt  the same, under the name that ZeRO-3 reads

A buffer, a frozen parameter, and a parameter that never had a gradient have only fp32.pt, or no folder.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from ballast.errors import Error

LATEST = 'latest_universal'
OPTIMIZER = os.path.join('zero', 'optimizer_state.pt')
MODEL, MODEL_ZERO3 = 'mp_rank_00_model_states.pt', 'zero_pp_rank_0_mp_rank_00_model_states.pt'
VERSION = '0.19.8'  # DeepSpeed's, whose layout this is
PARAM = 'param'
# Files of a parameter, by what torch.optim calls their contents; master: the fp32 values.
FILES = {'master': 'fp32.pt', 'exp_avg': 'exp_avg.pt', 'exp_avg_sq': 'exp_avg_sq.pt'}
STEP = 'step.pt'
# Hyper-parameters of a group that go with a checkpoint.
HYPER = ('lr', 'betas', 'eps', 'weight_decay')
# Keys of the model states that are DeepSpeed's; all others are the caller's client_state.
RESERVED = frozenset((
    'module', 'buffer_names', 'optimizer', 'param_shapes', 'frozen_param_shapes', 'shared_params', 'frozen_param_fragments', 'lr_scheduler',
    'data_sampler', 'random_ltd', 'sparse_tensor_module_names', 'skipped_steps', 'global_steps', 'global_samples', 'dp_world_size',
    'mp_world_size', 'ds_config', 'ds_version', 'checkpoint_parallel_dimensions', 'num_experts', 'ds_autoep_layers', 'autoep_layers',
    'universal_checkpoint_info', 'folding'))


def check_tag(tag: str) -> str:
    if not tag or tag.startswith('.') or os.path.basename(tag) != tag or '\0' in tag:
        raise Error(f'the tag {tag!r} cannot be the name of a folder; expected one such as global_step100_universal', 'BAD_CONFIG')
    return tag


# --- reading: nothing of a file runs

class _Inert:
    """Stands in for an object of DeepSpeed whose contents nobody needs."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def _standing_in(path: str, base: type) -> Callable[..., Any]:
    """Returns a class that torch.load takes for the one at `path`."""
    module, _, name = path.rpartition('.')
    return type(name, (base,), {'__module__': module})


_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [_standing_in(path, base) for path, base in (
    ('deepspeed.runtime.zero.config.ZeroStageEnum', int),
    ('deepspeed.runtime.fp16.loss_scaler.LossScaler', _Inert),
    ('deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler', _Inert),
    ('deepspeed.checkpoint.universal_checkpoint.SubparamShape', _Inert))]


def read(path: str) -> Any:
    """Returns the contents of a file of torch.save. It maps tensors into memory and does not read them. It refuses a file that names code
    (torch.load's weights_only), except DeepSpeed's own classes, for which inert ones stand in."""
    if not hasattr(torch.serialization, 'safe_globals'):
        raise Error('universal checkpoints are read with torch 2.5 or later', 'UNSUPPORTED')
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise Error(f"'{path}' is not there; expected a whole universal checkpoint", 'BAD_CONFIG') from error
    except pickle.UnpicklingError as error:
        found = re.search(r'GLOBAL ([\w.]+)', str(error))
        named = f'names {found[1]}, which would run code' if found else 'is no pickle of plain values and tensors'
        raise Error(f"'{path}' {named}: nothing of it was loaded. Expected tensors, numbers and texts; allow a "
                    'class that you trust by torch.serialization.add_safe_globals', 'BAD_REQUEST') from error
    except Exception as error:  # a broken zip raises RuntimeError, broken opcodes whatever they meet
        raise Error(f"'{path}' cannot be read: {error}; is it truncated? Take another copy of the checkpoint", 'CHECKSUM') from error


def check_digests(path: str) -> None:
    """Checks the CRC-32 that torch.save wrote for each part of the file. torch.load does not check it."""
    try:
        with zipfile.ZipFile(path) as parts:
            wrong = parts.testzip()
    except FileNotFoundError as error:
        raise Error(f"'{path}' is not there; expected a whole universal checkpoint", 'BAD_CONFIG') from error
    except Exception as error:  # zipfile raises its own, and what broken fields make of struct, zlib and seek
        raise Error(f"'{path}' cannot be read: {error}; is it truncated? Take another copy of the checkpoint", 'CHECKSUM') from error
    if wrong is not None:
        raise Error(f"'{path}' is damaged: part '{wrong}' has another CRC-32 than when it was written; take another copy of the checkpoint",
                    'CHECKSUM')
