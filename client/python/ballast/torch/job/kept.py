"""Versions that the servers keep for state_dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast.errors import Error, warn

if TYPE_CHECKING:
    from ballast import _native


class Kept:
    """Decides which versions the servers keep for state_dicts.

    Nobody says whether a state_dict was ever saved: its process may have died before. A state_dict counts as saved if a later one followed
    it, or if it was loaded. The servers give up a version once there are `count` newer saved ones, whoever made them. If servers run out of
    room earlier, the oldest versions go first, but no version that is known to be saved. A warning comes before the first version goes."""

    def __init__(self, job: str, count: int) -> None:
        """job: the name."""
        self._job, self._count = job, count
        self._made: list[int] = []  # by this process, ascending; all but the last are saved
        self._loaded: int | None = None
        self._warned = False

    def loaded(self, version: int) -> None:
        self._loaded = version

    def keep(self, session: _native.Session) -> _native.KeptVersion:
        """Makes the servers keep the session's current version."""
        version = session.version
        for _ in range(2):  # the job's servers may just have changed
            if self._made[-1:] != [version]:
                self._pin(session)
                self._made = [*self._made, version][-self._count - 1:]
            kept = {pin.version: pin for pin in session.pins()}
            if version in kept:
                break
            self._made.pop()
        else:
            raise Error(f"version {version} of job '{self._job}' was given up while this state_dict() was naming it, by ballastctl or "
                        'another optimizer; call state_dict() again', 'VERSION_GONE')
        if len(self._made) > self._count:
            for old in [old for old in kept if old < self._made[0]]:
                session.unpin(old)
                del kept[old]
        self._announce(min(kept))
        return kept[version]

    def check(self, session: _native.Session, wanted: _native.KeptVersion) -> None:
        """Refuses a version that the servers do not keep, or that is of another job or another history."""
        try:
            session.check_kept(wanted)
        except Error as error:
            there = [pin.version for pin in session.pins()] if error.reason == 'VERSION_GONE' else [wanted.version]
            if wanted.version in there:
                raise
            raise Error(f"the servers do not keep version {wanted.version} of job '{self._job}' (any more). Of the newest "
                        f'{self._count + 1} state_dict()s they keep {", ".join(map(str, there)) or "none"}. {_MORE}',
                        'VERSION_GONE') from error

    def _pin(self, session: _native.Session) -> None:
        while True:
            try:
                session.pin()
                return
            except Error as error:
                if error.reason not in ('BUDGET', 'DISK_FULL') or not self._give_up_oldest(session, error.reason):
                    raise

    def _announce(self, oldest: int) -> None:
        """oldest: of those that are kept."""
        stays = self._made[-self._count:]  # after the next state_dict()
        if self._warned or len(stays) < self._count or oldest >= stays[0]:
            return
        self._warned = True
        warn(f"job '{self._job}': the servers keep the versions of the newest {self._count + 1} state_dict()s, so the next state_dict() "
             f'gives up version {oldest}. A checkpoint that names it can then no longer be loaded. {_MORE}')

    def _give_up_oldest(self, session: _native.Session, reason: str) -> bool:
        for pin in session.pins():
            if pin.version not in self._made[-self._count:] and pin.version != self._loaded:
                warn(f"job '{self._job}': the servers have no room for one more version ({reason}), so they give up version "
                     f'{pin.version}. A checkpoint that names it can no longer be loaded')
                session.unpin(pin.version)
                return True
        return False


_MORE = ('To keep more, give the optimizer checkpoints=N, where N is how many you want to go back to. For checkpoints that hold the whole '
         "state themselves, give it states='full'")
