"""Every test gets a job of its own on the process's embedded server."""
import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import urllib.request

import pytest
import torch
from ademamix import AdEMAMix

import ballast.torch as bt
from ballast import programs

_jobs = itertools.count()
# An address of this process alone: nobody takes a port there between its choice and its use, nor while its owner is dead.
OWN_ADDRESS = f'127.{1 + (os.getpid() >> 16) % 128}.{(os.getpid() >> 8) % 256}.{os.getpid() % 256}'


@pytest.fixture
def job():
    """Keyword arguments of an optimizer that shares nothing with other tests."""
    return {'name': f'job{next(_jobs)}', 'dram': '256MiB', 'threads': 2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)
    os.environ.pop('BALLAST_SERVERS', None)


@pytest.fixture
def two_servers(tmp_path_factory):
    with two_state_servers(tmp_path_factory.mktemp('servers')) as servers:
        yield servers


@contextlib.contextmanager
def state_servers(folder, *flags, count, dram='128MiB', pids=None, metrics=None):
    """Addresses. `flags`: more of ballastd's. `pids`, `metrics`: lists that get theirs, and where they tell their metrics. What they keep
    goes with them: a small job's gradient log alone takes 200 MiB of disk."""
    servers = [subprocess.Popen(
        [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen',
         '127.0.0.1:0', '--data_directory', str(folder / f'server{i}'), '--budget.dram', dram, '--budget.nvme', '8GiB',
         '--log_level', 'warn', *flags], stdout=subprocess.PIPE, text=True) for i in range(count)]
    if pids is not None:
        pids += [server.pid for server in servers]
    try:
        told = [re.search(r'listen=(\S+) metrics=(\S+)', server.stdout.readline()).groups() for server in servers]
        if metrics is not None:
            metrics += [each for _, each in told]
        yield ','.join(listen for listen, _ in told)
    finally:
        for server in servers:
            server.terminate()
            server.wait()
            server.stdout.close()
        shutil.rmtree(folder)


two_state_servers = functools.partial(state_servers, count=2)


def metrics_of(address):
    """Values by name and labels."""
    with urllib.request.urlopen(f'http://{address}/metrics') as answer:
        return {name: float(value) for name, value in re.findall(r'^(ballast_\S+) (\S+)$', answer.read().decode(), re.MULTILINE)}


# Ours and torch's (or a paper's), by name: constructors that take parameters and torch's arguments.
PAIRS = {
    'adamw': (bt.AdamW, torch.optim.AdamW, {'lr': 1e-2, 'weight_decay': 0.1}),
    'adamw_amsgrad': (bt.AdamW, torch.optim.AdamW, {'lr': 1e-2, 'amsgrad': True}),
    'adamw_maximize': (bt.AdamW, torch.optim.AdamW, {'lr': 1e-3, 'maximize': True}),
    'adam': (bt.Adam, torch.optim.Adam, {'lr': 1e-2, 'weight_decay': 0.01}),
    'sgd': (bt.SGD, torch.optim.SGD, {'lr': 1e-2, 'weight_decay': 0.01}),
    'sgd_momentum': (bt.SGD, torch.optim.SGD, {'lr': 1e-2, 'momentum': 0.9, 'dampening': 0.1}),
    'sgd_nesterov': (bt.SGD, torch.optim.SGD, {'lr': 1e-2, 'momentum': 0.9, 'nesterov': True}),
    'adagrad': (bt.Adagrad, torch.optim.Adagrad, {'lr': 1e-2, 'lr_decay': 0.01, 'initial_accumulator_value': 0.1}),
    'ademamix': (bt.AdEMAMix, AdEMAMix, {'lr': 1e-3, 'betas': (0.9, 0.999, 0.99), 'weight_decay': 0.1}),
}
