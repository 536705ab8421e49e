"""What Ballast tells its users: errors, warnings, and lines of a log."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping

_HERE = os.path.dirname(__file__) + os.sep


class Error(RuntimeError):
    """A refusal or failure, with what was expected, what came, and the fix.

    reason: stable across releases, such as JOB_EXISTS, BUDGET or DISK_FULL; programs may compare it. "" for some.
    code: the kind of error in gRPC's words, such as RESOURCE_EXHAUSTED.
    details: fields that some reasons have, for programs; TENSORS_DIFFER's are 'missing' and 'unknown', names with NULs between them.
    """

    def __init__(self, message: str, reason: str = '', code: str = '', details: Mapping[str, str] | None = None) -> None:
        super().__init__(f'{message} [{reason}]' if reason else message)
        self.reason = reason
        self.code = code
        self.details = details or {}


def say(text: str) -> None:
    """A line for whoever watches the run: INFO of the logger `ballast`, and on stderr where nobody has set up logging."""
    logger = logging.getLogger('ballast')
    if logger.hasHandlers():
        logger.info(text)
    else:
        print(f'ballast: {text}', file=sys.stderr)


def warn(text: str) -> None:
    """A UserWarning at the line of the script that led here: neither this package's nor torch's."""
    torch = sys.modules.get('torch')  # a script's own folder may be called so
    skipped = (_HERE,) if torch is None else (_HERE, os.path.dirname(str(torch.__file__)) + os.sep)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
