"""A model of shard(), as its units see it."""

from __future__ import annotations

import abc
import collections

from torch import nn

from ballast.torch.ranks import groups
from ballast.torch.sharding.memory import Memory
from ballast.torch.sharding.values import Values
from ballast.torch.tensors.remote import Part

# Of the bytes that ranks exchange; keys of stats().
WAYS = 'gather_bytes', 'node_bytes', 'reduce_bytes'


class Model(abc.ABC):
    """What units of a model share on one rank. Threads: the training loop's and autograd's, one at a time."""

    def __init__(self, seed: int, frozen: str, working: str, how: str) -> None:
        """seed, working: of shard(). frozen: of shard(), with '' for 'state'. how: a text of the arguments that must be alike on all
        ranks."""
        self.parameters: dict[Part, nn.Parameter] = {}
        self.places: dict[Part, list[tuple[nn.Module, str, str]]] = {}  # module, its name, the parameter's name in it
        self.copies: dict[Part, nn.Parameter] = {}  # that are in the places now, within gathered()
        self.values = Values(seed, self.places)
        self.memory = Memory()
        self.wire: collections.Counter[str] = collections.Counter(dict.fromkeys(WAYS, 0))  # bytes that this rank received
        self.frozen, self.working, self.how = frozen, working, how
        self.number = 0  # among the models of the same ranks, which give theirs to shard() in one order

    @abc.abstractmethod
    def now(self) -> tuple[int, int, int] | None:
        """Returns a name of the values that the job has now. None: no session is open."""

    @property
    @abc.abstractmethod
    def group(self) -> groups.Group:
        """The ranks that train the job."""

    @property
    @abc.abstractmethod
    def timeout(self) -> float:
        """Seconds that ranks wait for each other."""
