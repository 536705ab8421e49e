"""replicas=2 and shard(): a server is lost with its disk amid a backward pass whose gradients the trainers have let go."""
import shutil

import pytest
import torch
from test_discovery import Server, asking_for, url  # noqa: F401
from test_shard import run

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
