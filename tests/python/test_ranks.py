"""Two ranks, each a process: DDP and FSDP2 against torch's optimizer, over a private state server and over two named ones."""
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
import torch

from ballast import embedded_daemon

HERE = pathlib.Path(__file__).parent
WORLD = 2


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def run_ranks(script, folder, servers=None, expect=0):
    environment = {**os.environ, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), 'WORLD_SIZE': str(WORLD)}
    if servers:
        environment['BALLAST_SERVERS'] = servers
    ranks = []
    for rank in range(WORLD):
        with open(folder / f'{rank}.log', 'w', encoding='utf-8') as log:
            ranks.append(subprocess.Popen([sys.executable, HERE / 'rank_main.py', script, folder], stdout=log, stderr=log,
                                          env={**environment, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}))
    codes = [rank.wait(300) for rank in ranks]
    logs = '\n'.join(f'--- rank {rank}\n' + (folder / f'{rank}.log').read_text() for rank in range(WORLD))
    assert codes == [expect] * WORLD, logs
    return [torch.load(folder / f'{script}-{rank}.pt') for rank in range(WORLD)], logs


@pytest.fixture
def two_servers(tmp_path):
    servers, addresses = [], []
    for i in range(2):
        servers.append(subprocess.Popen(
            [embedded_daemon._binary(), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen',
             '127.0.0.1:0', '--data_directory', str(tmp_path / f'server{i}'), '--budget.dram', '128MiB', '--budget.nvme', '2GiB',
             '--log_level', 'warn'], stdout=subprocess.PIPE, text=True))
        addresses.append(re.search(r'listen=(\S+)', servers[-1].stdout.readline())[1])
    yield ','.join(addresses)
    for server in servers:
        server.terminate()
        server.wait()
        server.stdout.close()


def check(results):
    for (their_losses, their_parameters), (our_losses, our_parameters) in results:
        torch.testing.assert_close(our_losses, their_losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(our_parameters, their_parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('script', ['ddp', 'ddp_no_sync', 'ddp_edit', 'fsdp2', 'fsdp2_edit'])
def test_two_ranks_over_a_private_server(script, tmp_path):
    results, logs = run_ranks(script, tmp_path)
    check(results)
    assert 'error' not in logs.lower(), logs


@pytest.mark.parametrize('script', ['ddp', 'fsdp2'])
def test_two_ranks_over_two_servers(script, tmp_path, two_servers):
    results, _ = run_ranks(script, tmp_path, servers=two_servers)
    check(results)


def test_a_gradient_that_one_rank_has_not(tmp_path):
    (mine, steps), (other, _) = run_ranks('none_on_one_rank', tmp_path)[0]
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert steps == 3
