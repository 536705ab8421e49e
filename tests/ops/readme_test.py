"""The README's chapter "Run it for real", its commands as printed, on a bare Debian that has booted; one machine plays all of them."""
import os
import pathlib
import re
import sys

import ops
import package_test
from unit_test import Machine

# What the test cannot do without a network: the packages are in the root already, torch is borrowed.
WITHOUT_NETWORK = {
    'apt-get install ./ballast-server_*.deb': 'dpkg-query --show ballast-server',
    'venv/bin/pip install torch numpy ./ballast_state-*.whl': 'venv/bin/pip install --no-index --no-deps ./ballast_state-*.whl',
}


def block(name):
    """Lines of the chapter's block that begins with '# NAME'."""
    text = (ops.ROOT / 'README.md').read_text().split('## Run it for real')[1].split('\n## ')[0]
    lines = re.search(rf'```sh\n# {name}\n(.*?)```', text, re.DOTALL).group(1).splitlines()
    return [WITHOUT_NETWORK.get(line, line) for line in lines]


def test_run_it_for_real():
    torch = pathlib.Path(os.path.realpath(ops.ROOT / 'build' / 'venv')) / 'lib' / f'python3.{sys.version_info.minor}' / 'site-packages'
    wheel = package_test.the_wheel()
    if not (torch / 'torch').exists():
        raise ops.Skip('no torch in build/venv; tests/python/venv.sh installs it')
    server, trainer, watch = block('server'), block('trainer'), block('watch')
    assert set(WITHOUT_NETWORK.values()) <= set(server + trainer), 'the README has other commands than this test knows'

    machine = Machine(mounts=[(torch, '/borrowed')])
    for line in server:
        print(said := machine('sh', '-ec', line))
    assert 'HEALTHY' in said
    home = machine.root / 'root'
    (home / wheel.name).write_bytes(wheel.read_bytes())
    (home / 'train.py').write_bytes((ops.DEPLOY / 'examples' / 'train.py').read_bytes())
    for line in trainer[:-1]:
        print(machine('sh', '-ec', f'cd /root; {line}'))
    site = next((home / 'venv' / 'lib').glob('python3*')) / 'site-packages'
    (site / 'borrowed.pth').write_text('/borrowed\n')
    (home / 'venv/bin/torchrun').write_text('#!/bin/sh\nexec /root/venv/bin/python -m torch.distributed.run "$@"\n')
    (home / 'venv/bin/torchrun').chmod(0o755)
    into = ['nsenter', '-t', machine.pid, '-a', 'env', 'SERVERS=127.0.0.1:7070', 'HOME=/root', 'OMP_NUM_THREADS=1', 'sh', '-ec']
    run = ops.start(*into, f'cd /root; {trainer[-1]}', log='run.log')
    try:
        ops.wait_for(lambda: 'step 10:' in pathlib.Path('run.log').read_text(), 'step 10', 90)
    except AssertionError:
        print(pathlib.Path('run.log').read_text())
        raise
    for line in watch:
        line = line.replace('watch -n 1 ', '').replace('state1', '127.0.0.1')
        if line.startswith('curl'):
            fetch = 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())'
            line = line.replace('curl -s', f'python3 -c "{fetch}"')  # the root has no curl
        print(said := machine('env', 'SERVERS=127.0.0.1:7070', 'sh', '-ec', line))
    assert float(said.split()[-1]) >= 10, said
    machine('systemctl', 'kill', '-s', 'KILL', 'ballastd')
    ops.ended(run, 'run.log')
    assert 'done after step 300' in pathlib.Path('run.log').read_text()
    assert machine.show('NRestarts') == '1' and 'recovered' in machine.journal()
