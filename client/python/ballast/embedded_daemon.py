"""A private ballastd for several ranks of one host that name no servers. Rank 0 starts and ends it."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import threading
import weakref
from collections.abc import Callable
from typing import IO, TypeVar

from ballast import place, programs, temporary
from ballast.errors import Error

_END_SECONDS = 20

Result = TypeVar('Result')


def _on_lasting_thread(start: Callable[[], Result]) -> Result:
    """Runs start() on a thread that lasts as long as this process. Linux tells a child (--end-with) that its parent has ended when the
    thread that started the child ends."""
    started: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        else:
            threading.Event().wait()
    threading.Thread(target=run, name='ballastd-parent', daemon=True).start()
    return started.result()


class Daemon:
    """A ballastd that ends with this process, however this process ends. address: 'host:port'."""

    def __init__(self, directory: str | os.PathLike[str] | None, dram: int | str | None, nvme: int | str | None,
                 threads: int | None) -> None:
        self.pid = os.getpid()
        binary = programs.path('ballastd')
        self.place = place.make(directory, dram, nvme)
        command = [binary, '--end-with', str(self.pid), '--listen', '127.0.0.1:0', '--metrics_listen', '127.0.0.1:0',
                   '--data_directory', self.place.directory, '--budget.dram', str(self.place.dram), '--budget.nvme',
                   str(self.place.nvme), '--log_level', 'warn', '--compute_threads', str(threads or place.processors())]
        environment = {key: value for key, value in os.environ.items() if not key.startswith('BALLAST_')}
        self.process = _on_lasting_thread(lambda: subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True,
                                                                   start_new_session=True))  # Ctrl-C is for the ranks, which end it
        self._exit = weakref.finalize(self, self.stop)  # keeps this object; those that are newer run before
        line = self._output.readline()
        ready = re.search(r'ready listen=(\S+)', line)
        if ready is None:
            said = (line + self._output.read()).strip().removeprefix('ballastd failed: ')
            code = self.process.wait()
            self.stop()
            how = f'exit code {code}' if code >= 0 else f'signal {-code}'
            raise Error(f'the private ballastd ended with {how} before it was ready: {said or "it gave no reason"}', 'SERVER_DOWN')
        self.address = ready[1]

    @property
    def _output(self) -> IO[str]:
        if self.process.stdout is None:
            raise ValueError('ballastd was started without a pipe')
        return self.process.stdout

    def stop(self) -> None:
        if os.getpid() != self.pid:
            return
        self._exit.detach()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()
        if self.place.is_temporary:
            temporary.remove(self.place.directory)
