"""Checks, as the package is imported, that torch is there and new enough, and that the native module is this Python's."""

from __future__ import annotations

import importlib.util
import re
import sys

_TORCH = 2, 4


def _check() -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != 'torch':
            raise
        raise ImportError(f"ballast.torch needs PyTorch {_TORCH[0]}.{_TORCH[1]} or later, and {sys.executable} has none: pip install torch",
                          name='torch') from error
    if tuple(int(part) for part in re.findall(r'\d+', torch.__version__)[:2]) < _TORCH:
        raise ImportError(f'ballast.torch needs PyTorch {_TORCH[0]}.{_TORCH[1]} or later, and this is {torch.__version__} of '
                          f"{torch.__file__}: pip install 'torch>={_TORCH[0]}.{_TORCH[1]}'", name='torch')
    if importlib.util.find_spec('ballast._native') is None:
        raise ImportError(f"ballast has no native module for Python {'.'.join(map(str, sys.version_info[:3]))} of {sys.executable}: it was "
                          'installed for another one. Install ballast-state with this Python', name='ballast._native')


_check()
