"""How an optimizer reaches its servers: named ones, a private one that several ranks share, or one inside this process that its optimizers
share."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ballast import _native, embedded, place
from ballast.errors import Error
from ballast.torch import arguments
from ballast.torch.job import private_server
from ballast.torch.ranks import hosts
from ballast.torch.ranks.groups import Exchange, Group
from ballast.torch.ranks.together import alike, together

if TYPE_CHECKING:
    from ballast.torch.agreement.roster import Roster
    from ballast.torch.job.fit import Fit
    from ballast.torch.job.private_server import PrivateServer
    from ballast.torch.tensors.members import Member


class Holder(Protocol):
    """Holds parameters that are the masters of a job on this process's server. A Job is one."""

    @property
    def members(self) -> Sequence[Member]: ...
    def wait(self) -> None: ...


class Connection:
    """`servers`: a list, 'host:port,...', or None for BALLAST_SERVERS. `budgets`: arguments of embedded.server(). `access`: tls and
    token_file of arguments.access(). `host`: see hosts.check(). `holder`: has the parameters, and this object."""

    def __init__(self, servers: str | Sequence[str] | None, budgets: dict[str, Any], access: dict[str, Any], host: str | None,
                 holder: Holder) -> None:
        self._holder = weakref.ref(holder)
        if host is not None:
            hosts.check(host)
        self._host = host
        self._apart: str | None = None  # the folder of a model whose parameters live on the servers
        self._servers = arguments.addresses(servers)
        self._access = arguments.access(**access, servers=self._servers)
        given = [key for key, value in budgets.items() if value is not None]
        if self._servers and given:
            raise Error(f'servers and {", ".join(given)}: named servers have budgets and directories of their own; give one or the other',
                        'BAD_CONFIG')
        self._budgets = {**budgets, 'directory': place.parse_directory(budgets['directory'])}
        self._use: embedded.Use | None = None  # of the embedded server
        self._private: PrivateServer | None = None
        self._found = False  # the job was there before
        self.was_used = False  # the job was open in another optimizer of this process
        self._pid = os.getpid()
        self._finish: weakref.finalize[..., Connection] | None = None

    def default_durability(self, group: Group, apart: bool) -> str:
        """group, apart: as open()'s."""
        shares = not group.several and not apart and embedded.directory_in_use() is not None
        stays = self._budgets['directory'] is not None or shares
        return 'step' if self._servers or stays else 'none'

    def shares_process(self, group: Group) -> bool:
        """A job whose parameters are in the trainer is, or will be, on a server inside this process that keeps no parameters."""
        return not self._servers and not group.several and not embedded.keeps_parameters(self._budgets['directory'])

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Error('this process was forked from the one that made the optimizer; make the optimizer after the fork', 'UNSUPPORTED')
        if self._use is not None and self._use.is_over:
            raise Error('the state server inside this process has ended, as it does when the process exits; use the optimizer before that',
                        'SERVER_DOWN')

    def lives_apart(self) -> None:
        """The model's parameters will live on the servers, by shard()."""
        self._apart = self._budgets['directory']
        embedded.want_apart(self, self._apart)

    def open(self, group: Group, options: _native.OpenOptions, look: Callable[[], Fit], entries: Callable[[], list[tuple[str, str]]],
             apart: bool) -> tuple[_native.Session, Fit, Roster]:
        """Returns the session, the tensors that the job has, and those of all ranks of the group. Starts a server if none is named. look()
        returns a Fit. If it raises, all ranks get its error before they ask any server. entries(): more that ranks must have alike. apart:
        the trainer has no parameters, so the server keeps them."""
        private, self.was_used = None, False
        embed: contextlib.AbstractContextManager[embedded.Use | None] = contextlib.nullcontext()
        options.rank, options.world_size = group.rank, group.world_size
        options.servers, options.access = self._servers, self._access
        timeout, option = max((options.step_timeout, 'step_timeout'), (options.open_timeout, 'open_timeout'))
        exchange = group.exchange('the opening of a job', timeout, option)
        fit = alike(exchange, look, lambda _: [*self._entries(options), *entries()])
        roster = fit.agree(exchange)
        if group.several:
            places = hosts.meet(group, exchange, self._host)
            options.host = places[group.rank].address
            if not self._servers:
                private = private_server.start(group, exchange, places, self._budgets, options.step_timeout)
                options.servers = [private.address]
        elif not self._servers:
            embed = embedded.opening(options.job, options.durability != 'none', apart, **self._budgets)
        with embed as local:
            try:
                self.was_used = local is not None and local.was_used
                session, roster = self._open_session(group, options, fit, roster, None if local is None else local.server, exchange)
            except BaseException:
                if private is not None:
                    private.end()
                raise
            self._finish = weakref.finalize(self, _finish, session, local, private, self._pid)
            self._use, self._private = local, private
        self._found = session.version >= 0
        return session, fit, roster

    def what_is_left(self, options: _native.OpenOptions) -> str:
        """Tells the user, in a sentence, what is left of the job once its session has ended."""
        again = f"make a new optimizer with name='{options.job}' and resume='auto', which continues from there"
        if options.durability != 'none':
            return f'The servers have the job on disk: {again}'
        if self._servers:
            return f'The servers keep the job in memory while they run: {again}'
        if self._use is not None:
            kept = ('The server in this process keeps the job in memory until this optimizer is closed or collected. Until then, '
                    f'{again}. After that the job is gone, and parameters stay as they are')
            if options.optimizer.master != 'lent':
                return kept
            return (f'{kept}. If the new optimizer is refused with STATE_LOST, a step was prepared but not decided: the job is lost, and '
                    'parameters are as before that step. Drop the job (ballast.drop), or take another name')
        return ('The job was in the memory of its private server, which ended with the session. Parameters stay as they are, and a new '
                'optimizer begins with moments of zero. A job with a directory or named servers outlives its session')

    def _entries(self, options: _native.OpenOptions) -> list[tuple[str, str]]:
        servers = f'one of {len(self._servers)}' if self._servers else 'none'
        return [("the job's name", repr(options.job)), ('the list of servers', servers)]

    def _open_session(self, group: Group, options: _native.OpenOptions, fit: Fit, roster: Roster, within: _native.Server | None,
                      exchange: Exchange) -> tuple[_native.Session, Roster]:
        """within: this process's server. None: options name other servers."""
        while True:
            store = group.store(f"open/{group.count('open')}") if group.several else None
            try:
                return _native.Session.open(options, fit.tensors, within, store), roster
            except Error as error:
                if error.reason != 'TENSORS_DIFFER':
                    raise
                refused = error
            # All ranks get the same error, except for words in front of it and for what is frozen.
            together(exchange, functools.partial(fit.follow, refused))
            roster = fit.agree(exchange)

    def hold_masters(self) -> None:
        """From now on the parameters here are the masters of the job on this process's server."""
        if self._use is not None:
            self._use.masters = self._holder

    @property
    def masters_holder(self) -> Holder | None:
        """The last one that called hold_masters(), while it lives."""
        masters = None if self._use is None else self._use.masters
        return None if masters is None else masters()

    def close(self) -> None:
        """Ends the session. Rank 0 of a private server waits until the other ranks have ended theirs, see PrivateServer."""
        embedded.want(self, None)
        embedded.want_apart(self, None)
        finish, self._finish, self._use = self._finish, None, None
        private, self._private = self._private, None
        if finish is not None:
            finish()
        if private is not None:
            private.wait()

    def leave(self) -> None:
        """Closes as if the job had not been opened. A job that existed before stays."""
        if self._use is not None:
            self._use.leaves_job = self._found
        self.close()
        embedded.want(self, self._budgets['directory'])
        embedded.want_apart(self, self._apart)


def _finish(session: _native.Session, local: embedded.Use | None, private: PrivateServer | None, pid: int) -> None:
    if os.getpid() != pid:
        return
    session.close()
    if local is not None:
        local.end()
    if private is not None:
        private.leave()
