"""ballast-server and libballast-dev in a bare Debian, the wheel in a bare Debian without any of our packages."""
import os
import pathlib
import re
import sys
import time

import containers
import ops

WHEELS = ops.CACHE / 'wheel'


def deb(name):
    for path in (ops.CACHE / 'packages').glob(f'{name}_*.deb'):
        return path
    raise ops.Skip(f'no build/ops/packages/{name}_*.deb; tests/ops/prepare.sh makes it and says why it could not')


def test_debs():
    """Right contents and dependencies, and nothing that lintian calls an error."""
    ops.need('dpkg-deb', 'lintian')
    server, dev = deb('ballast-server'), deb('libballast-dev')
    depends = ops.run('dpkg-deb', '--field', server, 'Depends')
    assert 'libgrpc++1.51' in depends and 'librocksdb' in depends and '-dev' not in depends, depends
    listing = ops.run('dpkg-deb', '--contents', server)
    for name in ['usr/bin/ballastd', 'usr/bin/ballastctl', 'lib/systemd/system/ballastd.service', 'etc/ballast/ballastd.yaml']:
        assert f'./{name}\n' in listing or f'/{name}\n' in listing, (name, listing)
    assert 'include/' not in listing
    listing = ops.run('dpkg-deb', '--contents', dev)
    assert 'include/ballast/client/session.h' in listing and 'BallastConfig.cmake' in listing and 'bin/' not in listing, listing
    for name, folder, ending in [('ballast-dashboards', 'grafana/boards', '.json'), ('ballast-alerts', 'prometheus', '.rules.yml')]:
        listing = ops.run('dpkg-deb', '--contents', deb(name))
        files = [path.name for path in (ops.DEPLOY / folder).iterdir() if path.name.endswith(ending)]
        assert files and all(f'/{file}\n' in listing for file in files), (name, files, listing)
    said = ops.run('lintian', '--no-cfg', '--fail-on', 'none', server)
    print(said)
    assert not re.search(r'^E: ', said, re.MULTILINE), said


def test_deb_in_bare_root():
    """Installs with the dependencies it names; serves a training run; leaves state and configuration when it is removed."""
    ops.need(ops.BIN / 'train_bytes_lm')
    root = containers.bare_root('root')
    containers.install_server(root)
    assert containers.in_root(root, 'getent', 'passwd', 'ballast').startswith('ballast:')
    state = root / 'var/lib/ballast'
    state.mkdir()
    containers.in_root(root, 'chown', 'ballast:', '/var/lib/ballast')
    server = ops.start('/usr/sbin/chroot', '--userspec', 'ballast', root, 'ballastd', '--config', '/etc/ballast/ballastd.yaml',
                       '--budget.dram', '64MiB', '--budget.nvme', '512MiB', log='server.log', env={'PATH': '/usr/bin:/bin'})
    ops.wait_for(lambda: 'ballastd ready' in pathlib.Path('server.log').read_text(), 'ballastd ready')
    assert 'HEALTHY' in containers.in_root(root, 'ballastctl', 'status', '--servers', '127.0.0.1:7070')
    ops.run(*ops.trainer('127.0.0.1:7070', '--job', 'deb', '--dump-master', 'got'))
    server.terminate()
    ops.ended(server, 'server.log')
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    containers.in_root(root, 'dpkg', '--purge', 'ballast-server')
    assert list(state.iterdir()) and not (root / 'usr/bin/ballastd').exists() and not (root / 'etc/ballast/ballastd.yaml').exists()


def test_dev_deb_builds_a_trainer():
    """A program finds the package's CMake files, links the client and runs."""
    ops.need('cmake', 'ninja')
    ops.run('dpkg-deb', '--extract', deb('libballast-dev'), 'dev')
    ops.run('cmake', '-G', 'Ninja', '-S', ops.ROOT / 'tests' / 'install_consumer', '-B', 'build', '-DCMAKE_BUILD_TYPE=Release',
            f'-DBallast_ROOT={os.path.abspath("dev/usr")}')
    ops.run('cmake', '--build', 'build')
    ops.run('build/consumer')


def the_wheel():
    wheels = list(WHEELS.glob('ballast_state-*.whl'))
    if not wheels:
        raise ops.Skip('no build/ops/wheel/ballast_state-*.whl; tests/ops/prepare.sh makes it and says why it could not')
    return wheels[0]


def test_wheel_is_self_contained():
    wheel = the_wheel()
    # CPython 3.10 and later; a glibc that Ubuntu 22.04 has.
    assert (fits := re.search(r'-cp310-abi3-manylinux_2_(\d+)_x86_64', wheel.name)) and int(fits.group(1)) <= 35, wheel.name
    names = ops.run('python3', '-m', 'zipfile', '--list', wheel)
    bundled = set(re.findall(r'ballast_state\.libs/(\S+?)-[0-9a-f]{8}\.so', names))
    licences = set(re.findall(r'licenses/bundled/(\S+)\.txt', names))
    print(len(bundled), 'libraries,', len(licences), 'licences')
    assert re.findall(r'^ballast/(\S+\.so)', names, re.MULTILINE) == ['_native.abi3.so'] and 'ballast/bin/ballastd' in names, names
    assert 'libgrpc++' in bundled and 'libgrpc29' in licences and 'librocksdb7.8' in licences, (bundled, licences)
    assert not any(name.startswith(('libtorch', 'libc10', 'libcuda')) for name in bundled), bundled


def root_with_wheel():
    """A bare Debian root with the wheel in /root/venv; torch and what else build/venv has is borrowed. And how many seconds pip took."""
    root = containers.bare_root('root')
    wheel = the_wheel()
    torch = pathlib.Path(os.path.realpath(ops.ROOT / 'build' / 'venv')) / 'lib' / f'python3.{sys.version_info.minor}' / 'site-packages'
    if not (torch / 'torch').exists():
        raise ops.Skip('no torch in build/venv; tests/python/venv.sh installs it')
    assert 'libgrpc' not in containers.in_root(root, 'dpkg-query', '--show'), 'the root is not bare'
    (root / 'borrowed').mkdir()
    ops.run('mount', '--bind', '-o', 'ro', torch, root / 'borrowed')
    (root / 'root' / wheel.name).write_bytes(wheel.read_bytes())
    containers.in_root(root, 'python3', '-m', 'venv', '/root/venv')
    began = time.monotonic()
    containers.in_root(root, '/root/venv/bin/pip', 'install', '--quiet', '--no-index', '--no-deps', f'/root/{wheel.name}')
    print(f'pip install: {(took := time.monotonic() - began):.1f} s')
    site = root / 'root' / 'venv' / 'lib' / torch.parent.name / 'site-packages'
    (site / 'borrowed.pth').write_text('/borrowed\n')
    return root, took


def test_wheel_in_bare_root():
    """The first examples of the package's README, run where none of our Debian packages is."""
    root, _ = root_with_wheel()
    readme = (ops.ROOT / 'client' / 'python' / 'README.md').read_text()
    for number, example in enumerate(re.findall(r'```python\n(.*?)```', readme, re.DOTALL)[:2]):
        (root / 'root' / f'{number}.py').write_text(example)
        said = containers.in_root(root, 'sh', '-ec', f'cd /root && /root/venv/bin/python {number}.py')
        print(said)
        assert ('loss' in said) if number == 0 else ('went on from step 0' in said), said
    assert 'Usage' in containers.in_root(root, '/root/venv/bin/ballastctl', '--help')


def test_first_step_of_a_fine_tune_in_bare_root():
    """Hugging Face's Trainer trains as with torch's AdamW, and a killed run goes on.

    The package's README promises less than 90 s for install, import and first step. The first step with torch's AdamW is what torch and
    transformers take themselves."""
    root, seconds = root_with_wheel()
    if not (root / 'borrowed' / 'transformers').exists():
        raise ops.Skip('no transformers in build/venv; tests/python/venv.sh installs it')
    for script in (ops.ROOT / 'tests/ops/first_step.py', ops.ROOT / 'tests/python/wheel_steps.py'):
        (root / 'root' / script.name).write_text(script.read_text())
    losses = {}
    for whose in ('torch', 'ballast'):
        print(said := containers.in_root(root, 'sh', '-ec', f'cd /root && OMP_NUM_THREADS=1 venv/bin/python first_step.py {whose}'))
        losses[whose] = [float(loss) for loss in re.search(r' losses (\S+) (\S+)', said).groups()]
    imports, first_step = (float(each) for each in re.search(r'import (\S+) s, optimizer and first step (\S+) s', said).groups())
    assert imports < 1, f'import ballast.torch takes {imports} s beside torch'
    assert seconds + imports + first_step < 90, f'{seconds:.1f} s for pip, {imports} for the import, {first_step} until the first step'
    assert all(abs(ours - theirs) < 1e-3 for ours, theirs in zip(losses['ballast'], losses['torch'])), losses
    assert losses['torch'][1] < losses['torch'][0] - 0.01, losses
    steps = 'cd /root && venv/bin/python wheel_steps.py killed'
    print(containers.in_root(root, 'sh', '-c', f'{steps}; test $? = 137 && {steps} resume'))
