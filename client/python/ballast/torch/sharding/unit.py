"""Parameters that FSDP2 gathers together: one pull brings this rank's parts of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ballast.torch.sharding.remote import Part

if TYPE_CHECKING:
    from ballast.torch.sharding.collectives import Gather
    from ballast.torch.sharding.sharded import Sharded


class Unit:
    """Threads: one at a time, as FSDP2 gathers."""

    def __init__(self, name: str, parts: Sequence[Part], device: torch.device, model: Sharded) -> None:
        """device: where gathers take place."""
        self.name, self.parts, self.device, self.model = name, list(parts), device, model
        self.gathers = 0  # so far: the same on all ranks that gather together
        self._gathered_at: object = None  # Sharded.now() of the last pull
        self._pieces: dict[Part, torch.Tensor] = {}  # of the pull that is being taken, until its gather has them
        self._asked: set[Part] = set()  # by the gather that is being prepared
        self.gather: Gather | None = None  # None: FSDP2's own, which nothing can replace where a unit has several meshes
        for part in self.parts:
            part.unit = self

    @property
    def is_stale(self) -> bool:
        """What was gathered last is not the job's version."""
        return self._gathered_at is not None and self._gathered_at != self.model.now()

    @property
    def is_pinned(self) -> bool:
        """A pull comes into page-locked memory, on its way to a GPU."""
        return self.device.type == 'cuda'

    def bytes(self, width: int) -> int:
        """Of one pull. width: of an element."""
        return width * sum(part.padded.numel() for part in self.parts)

    def pieces(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """memory: of the host, for one pull. A padded piece of it for each part, end to end, zero behind a part's elements."""
        pieces = list(memory.split([part.padded.numel() for part in self.parts]))
        for part, piece in zip(self.parts, pieces):
            piece[part.elements:].zero_()
        return pieces

    def take(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """The part at the job's version, in their padded shape; the first part that a gather takes pulls all."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._asked or part in self._asked:
                self._asked = set()
                self.gathers += 1
            self._asked.add(part)
            if self.gather is not None and self.gather.has_second:
                return torch.empty(part.padded, dtype=dtype, device=self.device)  # which the gather does not read
            if part not in self._pieces or self._gathered_at != self.model.now():
                self._pieces = dict(zip(self.parts, self.model.pulls.take(self)))
                self._gathered_at = self.model.now()
            piece = self._pieces.pop(part)
            return piece.to(self.device, non_blocking=True).to(dtype).view(part.padded)
