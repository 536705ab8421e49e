"""Two ranks of Muon, whose updates go to two servers wave by wave, are killed with their servers, or a server alone is."""
import os
import pathlib
import re
import subprocess
import time

import pytest
import torch
from conftest import OWN_ADDRESS
from own_process import Process, free_port

from ballast import programs

HERE = pathlib.Path(__file__).parent
FULL = os.environ.get('TEST_ROUNDS') == 'full'
WAYS = ['fsdp2', 'shard'] if FULL else ['fsdp2']
# Steps, and the places in them (see muon_killed_main.py) where all are killed.
PLACES = [(1, '7'), (2, '24'), (3, '2ms'), (5, 'stepped')]
if FULL:
    PLACES = [*((1, str(wave)) for wave in (1, 6, 7, 8, 13, 19, 24)), (2, 'prepared'), (3, '0ms'), (4, '1ms'), (5, '2ms'), (6, '4ms'),
              (7, '8ms'), (9, 'stepped')]


class Server:
    """On a port and a directory that it keeps through restarts."""

    def __init__(self, folder):
        self._folder, self.address = folder, f'{OWN_ADDRESS}:0'
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', self.address, '--metrics_listen', f'{OWN_ADDRESS}:0',
             '--data_directory', str(self._folder), '--budget.dram', '128MiB', '--budget.nvme', '2GiB', '--log_level', 'warn'],
            stdout=subprocess.PIPE, text=True)
        self.address = re.search(r'listen=(\S+)', self.process.stdout.readline())[1]

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def servers(tmp_path):
    each = [Server(tmp_path / f'server{i}') for i in range(2)]
    yield each
    for server in each:
        server.end()


def started(way, servers, folder, whom='', places=()):
    write_pids(servers, folder)
    variables = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), 'WORLD_SIZE': '2'}
    addresses, places = ','.join(server.address for server in servers), ','.join(f'{step}:{place}' for step, place in places)
    return [Process(HERE / 'muon_killed_main.py', folder, folder / f'{rank}.log', way, addresses, whom, places, RANK=str(rank),
                    LOCAL_RANK=str(rank), **variables) for rank in range(2)]


def write_pids(servers, folder):
    (folder / 'new').write_text(' '.join(str(server.process.pid) for server in servers), encoding='ascii')
    (folder / 'new').rename(folder / 'pids')


def ended(ranks, codes):
    """The steps that they began with."""
    assert [rank.wait() for rank in ranks] == codes, '\n'.join(rank.output for rank in ranks)
    return [int(re.search(r'from (\d+)', rank.output)[1]) for rank in ranks]


def undisturbed(way, tmp_path):
    folder = tmp_path / 'undisturbed'
    folder.mkdir()
    servers = [Server(folder / f'server{i}') for i in range(2)]
    assert ended(started(way, servers, folder), [0, 0]) == [0, 0]
    for server in servers:
        server.end()
    return torch.load(folder / f'{way}.pt')


@pytest.mark.parametrize('way', WAYS)
def test_all_are_killed_and_go_on_with_the_bits_of_an_undisturbed_run(way, servers, tmp_path):
    begins = []
    for place in PLACES:
        begins.append(ended(started(way, servers, tmp_path, 'all', [place]), [-9, -9]))
        for server in servers:
            server.end()
            server.start()
    begins.append(ended(started(way, servers, tmp_path), [0, 0]))
    for (step, place), begin in zip(PLACES, begins[1:]):
        possible = {'stepped': (step + 1,)}.get(place, (step, step + 1) if place.endswith('ms') else (step,))
        assert begin[0] == begin[1] and begin[0] in possible, (begins, PLACES)
    torch.testing.assert_close(torch.load(tmp_path / f'{way}.pt'), undisturbed(way, tmp_path), rtol=0, atol=0)


@pytest.mark.parametrize('way', WAYS)
def test_a_server_alone_is_killed_between_waves(way, servers, tmp_path):
    """Its log has the updates that trainers have let go, so they go on as soon as it is back."""
    places = [(1, '7'), (3, '16'), (5, '24'), (6, '13'), (8, '2')] if FULL else [(1, '7'), (3, '16')]
    ranks = started(way, servers, tmp_path, 'server', places)
    killed, deadline = 0, time.monotonic() + 300
    while killed < len(places) and time.monotonic() < deadline:
        for server in servers:
            if server.process.poll() is not None:
                server.end()
                server.start()
                write_pids(servers, tmp_path)
                killed += 1
        time.sleep(0.01)
    assert ended(ranks, [0, 0]) == [0, 0] and killed == len(places)
    torch.testing.assert_close(torch.load(tmp_path / f'{way}.pt'), undisturbed(way, tmp_path), rtol=0, atol=0)
