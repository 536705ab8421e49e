"""Where ranks are: the address at which the others reach each of them, and which of them share a host.

A rank takes its address from the first of these: host=, BALLAST_HOST, the interface GLOO_SOCKET_IFNAME, and the address that this machine
uses to reach the process group's store. If the store is a file, it is the address of the machine's own name. Ranks of other hosts cannot
reach a loopback address. A rank that was told no address then takes the one that it uses to reach a rank elsewhere; if there is none, an
error tells all ranks what to set."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import ipaddress
import json
import os
import socket
import struct
from typing import Any, NamedTuple

from ballast.errors import Error, warn
from ballast.torch.ranks.groups import Exchange, Group
from ballast.torch.ranks.together import everyone

_SIOCGIFADDR = 0x8915  # netdevice(7)
_SET = ('set host= of the optimizer, or BALLAST_HOST, to an address by which other hosts reach this rank, or GLOO_SOCKET_IFNAME to the '
        'interface that has it')


class Place(NamedTuple):
    """What a rank tells the others about where it is."""
    address: str
    is_told: bool  # by host= or a variable
    name: str  # of the host, for people
    network: str  # the same for ranks that reach each other by loopback
    processes: str  # the same for ranks that see each other's processes
    process: int

    @property
    def is_loopback(self) -> bool:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.address.partition('%')[0]).is_loopback
        return False


def check(host: Any) -> str:
    """Returns the address of host=, or else of BALLAST_HOST. '': neither is set."""
    name, host = ('host', host) if host is not None else ('BALLAST_HOST', os.environ.get('BALLAST_HOST', ''))
    if not isinstance(host, str) or (name == 'host' and not host):
        raise Error(f"{name}={host!r}: expected this machine's name or address, by which other ranks reach it, such as '10.0.0.5'",
                    'BAD_CONFIG')
    if not host:
        return ''
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(f'{name}={host!r}: expected a name or an address of this machine; {error.strerror}', 'BAD_CONFIG') from None
    own = next((str(there[0]) for family, _, _, _, there in found if _is_own(family, there)), None)
    if own is None:
        raise Error(f'{name}={host!r}: expected an address of this machine, which has none of {sorted({there[0] for *_, there in found})}',
                    'BAD_CONFIG')
    return own


def meet(group: Group, exchange: Exchange, host: Any) -> list[Place]:
    """Returns where all ranks are, in rank order. COLLECTIVE. host: see check()."""
    _, said = everyone(exchange, lambda: _here(group, host), lambda place: json.dumps(place).encode())
    places = [Place(*json.loads(each)) for each in said]
    if len({place.network for place in places}) > 1 and any(place.is_loopback for place in places):
        _, said = everyone(exchange, lambda: _towards_others(group.rank, places), str.encode)
        places = [place._replace(address=each.decode()) for place, each in zip(places, said)]
    return places


def hosts(places: list[Place]) -> list[str]:
    """Returns the names of the hosts. Ranks are on one host if they see each other's processes and loopback addresses."""
    return sorted({(place.network, place.processes): place.name for place in places}.values())


def _here(group: Group, host: Any) -> Place:
    if group.rank == 0 and _outlives_ranks(group):
        _warn_of_restarts()
    master = _master(group)
    told = check(host) or _of_interfaces(os.environ.get('GLOO_SOCKET_IFNAME', ''), master)
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as file:
        machine = file.read().strip()
    network, processes = (f'{machine} {os.readlink(f"/proc/self/ns/{kind}")}' for kind in ('net', 'pid'))
    return Place(told or _towards(master) or '127.0.0.1', bool(told), socket.gethostname(), network, processes, os.getpid())


def _towards_others(rank: int, places: list[Place]) -> str:
    mine = places[rank]
    if not mine.is_loopback:
        return mine.address
    elsewhere = [place for place in places if place.network != mine.network]
    if not mine.is_told:
        for place in elsewhere:
            if not place.is_loopback and (own := _towards(place.address)) is not None:
                return own
    raise Error(f'rank {rank} on {mine.name} has the address {mine.address}, which ranks of other hosts ({elsewhere[0].name}) cannot '
                f'reach; {_SET}', 'BAD_CONFIG')


def _outlives_ranks(group: Group) -> bool:
    """torchrun keeps the process group's store, and may restart the ranks."""
    torchrun = os.environ.get
    return (torchrun('TORCHELASTIC_USE_AGENT_STORE') == 'True' and torchrun('TORCHELASTIC_MAX_RESTARTS', '0') != '0'
            and str(getattr(_store(group), 'port', '')) == torchrun('MASTER_PORT'))


@functools.cache
def _warn_of_restarts() -> None:
    warn("torchrun --max-restarts keeps its store across restarts. torch's process groups may then read addresses of the earlier attempt "
         'and not come together, whatever the optimizer (pytorch/pytorch#135712). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, '
         'and start it with --standalone or --rdzv-backend=c10d')


def _store(group: Group) -> Any:
    store = group.torchs_store
    while hasattr(store, 'underlying_store'):
        store = store.underlying_store
    return store


def _master(group: Group) -> str:
    """Returns the host of the process group's store. A store without a host, such as a file, gives this host's own name."""
    return getattr(_store(group), 'host', '') or socket.gethostname()


def _towards(host: str) -> str | None:
    """Returns the address that this machine uses to reach another. Sends no packet."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, there in sorted(found, key=lambda each: each[0] == socket.AF_INET6):  # a name may have both
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(there)
                return _text(family, probe.getsockname())
    return None


def _is_own(family: int, there: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(there)
            return True
    except OSError as error:
        return error.errno == errno.EADDRINUSE


def _text(family: int, there: Any) -> str:
    """Returns the address as text. A link-local one includes its interface."""
    return f'{there[0]}%{socket.if_indextoname(there[3])}' if family == socket.AF_INET6 and there[3] and '%' not in there[0] else there[0]


def _of_interfaces(names: str, master: str) -> str:
    """Returns the first address of interfaces 'eth0,eth1', if possible of the master's family. '': no interface is named."""
    wanted = [name.strip() for name in names.split(',') if name.strip()]
    if not wanted:
        return ''
    prefers_6 = ':' in (_towards(master) or '')
    for name in wanted:
        found = sorted(_of_interface(name), key=lambda address: (':' in address) != prefers_6)
        if found:
            return found[0]
    there = ', '.join(name for _, name in socket.if_nameindex())
    raise Error(f'GLOO_SOCKET_IFNAME={names!r}: expected an interface of this machine that has an address; there are {there}', 'BAD_CONFIG')


def _of_interface(name: str) -> list[str]:
    addresses = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack('256s', name.encode()[:15]))
        addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError), open('/proc/net/if_inet6', encoding='ascii') as lines:
        found = [line.split() for line in lines if line.split()[-1:] == [name]]
        for number, _, _, scope, *_ in sorted(found, key=lambda fields: fields[3]):  # global ones (00) before link-local ones (20)
            address = str(ipaddress.ip_address(bytes.fromhex(number)))
            addresses.append(f'{address}%{name}' if scope == '20' else address)
    return addresses
