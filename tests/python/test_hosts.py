"""Two ranks on two hosts, which are network namespaces here: how they meet, and which address each tells the other."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from own_process import Process

from ballast import programs

HERE = pathlib.Path(__file__).parent
ADDRESS6 = 'fd77::{}'  # of a host
SUBNET = f'10.77.{os.getpid() % 250}'


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts():
    """Names of two namespaces with a link between them, and of its interface in both."""
    names, link = [f'ballast-{os.getpid()}{which}' for which in 'ab'], 'link0'
    if os.geteuid() != 0 or shutil.which('ip') is None:
        pytest.skip('network namespaces need root, and ip of iproute2')
    with contextlib.ExitStack() as stack:
        for name in names:
            try:
                run('ip', 'netns', 'add', name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f'no network namespace can be made here: {error.stderr.strip()}')
            stack.callback(run, 'ip', 'netns', 'del', name)
        run('ip', 'link', 'add', link, 'netns', names[0], 'type', 'veth', 'peer', 'name', link, 'netns', names[1])
        for host, name in enumerate(names, 1):
            run('ip', '-n', name, 'addr', 'add', f'{SUBNET}.{host}/24', 'dev', link)
            run('ip', '-n', name, 'addr', 'add', f'{ADDRESS6.format(host)}/64', 'dev', link, 'nodad')
            for interface in ('lo', link):
                run('ip', '-n', name, 'link', 'set', interface, 'up')
        yield names, link


@pytest.fixture(scope='module')
def told(tmp_path_factory):
    """By case, what ranks 0 and 1 were told, or the addresses that they told each other."""
    folder = tmp_path_factory.mktemp('hosts')
    with two_hosts() as (names, link):
        server = subprocess.Popen(['ip', 'netns', 'exec', names[0], programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen',
                                   f'{SUBNET}.1:0', '--metrics_listen', '127.0.0.1:0', '--data_directory', str(folder / 'server'),
                                   '--budget.dram', '128MiB', '--budget.nvme', '8GiB', '--log_level', 'warn'],
                                  stdout=subprocess.PIPE, text=True)
        try:
            address = re.search(r'listen=(\S+)', server.stdout.readline())[1]
            ranks = [Process(HERE / 'hosts_main.py', folder, folder / f'{rank}.log', folder, name, rank, address, f'{SUBNET}.{{}}',
                             ADDRESS6, 29500, link, TORCH_GLOO_LAZY_INIT='1')  # torch's own connections are not of interest
                     for rank, name in enumerate(names)]
            codes = [rank.wait() for rank in ranks]
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()
    assert codes == [0, 0], '\n'.join(rank.output for rank in ranks)
    results = [json.loads((folder / f'{rank}.json').read_text(encoding='utf-8')) for rank in range(2)]
    return {name: [of_rank[name] for of_rank in results] for name in results[0]}


@pytest.mark.parametrize('name', ['environment', 'tcp', 'own_name_is_loopback', 'file_host', 'file_variable', 'file_interface'])
def test_ranks_tell_addresses_that_other_hosts_reach(name, told):
    """Also where rank 0 calls the master 127.0.1.1, as Debian has a host's own name."""
    assert told[name] == [f'{SUBNET}.{host}' for host in (1, 2)]


@pytest.mark.parametrize('name', ['tcp6', 'file_host6', 'interface6'])
def test_ranks_of_ipv6(name, told):
    """An interface's address is of the master's family."""
    assert told[name] == [ADDRESS6.format(host) for host in (1, 2)]


@pytest.mark.parametrize('name', ['file', 'loopback'])
def test_loopback_across_hosts_is_refused_with_the_fix(name, told):
    for text in (each.removeprefix('rank 0: ') for each in told[name]):
        assert re.match(r'rank 0 on \S+ has the address 127\.0\.\d\.1, which ranks of other hosts \(\S+\) cannot reach; set host= '
                        'of the optimizer, or BALLAST_HOST, to an address by which other hosts reach this rank, or GLOO_SOCKET_IFNAME to '
                        'the interface that has it', text)


def test_a_private_server_is_for_one_host(told):
    """Which the hosts' names do not tell: both have one."""
    for text in told['no_server']:
        assert re.match(r'the ranks are on 2 hosts or containers \(\S+, \S+\), and no state servers are named. Start ballastd beside', text)


def test_an_address_of_another_machine(told):
    for text in told['elsewhere']:
        assert text == ("host='192.0.2.1': expected an address of this machine, which has none of ['192.0.2.1'] [BAD_CONFIG]")


def test_an_interface_that_is_not_there(told):
    for text in told['no_interface']:
        assert text.removeprefix('rank 0: ').startswith("GLOO_SOCKET_IFNAME='none0': expected an interface of this machine that has an "
                                                        'address; there are lo, ')
