"""Ballast: a training job's optimizer state outside the trainer. Start with ballast.torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ballast.errors import Error

if TYPE_CHECKING:
    # No `import torch` here: it would make ballast.torch the name of torch itself, for type checkers.
    from ballast.torch.estimate import estimate

if sys.version_info < (3, 10):  # noqa: UP036  # pip refuses such a Python, but the package may be on its path
    raise ImportError(f"ballast needs Python 3.10 or later, and this is {'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})")

__all__ = ['Error', 'drop', 'estimate', 'jobs']
__version__ = '0.1.0'


def __getattr__(name: str) -> Any:
    if name == 'estimate':  # at its first use: torch takes its time to import
        from ballast.torch.estimate import estimate
        globals()[name] = estimate
        return estimate
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def jobs(directory: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the names of the jobs on the state server inside this process.

    directory: as for an optimizer. If no server runs there, this call starts one."""
    from ballast import embedded
    return embedded.jobs(directory)


def drop(name: str, directory: str | os.PathLike[str] | None = None) -> None:
    """Deletes a job from the state server inside this process, with all its state in memory and on disk.

    No optimizer of this process may use the job. directory: as for jobs(). To delete a job from named servers, run `ballastctl drop`."""
    from ballast import embedded
    embedded.drop(name, directory)
