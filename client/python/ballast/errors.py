"""What Ballast tells its users: errors, warnings, and lines of a log."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping

_HERE = os.path.dirname(__file__) + os.sep


class Error(RuntimeError):
    """Ballast refused a call, or a call failed. The message says what was expected, what came, and how to fix it.

    reason: a name that stays the same across releases, such as JOB_EXISTS, BUDGET or DISK_FULL. Programs may compare it. Some errors have
        none, and then it is "".
    code: the kind of error in gRPC's words, such as RESOURCE_EXHAUSTED.
    details: fields that some reasons have, for programs. TENSORS_DIFFER has 'missing' and 'unknown': names, separated by NULs.
    """

    def __init__(self, message: str, reason: str = '', code: str = '', details: Mapping[str, str] | None = None) -> None:
        super().__init__(f'{message} [{reason}]' if reason else message)
        self.reason = reason
        self.code = code
        self.details = details or {}


def say(text: str) -> None:
    """Tells a line to whoever watches the run: at INFO of the logger `ballast`, or on stderr if nobody has set up logging."""
    logger = logging.getLogger('ballast')
    if logger.hasHandlers():
        logger.info(text)
    else:
        print(f'ballast: {text}', file=sys.stderr)


def warn(text: str) -> None:
    """Gives a UserWarning at the line of the user's script that led here, not at a line of this package or of torch."""
    torch = sys.modules.get('torch')  # a script's own folder may be called so
    skipped = (_HERE,) if torch is None else (_HERE, os.path.dirname(str(torch.__file__)) + os.sep)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
