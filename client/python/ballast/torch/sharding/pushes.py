"""Gradients that go to the servers in backward, and leave the trainer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.job.features import Feature
from ballast.torch.job.opened import OpenJob
from ballast.torch.modes import plainly
from ballast.torch.sharding.memory import Memory
from ballast.torch.steps import background
from ballast.torch.tensors.host_memory import current_streams, is_elsewhere
from ballast.torch.tensors.kinds import digest_of, is_sharded, local, on_host
from ballast.torch.tensors.members import Member
from ballast.torch.tensors.memory import gradient_of
from ballast.torch.tensors.remote import GoneGradient, Remote, gone_of, named, part_of
from ballast.torch.tensors.sketch import sketch

# Units whose gradients are on their way from a GPU at one time: backward waits for the older ones.
_UNDER_WAY_MAX = 2


class Pushes(Feature):
    """A unit of the session goes as soon as each of its trained tensors has its gradient. Gradients clipped by max_norm are right that
    way, since the servers clip. COLLECTIVE without a message: FSDP2 reduces in one order on all ranks. Threads: the loop's and
    autograd's, one at a time."""

    def __init__(self, backwards: int, memory: Memory) -> None:
        """backwards: reductions of a gradient that make a step's. memory: for gradients of a GPU on their way."""
        self._backwards, self._memory = backwards, memory
        self._background: background.Background | None = None
        self._session: _native.Session | None = None
        self._job: weakref.ref[OpenJob] | None = None
        self._members: list[Member] = []
        self._units: list[list[int]] = []  # members, by index
        self._unit_of: dict[int, int] = {}
        self._hooks: dict[int, Any] = {}  # by member
        self._came: dict[int, int] = {}  # by member: reductions since the last step
        self._made: dict[int, torch.cuda.Event] = {}  # by member: behind its last reduction
        self._gone: dict[int, concurrent.futures.Future[None]] = {}  # units, the oldest first

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """Takes up the session and members that the job has now."""
        session, members = job.session, job.members
        if session is not self._session:
            self.left()
            self._session, self._job = session, weakref.ref(job)
        if len(members) > len(self._members):
            self._members, self._units = list(members), session.units
            self._unit_of = {i: unit for unit, tensors in enumerate(self._units) for i in tensors}
        for i, member in enumerate(members):
            if i not in self._hooks and member.parameter.requires_grad and part_of(member.parameter) is not None:
                self._hooks[i] = member.parameter.register_post_accumulate_grad_hook(_Hook(self, i))

    @property
    def _sent_to(self) -> _native.Session:
        """The session that gradients went to."""
        if self._session is None:
            raise Error('the session that gradients went to is over', 'BAD_REQUEST')
        return self._session

    @property
    def _there(self) -> OpenJob:
        """The open job: backward passes are within it."""
        job = None if self._job is None else self._job()
        if job is None:
            raise Error('the job that gradients go to is not open', 'BAD_REQUEST')
        return job

    def left(self) -> None:
        """With all that went to the session."""
        self._settle()
        self._end_background()
        for hook in self._hooks.values():
            hook.remove()
        self._session, self._members, self._units, self._unit_of, self._hooks = None, [], [], {}, {}
        self._begin()

    def accumulated(self, i: int) -> None:
        """FSDP2 has reduced a gradient of a member, by index, and added it to what was there."""
        unit = self._unit_of[i]
        # The loop has set the gradients to None, and begins anew.
        if unit in self._gone or (self._gone and all(self._members[j].parameter.grad is None for j in self._went())):
            self.discard()
        self._came[i] = self._came.get(i, 0) + 1
        gradient = self._members[i].parameter.grad
        if gradient is not None and gradient.is_cuda:
            self._made[i] = torch.cuda.current_stream(gradient.device).record_event()
        tensors = self._units[unit]
        wanted = [j for j in tensors if self._members[j].parameter.requires_grad]
        tied = self._there.parameters.tied
        if any(self._members[j].name in tied for j in tensors):
            return  # stages sum their gradients at the step
        if all(j in self._hooks and self._came.get(j, 0) >= self._backwards for j in wanted):
            self._send(unit, tensors)

    def _send(self, unit: int, tensors: list[int]) -> None:
        members = [self._members[j] for j in tensors]
        gradients = [gradient_of(member) for member in members]
        if any(gone_of(gradient) is not None for gradient in gradients):
            return
        self._gone[unit] = self._push(unit, gradients)
        job = self._there
        for j, member, gradient in zip(tensors, members, gradients):
            if gradient is not None:
                _replace(member, gradient, len(job.roster.replicas[j]) > 1 and member.is_due(job.progress.steps, job.parameters.debug))

    def _push(self, unit: int, gradients: list[torch.Tensor | None]) -> concurrent.futures.Future[None]:
        """What fails is the step's error: raised here, within backward, it would leave other ranks waiting in theirs."""
        there = [gradient for gradient in gradients if gradient is not None]
        earlier = list(self._gone.values())[:1 - _UNDER_WAY_MAX]
        try:
            if not any(is_elsewhere(gradient) for gradient in there):
                memory = [None if gradient is None else on_host(gradient) for gradient in gradients]
                self._sent_to.push_early(unit, memory, let_go=True)
                return _over()
            concurrent.futures.wait(earlier)
            if self._background is None:
                self._background = background.Background()
            copies = iter(self._copied(unit, [local(gradient).detach() for gradient in there]))
            memory = [None if gradient is None else next(copies) for gradient in gradients]
            copied = [stream.record_event(torch.cuda.Event(blocking=True)) for stream in current_streams(there)]
            return self._background.push(self._sent_to, unit, memory, copied, let_go=True)
        except Exception as error:
            return _over(error)

    def _copied(self, unit: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host, enqueued on the current stream, behind the streams that made the gradients."""
        is_cuda = any(gradient.is_cuda for gradient in gradients)
        for j in self._units[unit]:
            if j in self._made:
                torch.cuda.current_stream(gradients[0].device).wait_event(self._made.pop(j))
        places = self._memory.take_alike(gradients, is_cuda)
        for place, gradient in zip(places, gradients):
            place.copy_(gradient, non_blocking=True)
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream(gradient.device))  # the trainer may let go of it now
        return places

    def _wait(self) -> None:
        """Until all pushes are over. Errors: the first of theirs, after which no thread goes on with others."""
        try:
            for future in self._gone.values():
                background.wait(future, self._sent_to)
        except Exception as error:
            self._end_background()
            if isinstance(error, Error):
                raise
            raise Error(f'gradients did not come to the host: {error}; call zero_grad() of the optimizer, and run forward and backward '
                        'again, on all ranks', 'IO') from error

    def _settle(self) -> None:
        """Until all pushes are over, whatever becomes of them."""
        for future in self._gone.values():
            with contextlib.suppress(Exception):
                background.wait(future, self._sent_to)

    def _end_background(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None

    def discard(self) -> None:
        self._settle()
        if self._gone:
            self._sent_to.drop()
        self._begin()

    def zero_grad(self) -> None:
        self.discard()

    @property
    def went(self) -> bool:
        return bool(self._gone)

    def _begin(self) -> None:
        self._gone, self._came, self._made = {}, {}, {}

    def _went(self) -> list[int]:
        """Members, by index, whose gradients went."""
        return [i for unit in sorted(self._gone) for i in self._units[unit] if i in self._came]

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuses a step with these gradients, by member, that are neither those that went nor, all of those that went, set to None."""
        went = self._went()
        if went and all(gradients[i] is None for i in went):
            return  # settle() drops them
        self._wait()
        for i, gradient in enumerate(gradients):
            gone = gone_of(gradient) is not None
            if gone and i not in went:
                raise Error(f"the gradient of parameter '{self._members[i].name}' went to the servers for a step that was not made: run "
                            'forward and backward again', 'BAD_REQUEST')
            if i in went and not gone:
                raise Error(f"the gradient of parameter '{self._members[i].name}' was changed after it had gone to the servers; "
                            'keep gradients in the trainer by shard(push_early=False)', 'BAD_REQUEST')

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        """A step begins with gradients that check() has passed. COLLECTIVE where all that went were set to None."""
        went = self._went()
        if went and all(gradients[i] is None for i in went):
            self.discard()

    def stepped(self) -> None:
        """A step is over: the servers have taken what went, or dropped it."""
        self._settle()
        self._begin()

    def failed(self, attempt: int | None = None) -> None:
        self._settle()
        if self._gone:
            with contextlib.suppress(Error):  # the session is over
                if self._sent_to.attempt == attempt:
                    self._sent_to.drop()
        self._begin()


def _replace(member: Member, gradient: torch.Tensor, compares: bool) -> None:
    """The gradient leaves the trainer: a Remote stays in its place, so that whoever wants it gets an error and not silence. compares:
    replicas compare it at the step."""
    grad = member.parameter.grad
    if not is_sharded(grad):
        return
    told = (digest_of(gradient), sketch(gradient)) if compares else (None, None)
    gone = Remote(GoneGradient(member.name, *told), local(grad).shape, grad.dtype, grad.device)
    member.parameter.grad = named(type(grad).from_local(gone, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape,
                                                        stride=grad.stride()))


def _over(error: Exception | None = None) -> concurrent.futures.Future[None]:
    """A push that is over, or has failed."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


class _Hook:
    def __init__(self, pushes: Pushes, i: int) -> None:
        self._pushes, self._i = weakref.ref(pushes), i

    @plainly
    def __call__(self, parameter: torch.Tensor) -> None:
        pushes = self._pushes()
        if pushes is not None:
            with torch.no_grad():
                pushes.accumulated(self._i)
