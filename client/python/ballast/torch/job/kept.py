"""Versions that the servers keep for state_dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast.errors import Error

if TYPE_CHECKING:
    from ballast import _native


class Kept:
    """Decides which versions the servers keep for state_dicts.

    Nobody tells whether a state_dict was ever saved: its process may have died on the way. Only a state_dict that a later one followed
    counts as saved, and one that was loaded. So versions go when `count` saved ones newer than they are there, whoever made them;
    if servers run out of room before that, the oldest go first, but none that is known to be saved."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._made: list[int] = []  # by this process, ascending; all but the last are saved
        self._loaded: int | None = None

    def loaded(self, version: int) -> None:
        self._loaded = version

    def keep(self, session: _native.Session) -> None:
        """The servers keep the session's version from now on."""
        version = session.version
        if self._made and self._made[-1] == version:
            return
        while True:
            try:
                session.pin()
                break
            except Error as error:
                if error.reason not in ('BUDGET', 'DISK_FULL') or not self._give_up_oldest(session):
                    raise
        self._made.append(version)
        if len(self._made) > self._count:
            self._made = self._made[-self._count - 1:]
            for old in session.pins():
                if old < self._made[0]:
                    session.unpin(old)

    def _give_up_oldest(self, session: _native.Session) -> bool:
        for old in session.pins():
            if old not in self._made[-self._count:] and old != self._loaded:
                session.unpin(old)
                return True
        return False
