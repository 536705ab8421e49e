"""Sends gradients to the servers once their copies from a device have ended."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterable, Sequence

import torch

from ballast import _native

_GRACE_SECONDS = 2.0


class Background:
    """A thread that waits for copies and pushes, in the order of push(). Threads: one at a time."""

    def __init__(self) -> None:
        self._device: int | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def push(self, session: _native.Session, unit: int, memory: Sequence[torch.Tensor | None], copied: Sequence[torch.cuda.Event],
             let_go: bool = False) -> concurrent.futures.Future[None]:
        """Pushes a unit once the events `copied` are over. memory: the host's. It may be used again when the future is done, or with let_go
        when the session has let go of it."""
        if self._pool is None:
            self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._pool = concurrent.futures.ThreadPoolExecutor(1, 'ballast-push')
        return self._pool.submit(_push, self._device, session, unit, memory, copied, let_go)

    def close(self) -> None:
        """Cancels pushes that have not begun."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _push(device: int | None, session: _native.Session, unit: int, memory: Sequence[torch.Tensor | None],
          copied: Sequence[torch.cuda.Event], let_go: bool) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a thread that chooses none is on GPU 0, and makes a context there
    for event in copied:
        event.synchronize()
    session.push_early(unit, memory, let_go=let_go)


def wait(future: concurrent.futures.Future[None], session: _native.Session) -> None:
    """Waits as a call of the session does. Ctrl-C gives the push two seconds, then ends the session; if the server is in this process, only
    a second Ctrl-C does. Errors: the push's."""
    try:
        future.result()
    except KeyboardInterrupt:
        if not concurrent.futures.wait([future], _GRACE_SECONDS).done:
            session.interrupt()
        raise


def settle(futures: Iterable[concurrent.futures.Future[None]], session: _native.Session) -> None:
    """Waits for all, and ignores their errors."""
    for future in futures:
        with contextlib.suppress(Exception):
            wait(future, session)
