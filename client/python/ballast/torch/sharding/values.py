"""The values that parameters of a new job start with."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.sharding.streamed import Streamed
from ballast.torch.tensors.kinds import digest_of
from ballast.torch.tensors.remote import Part

# A module's own way to make its values; torch.nn.MultiheadAttention has the second name.
_RESETS = ('reset_parameters', '_reset_parameters')


class Values:
    """A model's first values. They are those that it had before shard(), or a checkpoint's. If it was made on the meta device, without a
    checkpoint, they come from each module's reset_parameters(), under a seed from the parameter's name, so they depend neither on the
    number of ranks nor on the order of modules."""

    def __init__(self, seed: int, places: Mapping[Part, list[tuple[nn.Module, str, str]]]) -> None:
        """places: of each parameter: its module, the module's name, and the parameter's name in it."""
        self._seed, self._places = seed, places
        self.streamed: Streamed | None = None
        self._given: dict[Part, torch.Tensor] = {}
        self._gone: set[Part] = set()  # those that were given, and freed
        self._made: dict[Part, torch.Tensor] = {}  # of one unit

    def give(self, part: Part, values: torch.Tensor) -> None:
        """values: of the part, on the host."""
        self._given[part] = values

    def forget(self) -> None:
        """Frees the memory of given values, since the servers have them."""
        self._gone.update(self._given)
        self._given.clear()
        self._made.clear()

    def of(self, part: Part, unit: Iterable[Part]) -> torch.Tensor:
        """Returns values of the part, on the host. unit: the parts that are made with it, in memory for whole parameters."""
        if part in self._given:
            return self._given[part]
        if self.streamed is not None and self.streamed.has(part):
            return self.streamed.read(part)
        if part in self._gone:
            raise Error(f"parameter '{part.name}' has its values on the servers of an earlier job, and a new job cannot begin with them. "
                        "Continue that job with resume='auto', or make the model again", 'BAD_REQUEST')
        if part not in self._made:
            self._made = {}
            self._make(unit)
        return self._made[part]

    def digest(self, part: Part, unit: Iterable[Part]) -> int:
        """Returns what ranks that have the same part have alike. unit: as for of()."""
        if part not in self._given and self.streamed is not None and self.streamed.has(part):
            return self.streamed.digest(part)
        return digest_of(self.of(part, unit))

    def _make(self, parts: Iterable[Part]) -> None:
        parts = [part for part in parts if part not in self._given]
        with torch.no_grad(), torch.random.fork_rng(), self._whole(parts) as whole:
            for module, name in self._modules(parts):
                reset = next((getattr(module, each) for each in _RESETS if hasattr(module, each)), None)
                if reset is None:
                    continue  # whatever stays without values is refused below
                torch.manual_seed(int.from_bytes(hashlib.sha256(f'{self._seed} {name}'.encode()).digest()[:8], 'little'))
                reset()
            for part, parameter in whole.items():
                if bool(parameter.isnan().any()):
                    kind = type(self._places[part][0][0]).__name__
                    raise Error(f"parameter '{part.name}' was made on the meta device, and no reset_parameters() of {kind} gives it "
                                'values; add one, give shard(weights=) a checkpoint, or make the model with its values before shard()',
                                'UNSUPPORTED')
                self._made[part] = part.of(parameter)

    def _modules(self, parts: list[Part]) -> list[tuple[nn.Module, str]]:
        """Returns modules that own a part, inner ones first, each with the name of its first parameter."""
        first: dict[nn.Module, tuple[int, str]] = {}
        for part in parts:
            module, path, _ = self._places[part][0]
            first.setdefault(module, (path.count('.') + bool(path), part.name))
        return [(module, name) for module, (_, name) in sorted(first.items(), key=lambda each: -each[1][0])]

    @contextlib.contextmanager
    def _whole(self, parts: list[Part]) -> Iterator[dict[Part, nn.Parameter]]:
        """Gives modules whole parameters for the time of the block. Every element is NaN."""
        whole = {}
        kept = [(module, leaf, module._parameters[leaf]) for part in parts for module, _, leaf in self._places[part]]
        try:
            for part in parts:
                module, _, leaf = self._places[part][0]
                dtype = module.get_parameter(leaf).dtype
                whole[part] = nn.Parameter(torch.full(part.shape, float('nan'), dtype=dtype, device='cpu'), requires_grad=False)
                for module, _, leaf in self._places[part]:
                    module._parameters[leaf] = whole[part]
            yield whole
        finally:
            for module, leaf, parameter in kept:
                module._parameters[leaf] = parameter
