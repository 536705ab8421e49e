"""optimizer.state: moments and step counts, which are read from the servers on demand."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ballast.errors import Error
from ballast.torch.job.job import Job
from ballast.torch.job.moments import KNOWN, OURS
from ballast.torch.modes import plainly
from ballast.torch.states import checkpoint, loading
from ballast.torch.states.read_only import copy_of, has_bits, refuse


class Looks:
    """What all views of a job's state share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()  # by id, those in use
        self.lives = 0  # how often another optimizer.state took the place of what was there


class Owner(Protocol):
    """An optimizer, as far as its state asks."""
    param_groups: list[dict[str, Any]]
    looks: Looks


if TYPE_CHECKING:
    from typing_extensions import Self

    _Dict = dict[str, Any]
else:
    class _Dict(MutableMapping, dict):
        """A dict whose methods all go through __getitem__ and the like, as those of a mapping do."""

        def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
            return {**self, **other}

        def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
            return {**other, **self}

        def __ior__(self, other: Any) -> Self:
            self.update(other)
            return self


class Entry(_Dict):
    """One parameter's current state. Once the job is open, each look at a moment or a step count reads a copy from the servers. Other keys
    are the caller's, and stay in the trainer. A write of a moment or step count is refused, unless the servers already have that value, as
    when a framework moves state to another device. A pickle or copy of an entry is an OrderedDict of plain tensors.

    An entry that was deleted or replaced becomes a dict of the values that it had, as in torch.

    The dict beneath stays empty. Loops over torch's state look for dicts, so this is one."""

    def __init__(self, looks: Looks, parameter: torch.Tensor) -> None:
        super().__init__()
        self._job, self._parameter = looks.job, parameter
        self._read: dict[str, tuple[int, torch.Tensor]] = {}  # by key: the copy that was read last, and the job's version then
        self._had: dict[str, Any] | None = None  # what it had when it was taken away
        looks.entries[id(self)] = self

    def _ours(self) -> tuple[str, ...]:
        # A look must not open a job: its parameters would come in the place of those that the caller has just loaded.
        return () if self._had is not None or self._job.opened is None else self._job.state_keys(self._parameter)

    def _extras(self) -> dict[str, Any]:
        return self._job.extras.get(self._parameter, {}) if self._had is None else self._had

    def _of_servers(self, key: object) -> bool:
        return key in OURS and self._had is None

    def leaving(self, parameters: set[int]) -> dict[str, Any] | None:
        """Returns what the entry has, if its parameter is one of these, by id, which are about to get other entries."""
        if self._had is None and id(self._parameter) in parameters:
            return {**self._job.read_state(self._parameter), **self._extras()}
        return None

    def keep(self, had: dict[str, Any]) -> None:
        """Gives the entry values of its own, since the parameter has others now."""
        self._had = had

    def __iter__(self) -> Iterator[str]:
        return iter([*self._ours(), *self._extras()])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return key in (self._ours() if self._of_servers(key) else self._extras())

    def __getitem__(self, key: str) -> Any:
        if not self._of_servers(key):
            return self._extras()[key]
        if key not in self:
            raise KeyError(key)
        value = copy_of(self._job.read_key(self._parameter, key))
        self._read[key] = (self._version(), value)
        return value

    def _version(self) -> int:
        """The open job's."""
        return -1 if self._job.opened is None else self._job.opened.session.version

    def holds(self, key: str, value: Any) -> bool:
        """The servers have this value for one of their keys."""
        if key not in self:
            return False
        last = self._read.get(key)
        if last is not None and value is last[1] and last[1]._version == 0 and last[0] == self._version():
            return True
        mine = self[key]
        return float(mine) == value if key == 'step' and isinstance(value, (int, float)) else has_bits(mine, value)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *others: Any, **more: Any) -> None:
        """Writes all, or nothing with an error."""
        given = dict(*others, **more)
        if self._had is not None:
            self._had.update(given)
            return
        foreign = [key for key in given if key in KNOWN and not any(key in names for names in self._job.arrays())]
        if foreign:
            raise Error(f"optimizer.state[p][{foreign[0]!r}] is a moment of another optimizer or of other options, and this job "
                        f"({self._job.algorithm.kind}) keeps none of that name. Keep a value of your own under another key, such as "
                        f"'my_{foreign[0]}'", 'BAD_SPEC')
        if not all(self.holds(key, value) for key, value in given.items() if key in OURS):
            refuse()
        extras = {key: value for key, value in given.items() if key not in OURS}
        if extras:
            self._job.extras.setdefault(self._parameter, {}).update(extras)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        if self._of_servers(key):
            refuse()
        del self._extras()[key]

    def clear(self) -> None:
        if self._ours():
            refuse()
        self._extras().clear()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return collections.OrderedDict, (), None, None, iter(self.items())


class State(MutableMapping[torch.Tensor, Any]):
    """Entries by parameter, including parameters without a step. When an assignment or a deletion returns, the servers have carried it out;
    all ranks assign the same. Keys that servers do not hold stay in the trainer.

    It is never empty, even before the job is open: torch's checkpointing would make a step of its own if it found no state."""

    def __init__(self, optimizer: Owner) -> None:
        self._optimizer = optimizer  # which lives while its state is used
        self._looks = optimizer.looks
        self._job = self._looks.job
        self._life = self._looks.lives

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group['params']]

    def __len__(self) -> int:
        return len(self._parameters())

    def __bool__(self) -> bool:
        checkpoint.before_torchs(self._job)
        return True

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters())

    def __contains__(self, parameter: object) -> bool:
        # As in torch, a parameter that has left its group is still there.
        known = isinstance(parameter, torch.Tensor) and self._job.member_of(parameter) is not None
        return known or any(parameter is each for each in self._parameters())

    def _check(self, parameter: object) -> None:
        if not isinstance(parameter, torch.Tensor):
            raise KeyError(f'optimizer.state[{parameter!r}]: expected a parameter of the param_groups; keep other things elsewhere')
        if parameter not in self:
            raise KeyError('optimizer.state: this parameter is in none of the param_groups')

    @plainly  # an entry that is being made has no length yet, and torch.compile asks for it
    def __getitem__(self, parameter: torch.Tensor) -> Entry:
        if not isinstance(parameter, torch.Tensor) or self._job.member_of(parameter) is None:
            self._check(parameter)  # a look through all
        return Entry(self._looks, parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        return self[parameter] if parameter in self else default

    def __setitem__(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
        self._check(parameter)
        self._put({parameter: entry})

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def clear(self) -> None:
        self._put({parameter: {} for parameter in self._parameters()})

    def replace(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """As assigning `states` to torch's optimizer.state. Parameters that are not in it start without state."""
        if isinstance(states, State) and states._looks is self._looks:
            if states._life != self._looks.lives:
                raise Error('optimizer.state was assigned a state that another has replaced since. It is a view of what the servers hold '
                            'now, and has nothing of what they held then. Keep copies, {p: dict(entry) for p, entry in '
                            'optimizer.state.items()}, and assign those', 'BAD_REQUEST')
            return
        if not isinstance(states, Mapping):
            raise Error(f'optimizer.state = {type(states).__name__}: expected a dict of dicts by parameter', 'BAD_CONFIG')
        parameters = self._parameters()
        there = {id(parameter) for parameter in parameters}
        for other in states:
            if id(other) not in there:
                raise KeyError('optimizer.state: a parameter is in none of the param_groups')
        self._put({parameter: states.get(parameter) or {} for parameter in parameters})
        if self._job.opened is not None:
            self._looks.lives += 1

    def _put(self, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        job = self._job
        ours: dict[torch.Tensor, Any] = {}
        extras: dict[torch.Tensor, dict[str, Any]] = {}
        for parameter, entry in states.items():
            ours[parameter], extras[parameter] = _split(entry)
        is_there = job.opened is not None and all(self._has(parameter, entry) for parameter, entry in ours.items())
        had = [] if is_there or job.opened is None else self._leaving(set(map(id, states)))
        if job.options.world_size > 1 or not is_there:
            loading.put(job, {id(parameter): entry for parameter, entry in ours.items()})
        for each, values in had:
            each.keep(values)
        job.extras.update(extras)

    def _leaving(self, parameters: set[int]) -> list[tuple[Entry, dict[str, Any]]]:
        """Returns the entries in use of these parameters, by id, with what each has."""
        found = [(each, each.leaving(parameters)) for each in list(self._looks.entries.values())]
        return [(each, had) for each, had in found if had is not None]

    def _has(self, parameter: torch.Tensor, entry: Any) -> bool:
        """The servers have exactly this entry."""
        mine = Entry(self._looks, parameter)
        return (isinstance(entry, Mapping) and entry.keys() == set(mine._ours())
                and all(mine.holds(key, value) for key, value in entry.items()))


def _split(entry: Any) -> tuple[Any, dict[str, Any]]:
    """Splits an entry into what servers hold and the rest. If it is not an entry, the servers' side gets it, and refuses it by its type."""
    if not isinstance(entry, Mapping):
        return entry, {}
    return ({key: value for key, value in entry.items() if key in OURS},
            {key: value for key, value in entry.items() if key not in OURS})
