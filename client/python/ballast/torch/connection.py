"""How an optimizer reaches its servers: named ones, a private one of several ranks, or one inside this process."""

import contextlib
import os
import re
import weakref

from ballast import _native, embedded
from ballast.errors import Error
from ballast.torch import ranks


# What Open says of a job that has a tensor which is frozen here, and of one that has not got a tensor yet.
_MISSING = re.compile(r"the job has tensor '(.*?)' \(.*which this session does not name", re.S)
_UNKNOWN = re.compile(r"tensor '(.*?)' is not in the job; open with", re.S)


class Connection:
    """`servers`: a list, 'host:port,...', or None for BALLAST_SERVERS. `budgets`: arguments of embedded.server()."""

    def __init__(self, servers, budgets):
        if servers is None:
            servers = os.environ.get('BALLAST_SERVERS')
        if isinstance(servers, str):
            servers = [server.strip() for server in servers.split(',') if server.strip()]
        self._servers = list(servers or [])
        given = [key for key, value in budgets.items() if value is not None]
        if self._servers and given:
            raise Error(f'servers and {", ".join(given)}: budgets and directories of state servers are their own; '
                        'give one or the other', 'BAD_CONFIG')
        self._budgets = budgets
        self._pid = os.getpid()
        self._finish = None

    @property
    def default_durability(self):
        stays = self._budgets['directory'] is not None or (not ranks.active() and embedded.directory() is not None)
        return 'step' if self._servers or stays else 'none'

    def check_process(self):
        if os.getpid() != self._pid:
            raise Error('this process was forked from the one that made the optimizer; make it after the fork',
                        'UNSUPPORTED')

    def open(self, options, fit):
        """The session; all ranks. Starts a server where none is named. `fit`: a registration.Fit, of the tensors that the job has."""
        daemon = store = None
        embed = contextlib.nullcontext()
        options.rank, options.world_size, options.servers = ranks.rank(), ranks.world_size(), self._servers
        if ranks.active():
            store = ranks.Store()
            options.host = ranks.own_address()
            if not self._servers:
                address, daemon = ranks.start_private_server(store, self._budgets, options.open_timeout)
                options.servers = [address]
        elif not self._servers:
            embed = embedded.opening(options.job, options.durability != 'none', **self._budgets)
        with embed as local:
            try:
                session = self._open_session(options, fit, local, store)
            except BaseException:
                if daemon is not None:
                    daemon.stop()
                raise
            self._finish = weakref.finalize(self, _finish, session, local, daemon, self._pid)
        return session

    @staticmethod
    def _open_session(options, fit, local, store):
        while True:
            try:
                return _native.Session.open(options, fit.tensors, None if local is None else local.server, store)
            except Error as error:
                missing, unknown = _MISSING.search(str(error)), _UNKNOWN.search(str(error))
                if not (missing and fit.add(missing[1]) or unknown and fit.leave_out(unknown[1])):
                    raise
                store = None if store is None else ranks.Store()

    def close(self):
        if self._finish is not None:
            self._finish()
            self._finish = None


def _finish(session, local, daemon, pid):
    if os.getpid() != pid:
        return
    session.close()
    if local is not None:
        local.end()
    if daemon is not None:
        daemon.stop()
