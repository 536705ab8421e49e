"""The chapter "Run it for real" of deploy/README.md, its commands as printed, on a bare Debian that has booted.

One machine plays all of them.
"""
import os
import pathlib
import re
import shutil
import sys
import time

import ops
import package_test
from unit_test import Machine

# What the test cannot do without a network, where packages lie in the root already and torch is borrowed; and what it has no time for.
HERE = {
    'apt-get update': 'true',
    'apt-get install -y ./ballast-server_*.deb': 'dpkg-query --show ballast-server',
    'apt-get install -y python3-venv': 'dpkg-query --show python3-venv',
    'venv/bin/pip install torch numpy ./ballast_state-*.whl': 'venv/bin/pip install --no-index --no-deps ./ballast_state-*.whl',
    'BALLAST_SERVERS=state1:7070 venv/bin/torchrun --nproc-per-node 2 train.py 20000':
        'BALLAST_SERVERS=state1:7070 venv/bin/torchrun --nproc-per-node 2 train.py 500',
    'watch -n 1 ballastctl status --servers state1:7070': 'ballastctl status --servers state1:7070',
    'apt-get install -y --no-install-recommends prometheus':
        'cd /var/cache/apt/prometheus && dpkg --force-unsafe-io --unpack *.deb && dpkg --configure --pending',
}  # fmt: skip


def block(name):
    """Lines of the chapter's block that begins with '# NAME'."""
    text = (ops.DEPLOY / 'README.md').read_text().split('## Run it for real')[1].split('\n## ')[0]
    lines = re.search(rf'```sh\n# {name}\n(.*?)```', text, re.DOTALL).group(1).splitlines()
    return [HERE.get(line, line) for line in lines]


def test_run_it_for_real():
    torch = pathlib.Path(os.path.realpath(ops.ROOT / 'build' / 'venv')) / 'lib' / f'python3.{sys.version_info.minor}' / 'site-packages'
    wheel = package_test.the_wheel()
    if not (torch / 'torch').exists():
        raise ops.Skip('no torch in build/venv; tests/python/venv.sh installs it')
    server, trainer, watch, monitor = block('server'), block('trainer'), block('watch'), block('monitor')
    assert set(HERE.values()) <= set(server + trainer + watch + monitor), 'deploy/README.md has other commands than this test knows'

    # The configuration of the package wants 8 GiB free, whatever this machine has.
    machine = Machine(mounts=[(torch, '/borrowed')], data_mebibytes=12 << 10)
    if not (machine.root / 'var/cache/apt/prometheus').exists():
        raise ops.Skip('no Prometheus in build/ops/root/var/cache/apt; tests/ops/prepare.sh fetches it')
    machine('sh', '-ec', 'echo 127.0.0.1 state1 >> /etc/hosts')
    for line in server:
        print(said := machine('sh', '-ec', line))
    assert 'HEALTHY' in said
    home = machine.root / 'root'
    (home / wheel.name).write_bytes(wheel.read_bytes())
    for file in ('examples/train.py', 'prometheus/prometheus.yml', 'prometheus/ballast.rules.yml'):
        shutil.copy(ops.DEPLOY / file, home)
    for line in trainer[:-1]:
        print(machine('sh', '-ec', f'cd /root; {line}'))
    site = next((home / 'venv' / 'lib').glob('python3*')) / 'site-packages'
    (site / 'borrowed.pth').write_text('/borrowed\n')
    (home / 'venv/bin/torchrun').write_text('#!/bin/sh\nexec /root/venv/bin/python -m torch.distributed.run "$@"\n')
    (home / 'venv/bin/torchrun').chmod(0o755)
    into = ['nsenter', '-t', machine.pid, '-a', 'env', 'HOME=/root', 'OMP_NUM_THREADS=1', 'sh', '-ec']
    run = ops.start(*into, f'cd /root; {trainer[-1]}', log='run.log')
    try:
        ops.wait_for(lambda: 'step 10:' in pathlib.Path('run.log').read_text(), 'step 10', 200)
    except AssertionError:
        print(pathlib.Path('run.log').read_text())
        raise
    look, kill = watch
    print(said := machine('sh', '-ec', look))
    assert re.search(r'^  example +step +\d\d', said, re.MULTILINE), said
    machine('sh', '-ec', kill)
    ops.wait_for(lambda: 'HEALTHY' in machine('sh', '-ec', look), 'the killed server is back')
    assert machine.show('NRestarts') == '1' and 'recovered' in machine.journal()

    for line in monitor[:-1]:
        began = time.monotonic()
        print(machine('sh', '-ec', f'cd /root; {line}'), f'{time.monotonic() - began:.1f} s')
    said = ops.wait_for(lambda: machine('sh', '-ec', monitor[-1]).strip(), 'Prometheus has scraped the server')
    print(said)
    assert (found := re.search(r'instance="state1:9070".*training_job="example"} => (\d+) ', said)) and int(found.group(1)) >= 10, said
    fetch = 'import urllib.request; print(urllib.request.urlopen("http://127.0.0.1:9090/api/v1/rules").read().decode())'
    assert 'BallastServerDown' in machine('python3', '-c', fetch)
    ops.ended(run, 'run.log')
    assert 'done after step 500' in pathlib.Path('run.log').read_text()
