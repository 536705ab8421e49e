"""push_early: sends a unit's gradients to the servers as soon as backward has made them. step() takes what went."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch.job.features import Feature, Gone
from ballast.torch.job.naming import Parameters, is_expert
from ballast.torch.job.opened import OpenJob
from ballast.torch.ranks.groups import Group
from ballast.torch.steps import background
from ballast.torch.steps.hooked import Hooked
from ballast.torch.tensors.host_memory import HostMemory, is_elsewhere
from ballast.torch.tensors.kinds import digest_of, is_sharded, local, versions_of
from ballast.torch.tensors.members import Member
from ballast.torch.tensors.memory import gradient_of, in_host


class _Sent(NamedTuple):
    """A unit's gradients. Nothing may change them until the step is over."""
    gradients: list[torch.Tensor]  # as autograd left them, in the order of the unit's tensors
    marks: list[_Mark]
    memory: list[torch.Tensor]  # the host's, which is being read
    session: _native.Session
    future: concurrent.futures.Future[None]


def _sum_of(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all elements' bits, as a tensor on their device. It adds whole words where it can, which is several times as fast.
    It sums bits, since NaN does not equal NaN, and some machines treat a denormal as zero."""
    elements = gradient.detach().reshape(-1).contiguous()
    size = elements.element_size()
    bits = {2: torch.int16, 4: torch.int32}[size]
    if elements.storage_offset() * size % 8 != 0:
        return elements.view(bits).sum()
    in_words = elements.numel() * size // 8 * 8 // size
    return elements[:in_words].view(torch.int64).sum() + elements[in_words:].view(bits).sum()


class _Mark:
    """Shows whether a gradient is as it was. It includes a sum, because GradScaler's unscale_ moves no version counter."""

    def __init__(self, gradient: torch.Tensor, debug: bool) -> None:
        self._versions = versions_of(gradient)
        self._sum = _sum_of(gradient)
        self._digest = digest_of(gradient) if debug else None

    def is_same(self, other: _Mark) -> bool:
        return self._versions == other._versions and self._digest == other._digest and torch.equal(self._sum, other._sum)


class Early(Feature):
    """Gradients of the next step that have gone to the servers. Threads: the training loop's, and autograd's while the loop waits for
    backward."""

    def __init__(self, debug: bool, is_busy: Callable[[], bool]) -> None:
        """is_busy(): returns whether a step is under way beside the loop."""
        self._debug, self._is_busy = debug, is_busy
        self._lock = threading.Lock()  # autograd has a thread per GPU
        self.session: _native.Session | None = None  # the one that gradients go to
        self._host: HostMemory | None = None
        self._background = background.Background()
        self._pushes = False
        self._hooked = Hooked(self)
        self._fired: list[int] = []  # by member: gradients accumulated since the last step
        self._usual: list[int] = []  # as many as the last step had
        self._most = 1  # of these
        # Units that some micro-batches leave out, as experts without tokens. Only the most of all members tells that no more comes.
        self._uneven: set[int] = set()
        self._overran: set[int] = set()  # units with a gradient behind the one that went, in this step
        self._sent: dict[int, _Sent] = {}  # by unit
        self._spoilt = False  # what went does not stand: all goes in the step, and nothing before it
        self._warned = False

    @property
    def is_hooked(self) -> bool:
        """Hooks of parameters tell of gradients."""
        return bool(self._hooked.hooks)

    def opening(self, parameters: Parameters, group: Group) -> None:
        if group.several:
            raise Error('push_early works with one rank alone: DistributedDataParallel reduces gradients after backward has made them, '
                        'and what clip_grad_norm_ does to DTensors of fully_shard moves no version counter. Leave push_early out',
                        'UNSUPPORTED')

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """Takes up the job's current session and members. If the call is not a step, takes back gradients that went."""
        if not for_step:
            self.withdraw()
        session, members, host = job.session, job.members, job.host
        if session is not self.session:
            self._forget()
            self.session, self._host = session, host
            self._pushes = session.pushes_gradients
        if not self._pushes:
            return  # they are read where they are
        if self._hooked.follow(session, members, lambda _: True):
            self._fired = [0] * len(members)
            self._usual += [1] * (len(members) - len(self._usual))
            self._uneven |= {unit for unit, tensors in enumerate(self._hooked.units) if any(is_expert(members[i].name) for i in tensors)}

    def accumulated(self, i: int) -> None:
        with self._lock:
            self._fired[i] += 1
            unit = self._hooked.unit_of[i]
            if unit in self._sent:
                self._spoilt = True  # there was more to come
                self._overran.add(unit)
            if not self._spoilt and all(self._fired[j] >= self._expected(j) for j in self._hooked.units[unit]):
                self._send(unit)

    def _expected(self, i: int) -> int:
        """How many gradients a member gets in this step, by index."""
        return self._most if self._hooked.unit_of[i] in self._uneven else self._usual[i]

    def _send(self, unit: int) -> None:
        members, session, host = [self._hooked.members[i] for i in self._hooked.units[unit]], self.session, self._host
        there = _whole_gradients(members)
        if there is None or session is None or host is None or any(member.is_assisted for member in members):
            return
        if self._is_busy() and any(is_elsewhere(gradient) for gradient in there):
            return  # the step under way may read their places in the host's memory
        memory = [in_host(host, member, 'gradient', gradient) for member, gradient in zip(members, there)]
        future = self._background.push(session, unit, memory, host.enqueued())
        gradients = [gradient for gradient in (member.parameter.grad for member in members) if gradient is not None]
        self._sent[unit] = _Sent(gradients, [_Mark(local(gradient), self._debug) for gradient in gradients], memory, session, future)

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        if registers or not self._stands(gradients):
            self.withdraw()

    def _stands(self, taken: Sequence[torch.Tensor | None]) -> bool:
        """Returns whether the gradients that a step takes, by member, are the ones that went. Waits for those that are on their way."""
        for unit, sent in self._sent.items():
            if self._spoilt:
                break
            try:
                background.wait(sent.future, sent.session)
            except Exception:
                self._spoilt = True  # the step sends it again, and tells what is wrong if it still is
            for i, gradient, mark in zip(self._hooked.units[unit], sent.gradients, sent.marks):
                member = self._hooked.members[i]
                if taken[i] is None:
                    self._spoilt = True  # it is in no group any more
                elif member.parameter.grad is not gradient or not _Mark(local(gradient), self._debug).is_same(mark):
                    self._spoilt = True
                    self._warn(member.name)
        return not self._spoilt

    def _warn(self, name: str) -> None:
        if not self._warned:
            warn(f"push_early: the gradient of parameter '{name}' was changed after backward had made it, so all gradients went twice. "
                 'Leave push_early out, or clip by max_norm= and scale by LossScaler, which change no gradient')
        self._warned = True

    def withdraw(self) -> None:
        """Makes servers forget what went, and sends nothing more before the next step."""
        session = self.session
        if not self._sent or session is None:
            return
        self._spoilt = True
        for sent in self._sent.values():
            background.settle([sent.future], sent.session)
        session.drop()
        self._sent = {}

    def zero_grad(self) -> None:
        """No step will take what went, since the next gradients are new ones."""
        self.withdraw()
        self._begin()

    @property
    def there(self) -> frozenset[int]:
        """Members whose gradients went, by index."""
        return frozenset(i for unit in self._sent for i in self._hooked.units[unit])

    def take(self) -> Gone:
        """Returns what went. It must stay in memory until the step is over."""
        self._usual = [fired or usual for fired, usual in zip(self._fired, self._usual)]
        most = max(self._fired, default=0) or self._most
        if most <= self._most:  # else a step has more micro-batches than before
            self._uneven |= self._overran
        self._most = most
        gone = Gone(self.there, self._sent)
        self._begin()
        return gone

    def _begin(self) -> None:
        self._sent = {}
        self._fired = [0] * len(self._hooked.members)
        self._overran = set()
        self._spoilt = False

    def _forget(self) -> None:
        """Forgets what another session had."""
        self._hooked.forget()
        self._usual, self._most, self._uneven = [], 1, set()
        self._begin()

    def left(self) -> None:
        """Forgets the session, and all that went to it."""
        self._forget()
        self.session = self._host = None
        self._pushes = False

    def closing(self) -> object:
        """Returns what went. The session may still read it, so it must stay until the session is closed, or a step or withdraw() has
        ended."""
        sent = self._sent
        self._forget()
        self._background.close()
        return sent


def _whole_gradients(members: Sequence[Member]) -> list[torch.Tensor] | None:
    """Returns their memory on this rank. None: one has no gradient, or the step will move or refuse it."""
    try:
        found = [gradient_of(member) for member in members]
    except Error:
        return None
    there = [gradient for gradient in found if gradient is not None and not is_sharded(gradient)]
    return there if len(there) == len(members) else None
