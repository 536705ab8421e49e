"""The programs that come with the package, in its folder bin: ballastd and ballastctl. pip puts both on PATH (pyproject.toml)."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

from ballast.errors import Error


def path(name: str) -> str:
    """Returns the path of a program. If the package was installed without ballastd, the variable BALLASTD names one."""
    beside = pathlib.Path(__file__).parent / 'bin' / name
    found = str(beside) if beside.is_file() else os.environ.get(name.upper())
    if not found:
        raise Error(f'{name} is not at {beside}: install the package again, or name servers', 'BAD_CONFIG')
    return found


def ballastd() -> NoReturn:
    _become('ballastd')


def ballastctl() -> NoReturn:
    _become('ballastctl')


def _become(name: str) -> NoReturn:
    try:
        program = path(name)
    except Error as error:
        sys.exit(f'{name}: {error}')
    os.execv(program, [name, *sys.argv[1:]])
