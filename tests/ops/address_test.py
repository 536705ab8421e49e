"""A server that comes back under its name at another address, as a pod does."""
import pathlib

import ops

HOSTS = pathlib.Path('/etc/hosts')  # this test's own
# gRPC by itself asks for the name's address again after half a minute at the earliest.
TIMEOUT = 25


def serve(address):
    server = ops.start(ops.BIN / 'ballastd', '--data_directory', 'data', '--listen', f'{address}:7070', '--metrics_listen',
                       f'{address}:9070', '--budget.dram', '64MiB', '--budget.nvme', '512MiB', log='server.log')
    ops.wait_for(lambda: ops.http(f'http://{address}:9070/readyz')[0] == 200, 'the server is ready')
    return server


def test_new_address_under_its_name():
    ops.need(ops.BIN / 'ballastd')
    others = HOSTS.read_text()
    HOSTS.write_text(others + '127.0.0.2 state-0\n')
    server = serve('127.0.0.2')
    trainer = ops.start(*ops.trainer('state-0:7070', '--timeout', TIMEOUT, '--dump-master', 'master'), log='trainer.log')
    ops.wait_for(lambda: ops.committed('127.0.0.2:7070') >= 5, 'five steps')
    ops.kill(server)
    assert trainer.poll() is None, 'the trainer ended before the server went'
    HOSTS.write_text(others + '127.0.0.3 state-0\n')
    serve('127.0.0.3')
    ops.ended(trainer, 'trainer.log')
    ops.reference('undisturbed')
    ops.same_bits('master', 'undisturbed')
