"""Sends gradients to the servers in backward, and frees them in the trainer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Sequence

import torch

from ballast import _native
from ballast.errors import Error
from ballast.torch.job.features import Feature
from ballast.torch.job.opened import OpenJob
from ballast.torch.sharding.memory import Memory
from ballast.torch.steps import background
from ballast.torch.steps.hooked import Hooked
from ballast.torch.tensors.host_memory import current_streams, is_elsewhere
from ballast.torch.tensors.kinds import digest_of, is_sharded, local, on_host
from ballast.torch.tensors.members import Member
from ballast.torch.tensors.memory import gradient_of
from ballast.torch.tensors.remote import GoneGradient, Remote, gone_of, named, part_of
from ballast.torch.tensors.sketch import sketch

# How many units' gradients are on their way from a GPU at one time. Backward waits for the older ones.
_UNDER_WAY_MAX = 2


class Pushes(Feature):
    """Sends a unit of the session as soon as each of its trained tensors has its gradient. max_norm works, since the servers clip.
    COLLECTIVE without a message: FSDP2 reduces in the same order on all ranks. Threads: the loop's and autograd's, one at a time."""

    def __init__(self, backwards: int, memory: Memory) -> None:
        """backwards: how many reductions of a gradient make a step. memory: for gradients of a GPU on their way."""
        self._backwards, self._memory = backwards, memory
        self._background = background.Background()
        self._session: _native.Session | None = None
        self._job: weakref.ref[OpenJob] | None = None
        self._hooked = Hooked(self)
        self._came: dict[int, int] = {}  # by member: reductions since the last step
        self._made: dict[int, torch.cuda.Event] = {}  # by member: behind its last reduction
        self._gone: dict[int, concurrent.futures.Future[None]] = {}  # units, the oldest first

    def opened(self, job: OpenJob, for_step: bool) -> None:
        """Takes up the job's current session and members."""
        session, members = job.session, job.members
        if session is not self._session:
            self.left()
            self._session, self._job = session, weakref.ref(job)
        self._hooked.follow(session, members, lambda member: part_of(member.parameter) is not None)

    @property
    def _sent_to(self) -> _native.Session:
        """The session that gradients went to."""
        if self._session is None:
            raise Error('the session that gradients went to is over', 'BAD_REQUEST')
        return self._session

    @property
    def _there(self) -> OpenJob:
        """The open job, in which backward passes run."""
        job = None if self._job is None else self._job()
        if job is None:
            raise Error('the job that gradients go to is not open', 'BAD_REQUEST')
        return job

    def left(self) -> None:
        """Forgets the session, and all that went to it."""
        self._settle()
        self._background.close()
        self._hooked.forget()
        self._session = None
        self._begin()

    def accumulated(self, i: int) -> None:
        """FSDP2 has reduced a gradient of a member, by index, and added it to what was there."""
        unit = self._hooked.unit_of[i]
        if unit in self._gone or self._is_let_go():
            self.discard()
        self._came[i] = self._came.get(i, 0) + 1
        gradient = self._hooked.members[i].parameter.grad
        if gradient is not None and gradient.is_cuda:
            self._made[i] = torch.cuda.current_stream(gradient.device).record_event()
        if self._is_due(self._hooked.units[unit]):
            self._send(unit, self._hooked.units[unit])

    def _is_let_go(self) -> bool:
        """The loop has set to None all gradients that went, and starts over."""
        return bool(self._gone) and all(self._hooked.members[j].parameter.grad is None for j in self._went())

    def _is_due(self, tensors: list[int]) -> bool:
        """Each trained tensor of a unit has its gradient. A unit with a tied tensor is never due, since stages sum its gradient at the
        step; nor one whose updates the trainer computes then."""
        members, tied = self._hooked.members, self._there.parameters.tied
        return not any(members[j].name in tied or members[j].is_assisted for j in tensors) and all(
            j in self._hooked.hooks and self._came.get(j, 0) >= self._backwards for j in tensors if members[j].parameter.requires_grad)

    def _send(self, unit: int, tensors: list[int]) -> None:
        members = [self._hooked.members[j] for j in tensors]
        gradients = [gradient_of(member) for member in members]
        if any(gone_of(gradient) is not None for gradient in gradients):
            return
        self._gone[unit] = self._push(unit, gradients)
        job = self._there
        for j, member, gradient in zip(tensors, members, gradients):
            if gradient is not None:
                _replace(member, gradient, len(job.roster.replicas[j]) > 1 and member.is_due(job.progress.steps, job.parameters.debug))

    def _push(self, unit: int, gradients: list[torch.Tensor | None]) -> concurrent.futures.Future[None]:
        """Pushes a unit. An error is kept for the step: if this raised it within backward, other ranks would wait in theirs."""
        there = [gradient for gradient in gradients if gradient is not None]
        earlier = list(self._gone.values())[:1 - _UNDER_WAY_MAX]
        try:
            if not any(is_elsewhere(gradient) for gradient in there):
                memory = [None if gradient is None else on_host(gradient) for gradient in gradients]
                self._sent_to.push_early(unit, memory, let_go=True)
                return _over()
            concurrent.futures.wait(earlier)
            copies = iter(self._copied(unit, [local(gradient).detach() for gradient in there]))
            memory = [None if gradient is None else next(copies) for gradient in gradients]
            copied = [stream.record_event(torch.cuda.Event(blocking=True)) for stream in current_streams(there)]
            return self._background.push(self._sent_to, unit, memory, copied, let_go=True)
        except Exception as error:
            return _over(error)

    def _copied(self, unit: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies on the host, which are enqueued on the current stream, behind the streams that made the gradients."""
        is_cuda = any(gradient.is_cuda for gradient in gradients)
        for j in self._hooked.units[unit]:
            if j in self._made:
                torch.cuda.current_stream(gradients[0].device).wait_event(self._made.pop(j))
        places = self._memory.take_alike(gradients, is_cuda)
        for place, gradient in zip(places, gradients):
            place.copy_(gradient, non_blocking=True)
            if gradient.is_cuda:
                gradient.record_stream(torch.cuda.current_stream(gradient.device))  # the trainer may let go of it now
        return places

    def _wait(self) -> None:
        """Waits until all pushes are over. Raises the first error, and then cancels the others."""
        try:
            for future in self._gone.values():
                background.wait(future, self._sent_to)
        except Exception as error:
            self._background.close()
            if isinstance(error, Error):
                raise
            raise Error(f'gradients did not come to the host: {error}. Call zero_grad() of the optimizer, then run forward and backward '
                        'again, on all ranks', 'IO') from error

    def _settle(self) -> None:
        """Waits until all pushes are over, and ignores their errors."""
        if self._session is not None:
            background.settle(self._gone.values(), self._session)

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
        return [i for unit in sorted(self._gone) for i in self._hooked.units[unit] if i in self._came]

    def check(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Refuses a step with these gradients, by member, unless they are those that went, or all that went are set to None."""
        went = self._went()
        if went and all(gradients[i] is None for i in went):
            return  # settle() drops them
        self._wait()
        for i, (member, gradient) in enumerate(zip(self._hooked.members, gradients)):
            gone = gone_of(gradient) is not None
            if gone and i not in went:
                raise Error(f"the gradient of parameter '{member.name}' went to the servers for a step that was not made; run forward and "
                            'backward again', 'BAD_REQUEST')
            if i in went and not gone:
                raise Error(f"the gradient of parameter '{member.name}' was changed after it had gone to the servers; "
                            'keep gradients in the trainer by shard(push_early=False)', 'BAD_REQUEST')

    def settle(self, gradients: Sequence[torch.Tensor | None], registers: bool) -> None:
        """A step begins with gradients that check() has passed. COLLECTIVE if all that went were set to None."""
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
    """Puts a Remote in the place of the gradient, so that whoever needs the gradient gets an error. compares: replicas compare it at the
    step."""
    grad = member.parameter.grad
    if not is_sharded(grad):
        return
    told = (digest_of(gradient), sketch(gradient)) if compares else (None, None)
    gone = Remote(GoneGradient(member.name, *told), local(grad).shape, grad.dtype, grad.device)
    member.parameter.grad = named(type(grad).from_local(gone, grad.device_mesh, grad.placements, run_check=False, shape=grad.shape,
                                                        stride=grad.stride()))


def _over(error: Exception | None = None) -> concurrent.futures.Future[None]:
    """Returns a push that is over, or has failed."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future
