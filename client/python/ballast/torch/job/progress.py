"""How far a job's training loop has come, and what the job began with. The job's blob keeps both with every version."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ballast.errors import Error

# In front of the caller's blob: how many steps the loop has made, and the job's origin.
_HEAD = struct.Struct('<II')
# In place of the number of steps: a load is under way.
_UNDER_WAY = 2**32 - 1
# Where earlier builds had a load under way, which knew no origins.
_NO_ORIGIN = 2**32 - 1


def origin_of(digest: int) -> int:
    """Returns an origin for a digest of 32 bits. It is never 0, which says that the job has none."""
    return digest if digest not in (0, _NO_ORIGIN) else 1


def _steps_and_origin(blob: bytes) -> tuple[int, int]:
    steps, origin = _HEAD.unpack_from(blob)
    return steps, 0 if origin == _NO_ORIGIN else origin


class Progress:
    """The training loop's position in one job."""

    def __init__(self) -> None:
        self.steps = 0  # calls of step(), skipped ones included
        self.blob = b''  # the caller's, of the last call
        self.origin = 0  # origin_of() the checkpoint that this rank's first values came from. 0: from elsewhere, or not known
        self.origins: frozenset[int] = frozenset()  # of all ranks that made the version
        self.partly = False  # a load that did not end left the job's state
        self.skips = 0  # steps in a row that were skipped

    def pack(self, steps: int, blob: bytes = b'') -> bytes:
        """The job's blob after `steps` steps. blob: the caller's part of it."""
        if steps >= _UNDER_WAY:
            raise Error(f'{steps} steps: a job counts at most {_UNDER_WAY - 1}; give a state with fewer', 'BAD_REQUEST')
        return _HEAD.pack(steps, self.origin) + blob

    def pack_under_way(self) -> bytes:
        """The job's blob amid a load."""
        return _HEAD.pack(_UNDER_WAY, self.origin)

    def take(self, blobs: Sequence[bytes], rank: int) -> None:
        """Takes the position from the blobs of a version, one for each rank that made it. This is the rank's own blob, or rank 0's if this
        rank made none, as when there were fewer ranks then."""
        mine = next(filter(None, [*blobs[rank:rank + 1], *blobs[:1], _HEAD.pack(0, 0)]))
        (self.steps, self.origin), self.blob = _steps_and_origin(mine), mine[_HEAD.size:]
        self.origins = frozenset(_steps_and_origin(blob)[1] for blob in blobs if blob) | {self.origin}
        self.partly = self.steps == _UNDER_WAY

    def made(self, blob: bytes) -> None:
        """The job has made one more step."""
        self.steps, self.blob = self.steps + 1, blob

    def loaded(self, steps: int, blob: bytes) -> None:
        self.steps, self.blob, self.skips = steps, blob, 0

    def forget(self) -> None:
        """As if the job had not been opened."""
        self.steps, self.blob, self.origin, self.origins, self.partly = 0, b'', 0, frozenset(), False

    def check_whole(self, job: str) -> None:
        """Refuses a state that is only partly there. job: the name."""
        if self.partly:
            raise Error(f"a load into job '{job}' ended before all of its state was there, so its state is neither the old one nor the "
                        'new one. Call load_state_dict() again with the same state, or load_universal() with the same folder, or '
                        'rollback() to one of versions()', 'INCOMPLETE')
