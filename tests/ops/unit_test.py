"""ballastd.service under a real systemd, the first process of a bare Debian with the package ballast-server installed."""
import pathlib
import re
import subprocess
import time

import containers
import faults
import ops

UNIT = ops.DEPLOY / 'systemd' / 'ballastd.service'
EXPOSURE_MAX = 2.5


class Machine:
    """A bare Debian that has booted."""

    def __init__(self, mounts=(), data_mebibytes=0):
        """`mounts`: pairs of a folder of this machine and where it is in the other, to read. `data_mebibytes`: size of a disk for the
        server's data; 0: the data lie in the root."""
        self.root = containers.bare_root('root')
        containers.install_server(self.root)
        self.podman = containers.Podman()
        volumes = [f'{here}:{there}:ro' for here, there in mounts]
        if data_mebibytes:
            volumes.append(f'{faults.Disk("data", data_mebibytes).folder.absolute()}:/var/lib/ballast')
        self.first = ops.start('podman', *self.podman.storage, '--tmpdir', '/run/podman-tmp', 'run', '--name', 'machine', '--rm',
                               '--systemd=always', '--network', 'none', '--cap-add', 'SYS_ADMIN', '--security-opt', 'seccomp=unconfined',
                               *(f'--volume={volume}' for volume in volumes),
                               '--rootfs', self.root, '/lib/systemd/systemd', log='boot.log', env=self.podman.environment)
        ops.wait_for(lambda: self.state() in ('running', 'degraded'), 'systemd is up')

    def state(self):
        self.pid = self.podman('inspect', '--format', '{{.State.Pid}}', 'machine').strip()
        done = subprocess.run(['nsenter', '-t', self.pid, '-a', 'systemctl', 'is-system-running'], capture_output=True, text=True)
        return done.stdout.strip()

    def __call__(self, *command, **options):
        return ops.run('nsenter', '-t', self.pid, '-a', *command, **options)

    def show(self, name):
        return self('systemctl', 'show', 'ballastd', '--property', name, '--value').strip()

    def configure(self, old, new):
        path = self.root / 'etc/ballast/ballastd.yaml'
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def journal(self):
        return self('journalctl', '--no-pager', '-u', 'ballastd')


def test_verify():
    """systemd knows every key. It prints unknown ones and ends with 0, so any output is a failure."""
    ops.need('systemd-analyze')
    root = pathlib.Path('root')
    (root / 'usr/bin').mkdir(parents=True)
    (root / 'usr/bin/ballastd').symlink_to('/bin/true')
    text = UNIT.read_text().replace('/usr/bin/ballastd', '/bin/true')
    pathlib.Path('ballastd.service').write_text(text)
    said = ops.run('systemd-analyze', 'verify', './ballastd.service')
    assert not said, said
    pathlib.Path('wrong.service').write_text(text.replace('NoNewPrivileges', 'NoNewPrivilege'))
    assert 'NoNewPrivilege' in ops.run('systemd-analyze', 'verify', './wrong.service'), 'an unknown key passed'


def test_exposure():
    ops.need('systemd-analyze')
    said = ops.run('systemd-analyze', 'security', '--offline=true', UNIT)
    exposure = float(re.search(r'exposure level for ballastd.service: ([0-9.]+)', said).group(1))
    print('exposure', exposure)
    assert exposure < EXPOSURE_MAX, said


def test_life():
    """Starts, trains, is killed amid a run that ends with the same bits, stops with 0, and does not restart on bad configuration."""
    ops.need('systemd-analyze', ops.BIN / 'train_bytes_lm')
    machine = Machine()
    machine.configure('nvme: 8GiB', 'nvme: 512MiB')
    machine.configure('dram: 2GiB', 'dram: 64MiB')
    machine('systemctl', 'start', 'ballastd')  # Type=notify: returns when the server answers
    servers = '127.0.0.1:7070'
    assert 'io_uring' in machine('ballastctl', 'status', '--servers', servers), 'the filter of system calls forbids io_uring'
    assert machine.show('ActiveState') == 'active' and machine.show('User') == 'ballast'
    main = machine.show('MainPID')
    held = machine('cat', f'/proc/{main}/status')
    for line in ('CapEff:\t0000000000000000', 'CapBnd:\t0000000000000000', 'NoNewPrivs:\t1', 'Seccomp:\t2'):
        assert line in held, (line, held)

    # The trainer runs in the machine's network, from this one's files.
    into = ['nsenter', '-t', machine.pid, '--net']
    trainer = ops.start(*into, *ops.trainer(servers, '--job', 'unit', '--dump-master', 'got'), log='trainer.log')
    ops.wait_for(lambda: ops.committed(servers, *into) >= 8, 'step 8')
    machine('sh', '-c', f'kill -9 {main}')
    ops.wait_for(lambda: machine.show('NRestarts') == '1' and machine.show('ActiveState') == 'active', 'the server is back')
    assert machine.show('MainPID') != main
    ops.ended(trainer, 'trainer.log')
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    assert 'recovered' in machine.journal()

    began = time.monotonic()
    machine('systemctl', 'stop', 'ballastd')
    print(f'stopped in {time.monotonic() - began:.1f} s')
    assert machine.show('ExecMainStatus') == '0' and machine.show('Result') == 'success' and machine.show('ActiveState') == 'inactive'

    machine.configure('dram: 64MiB', 'dram: 64MB of it')
    machine('systemctl', 'start', 'ballastd', fails=True)
    assert machine.show('ExecMainStatus') == '2' and machine.show('NRestarts') == '0', machine.journal()
    assert machine.show('ActiveState') == 'failed' and 'dram' in machine.journal()
