"""Gradients that go to the servers once the copies of them from a device are over."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import torch

from ballast import _native

_GRACE_SECONDS = 2.0


class Background:
    """A thread that waits for copies and pushes, in the order of push(). Threads: one at a time."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, 'ballast-push')

    def push(self, session: _native.Session, unit: int, memory: Sequence[torch.Tensor | None], copied: Sequence[torch.cuda.Event],
             let_go: bool = False) -> concurrent.futures.Future[None]:
        """memory: the host's, filled once `copied` are over; it may be used again when the future is, or with let_go when the session has
        let go of it."""
        return self._pool.submit(_push, self._device, session, unit, memory, copied, let_go)

    def close(self) -> None:
        """Pushes that have not begun do not."""
        self._pool.shutdown(cancel_futures=True)


def _push(device: int | None, session: _native.Session, unit: int, memory: Sequence[torch.Tensor | None],
          copied: Sequence[torch.cuda.Event], let_go: bool) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a thread that chooses none is on GPU 0, and makes a context there
    for event in copied:
        event.synchronize()
    session.push_early(unit, memory, let_go=let_go)


def wait(future: concurrent.futures.Future[None], session: _native.Session) -> None:
    """Waits as a call of the session does: Ctrl-C leaves it two seconds, then ends the session; if its
    server is in this process, a second one does. Errors: the push's."""
    try:
        future.result()
    except KeyboardInterrupt:
        if not concurrent.futures.wait([future], _GRACE_SECONDS).done:
            session.interrupt()
        raise
