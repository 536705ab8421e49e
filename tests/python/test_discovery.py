"""servers='etcd://...': servers found in a real etcd, and one replaced under its id while an optimizer runs."""
import os
import re
import shutil
import socket
import subprocess

import pytest
import torch
from conftest import OWN_ADDRESS
from models import batch, mlp
from test_tls import issue
from test_tls import run as openssl

import ballast
import ballast.torch as bt
from ballast import programs

if shutil.which('etcd') is None:
    pytest.skip('no etcd here: apt-get install etcd-server', allow_module_level=True)


def two_free_ports():
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind((OWN_ADDRESS, 0))
        return first.getsockname()[1], second.getsockname()[1]


@pytest.fixture
def url(tmp_path, request):
    """The URL of an etcd; with the parameter 'tls' of one that asks for certificates."""
    tls, flags, query = getattr(request, 'param', None) == 'tls', [], ''
    if tls:
        openssl(tmp_path, 'req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca')
        issue(tmp_path, 'both', f'IP:{OWN_ADDRESS}')
        flags = ['--cert-file', tmp_path / 'both.crt', '--key-file', tmp_path / 'both.key', '--trusted-ca-file', tmp_path / 'ca.crt',
                 '--client-cert-auth']
        query = f'?ca={tmp_path}/ca.crt&certificate={tmp_path}/both.crt&key={tmp_path}/both.key'
    address, peer = (f'{OWN_ADDRESS}:{port}' for port in two_free_ports())
    peer = f'http://{peer}'
    client = f'{"https" if tls else "http"}://{address}'
    process = subprocess.Popen(
        ['etcd', '--data-dir', str(tmp_path / 'etcd'), '--listen-client-urls', client, '--advertise-client-urls', client,
         '--listen-peer-urls', peer, '--initial-advertise-peer-urls', peer, '--initial-cluster', f'default={peer}', *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f'etcd://{address}/python{query}'
    finally:
        process.kill()
        process.wait()


def asking_for(servers, url):
    return f'{url}{"&" if "?" in url else "?"}servers={servers}'


class Server:
    def __init__(self, folder, name, url):
        self.folder = folder / name
        self._command = [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen',
                         '127.0.0.1:0', '--data_directory', str(folder / name), '--server_id', name, '--budget.dram', '128MiB',
                         '--budget.nvme', '2GiB', '--log_level', 'off', '--discovery', url]
        self.start()

    def start(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self.address = re.search(r'listen=(\S+)', self._process.stdout.readline())[1]

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def train(optimizer, model, begin, end):
    for i in range(begin, end):
        optimizer.zero_grad()
        model(**batch('mlp', i)).loss.backward()
        optimizer.step()


# Other tests name a plain etcd by servers=.
PLACES = [('tls', True)] if os.environ.get('TEST_ROUNDS') == 'ci' else [('plain', False), ('tls', True)]


@pytest.mark.parametrize('url, variable', PLACES, ids=str, indirect=['url'])
def test_a_server_that_comes_back_elsewhere_is_found(url, tmp_path, monkeypatch, variable):
    models, servers = [], [Server(tmp_path, name, url) for name in 'ab']
    for where in ('served', 'embedded'):
        torch.manual_seed(1)
        models.append(mlp())
        said = {'dram': '256MiB', 'name': 'embedded'}
        if where == 'served':
            said = {'servers': asking_for(2, url), 'name': 'served'}
            if variable:
                monkeypatch.setenv('BALLAST_SERVERS', said.pop('servers'))
        optimizer = bt.AdamW(models[-1].parameters(), lr=1e-2, **said)
        monkeypatch.delenv('BALLAST_SERVERS', raising=False)
        train(optimizer, models[-1], 0, 4)
        if where == 'served':
            before = servers[1].address
            servers[1].kill()
            servers[1].start()
            assert servers[1].address != before
        train(optimizer, models[-1], 4, 8)
        optimizer.close()
    for server in servers:
        server.kill()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(ours, theirs)


def test_too_few_servers_are_told_by_name(url, tmp_path):
    server = Server(tmp_path, 'alone', url)
    while subprocess.run([programs.path('ballastctl'), 'status', '--servers', url], stdout=subprocess.DEVNULL, check=False).returncode != 0:
        pass  # until it is registered
    with pytest.raises(ballast.Error, match=r'expected 2 servers at etcd://.*found 1: alone at 127\.0\.0\.1') as raised:
        model = mlp()
        train(bt.AdamW(model.parameters(), servers=asking_for(2, url), open_timeout=10), model, 0, 1)
    server.kill()
    assert raised.value.reason == 'SERVER_DOWN'


def trained(model, lose=None, **said):
    """Eight steps with a parameter more from the sixth on. lose: takes a machine away before the third step."""
    late = torch.nn.Parameter(torch.full((300,), 0.5))
    optimizer = bt.AdamW(model.parameters(), lr=1e-2, **said)
    for i in range(8):
        if i == 3 and lose is not None:
            lose()
        if i == 5:
            optimizer.add_param_group({'params': [late]})
        optimizer.zero_grad()
        loss = model(**batch('mlp', i)).loss
        (loss + (late * late).sum() if i >= 5 else loss).backward()
        optimizer.step()
    optimizer.close()
    return [*model.parameters(), late]


def test_a_machine_is_lost_with_its_disk(url, tmp_path):
    """replicas=2: training goes on without it, with the bits of an undisturbed run, and tensors may still come later."""
    servers, found = [Server(tmp_path, name, url) for name in 'abc'], []

    def lose():
        servers[1].kill()
        shutil.rmtree(servers[1].folder)
    for served in (False, True):
        torch.manual_seed(1)
        said = {'dram': '256MiB', 'name': 'embedded'}
        if served:
            said = {'servers': asking_for(3, url), 'name': 'served', 'replicas': 2, 'failover_after': 1, 'lose': lose}
        found.append(trained(mlp(), **said))
    for server in (servers[0], servers[2]):
        server.kill()
    for ours, theirs in zip(*found):
        assert torch.equal(ours, theirs)


def test_replicas_that_cannot_be(url, tmp_path):
    server = Server(tmp_path, 'alone', url)
    for said, words in (({'servers': server.address, 'replicas': 2}, 'needs servers that etcd names'),
                        ({'servers': asking_for(1, url), 'replicas': 2}, 'a server for each copy'),
                        ({'dram': '64MiB', 'replicas': 2}, 'needs servers that etcd names'),
                        ({'replicas': 5}, 'replicas'), ({'replicas': 0}, 'replicas'), ({'failover_after': 0}, 'failover_after')):
        with pytest.raises(ballast.Error, match=words):
            model = mlp()
            train(bt.AdamW(model.parameters(), **said), model, 0, 1)
    server.kill()
