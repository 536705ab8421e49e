"""replicas=2: servers are lost with their disks, amid a backward pass whose gradients the trainers have let go, and with named states."""
import shutil
import subprocess
import time

import pytest
import torch
from models import mlp
from test_discovery import Server, asking_for, train, url  # noqa: F401
from test_shard import run

import ballast.torch as bt
from ballast import programs

if shutil.which('etcd') is None:
    pytest.skip('no etcd here: apt-get install etcd-server', allow_module_level=True)


def test_a_server_is_lost_amid_backward(url, tmp_path):  # noqa: F811
    servers = [Server(tmp_path, name, url) for name in 'abc']
    done = run(['undisturbed', 'disturbed'], tmp_path, script='lost_server_main.py', BALLAST_TEST_SERVERS=asking_for(3, url),
               BALLAST_TEST_LOST=f'{servers[1].pid}:{servers[1].folder}')
    log = (tmp_path / '0.log').read_text()
    assert "job 'disturbed' goes on without 'b'" in log, log
    for (losses, parameters), (our_losses, our_parameters) in zip(done['undisturbed'], done['disturbed']):
        assert our_losses == losses
        for ours, theirs in zip(our_parameters, parameters):
            assert torch.equal(ours, theirs)
    for server in servers:
        server.kill()


def test_a_named_state_survives_all_the_servers_that_kept_it(url, tmp_path):  # noqa: F811
    """Two of three machines are lost with their disks; others have copied what the state needs, and the third one leaves. Who read the
    job on the first three reads it on those that there are in the end."""
    servers = {name: Server(tmp_path, name, url) for name in 'abc'}
    torch.manual_seed(1)
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, name='kept', servers=asking_for(3, url), replicas=2, failover_after=1.0)
    step = 0

    def parameters():
        return [parameter.detach().clone() for parameter in model.parameters()]

    def lose(name):
        servers[name].kill()
        shutil.rmtree(servers[name].folder)

    def until_settled(*names):
        nonlocal step
        end, text = time.monotonic() + 90, ''
        while time.monotonic() < end:
            train(optimizer, model, step, step + 1)
            step += 1
            text = subprocess.run([programs.path('ballastctl'), 'members', '--job', 'kept', '--servers', url], capture_output=True,
                                  text=True, check=False).stdout
            changing = 'has copied' in text or 'is to copy' in text or 'once others have them' in text
            if all(f'{name} ' in text for name in names) and not changing:
                return
        raise AssertionError(text)
    train(optimizer, model, 0, 3)
    saved, at_saved = optimizer.state_dict(), parameters()
    train(optimizer, model, 3, 6)
    after, step = parameters(), 6
    reader, read = bt.Reader('kept', servers=asking_for(3, url), timeout=60), mlp()
    assert reader.read(read, masters=True).version == reader.newest()
    lose('a')
    servers['d'] = Server(tmp_path, 'd', url)
    until_settled('b', 'c', 'd')
    lose('b')
    servers['e'] = Server(tmp_path, 'e', url)
    until_settled('c', 'd', 'e')
    subprocess.run([programs.path('ballastctl'), 'drain', '--job', 'kept', '--server', 'c', '--servers', url], check=True)
    until_settled('d', 'e')
    optimizer.load_state_dict(saved)
    assert all(torch.equal(ours, kept) for ours, kept in zip(parameters(), at_saved))
    train(optimizer, model, 3, 6)
    assert all(torch.equal(ours, first) for ours, first in zip(parameters(), after))
    reader.read(read, masters=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(read.parameters(), after))
    reader.close()
    optimizer.close()
    for name in 'cde':
        servers[name].kill()


def test_a_read_goes_on_without_a_server_that_is_lost_amid_it(url, tmp_path, monkeypatch):  # noqa: F811
    """Its chunks come from others that have them: the read ends at the version that it began with, long before its time-out."""
    servers = {name: Server(tmp_path, name, url) for name in 'abc'}
    torch.manual_seed(1)
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, name='read', servers=asking_for(3, url), replicas=2, failover_after=600.0)
    train(optimizer, model, 0, 3)
    reader, read = bt.Reader('read', servers=asking_for(3, url), timeout=600), mlp()
    copy, copies = reader._copy, []

    def copy_without_b(*said):
        servers['b'].kill()
        copies.append(said)
        copy(*said)
    monkeypatch.setattr(reader, '_copy', copy_without_b)
    reading = reader.read(read, masters=True)
    assert len(copies) == 1
    assert reading.steps == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(read.parameters(), model.parameters()))
    reader.close()
    optimizer.close()
    for name in 'ac':
        servers[name].kill()
