"""The ranks that train one job: torch.distributed's default group, if there is one."""

import base64
import collections
import datetime
import itertools
import os
import socket

import torch.distributed as dist

from ballast.errors import Error

_opens = itertools.count()  # the same on all ranks, which open their jobs in one order
_agreements = collections.Counter()  # by what they were about; the same on all ranks, which come to each


class Store:
    """torch.distributed's store as the native module wants it, under keys of its own."""

    def __init__(self, place=None):
        place = f'open/{next(_opens)}' if place is None else place
        self._store = dist.PrefixStore(f'ballast/{place}', dist.distributed_c10d._get_default_store())

    def set(self, key, value):
        self._store.set(key, base64.b64encode(value).decode())

    def get(self, key, seconds):
        self._store.wait([key], datetime.timedelta(seconds=seconds))
        return base64.b64decode(self._store.get(key))

    def decide(self, proposed):
        """What the first one proposed; '' asks."""
        return self._store.compare_set('decided', '', proposed).decode()


def active():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def exchange(what, mine, timeout, option='step_timeout'):
    """All ranks' bytes, in rank order: where no session is open yet, or the ranks may not all come. Either all ranks get them, or
    those that come get an error, however late they are. option: whose seconds they are."""
    if not active():
        return [mine]
    store = Store(f'{what}/{_agreements[what]}')
    _agreements[what] += 1
    store.set(f'said/{rank()}', mine)
    said, missing = [], None
    for r in range(world_size()):
        try:
            said.append(store.get(f'said/{r}', timeout))
        except RuntimeError:  # dist.DistStoreError
            missing = r
            break
    # Who found all, and who gave up: the first of them decides.
    if store.decide('all' if missing is None else f'{rank()} {missing}') == 'all':
        return said if missing is None else [store.get(f'said/{r}', timeout) for r in range(world_size())]
    waited, missing = map(int, store.decide('').split())
    raise Error(f'{what}: rank {waited} waited {timeout:g} s ({option}) for rank {missing}; expected all ranks to come to it, '
                'the same number of times', 'RANK_MISSING')


def rank():
    return dist.get_rank() if active() else 0


def world_size():
    return dist.get_world_size() if active() else 1


def own_address():
    """Where the other ranks reach this one: the address that it has towards the master."""
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 1))
            return probe.getsockname()[0]
        except OSError:
            return '127.0.0.1'
