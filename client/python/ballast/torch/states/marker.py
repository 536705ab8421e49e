"""The job and version that a state_dict() names. They stand in each of its param_groups, because functions of torch that take states apart
and put them together (torch.distributed.checkpoint.state_dict) keep only `state` and `param_groups`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ballast.errors import Error

KEY = 'ballast'
# The same for every job and version, since Distributed Checkpoint reads a tensor into one of the same size.
_BYTES = 1024


class Marker(NamedTuple):
    job: str
    version: int = -1  # -1: the job was not open
    steps: int = 0
    origin: str = ''  # the optimizer whose job was not open
    begins: bool = False  # the job was not open, and could only be a new one: resume='never'
    edited: int = 0  # parameters held values then that the version is without, and the model's own state has: edits.digest() of them
    # Which version of that number, as _native.KeptVersion has it: the job's life, and the epoch that decided the version. 0: not known, as
    # in states of earlier versions of the package.
    life: int = 0
    decided_by: tuple[int, int] = (0, 0)

    def show(self) -> str:
        life = f' of life {self.life:016x}' if self.life else ''
        epoch = f', decided in epoch {self.decided_by[0]}-{self.decided_by[1]:016x}' if self.decided_by[0] else ''
        return f"job '{self.job}'{life} at version {self.version}{epoch}"

    def tensor(self) -> torch.Tensor:
        """Returns the marker as a tensor, because torch cannot broadcast a state_dict without any tensor."""
        text = json.dumps(self._asdict(), ensure_ascii=False).encode()
        return torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)


def _read(value: Any) -> Marker:
    try:
        said = Marker(**json.loads(bytes(value.cpu().tolist())))
        counter, nonce = said.decided_by  # JSON has lists
        return said._replace(decided_by=(int(counter), int(nonce)))
    except (AttributeError, TypeError, ValueError) as error:
        raise Error(f"'{KEY}' in the state's param_groups is {value!r}, which no state_dict() of ballast.torch has; take another copy of "
                    'the state', 'BAD_SPEC') from error


def of(groups: Sequence[Mapping[str, Any]]) -> Marker | None:
    """Returns the marker of saved param_groups. None: they are torch.optim's."""
    there = [KEY in group for group in groups]
    if not any(there):
        return None
    if not all(there):
        raise Error(f"the state's group {there.index(True)} is of a job's state_dict(), and group {there.index(False)} is not; give "
                    'one state', 'BAD_SPEC')
    markers = [_read(group[KEY]) for group in groups]
    for g, each in enumerate(markers):
        if each != markers[0]:
            raise Error(f"the state's group 0 is of {markers[0].show()}, group {g} of {each.show()}; give one state", 'BAD_SPEC')
    return markers[0]
