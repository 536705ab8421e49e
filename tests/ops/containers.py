"""podman without a daemon, with storage of the test's own, and bare Debian roots."""
import os
import pathlib

import ops

# nofile and nproc: podman's defaults are above what a root without CAP_SYS_RESOURCE may set.
CONFIGURATION = '''
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4000:4000"{ulimits}]
netns = "host"
seccomp_profile = ""
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
'''


class Podman:
    """Calls of podman, and of buildah beside it; storage, sockets and configuration are in the working folder."""

    def __init__(self, ulimits=()):
        ops.need('podman', 'runc')
        self.folder = pathlib.Path('podman').absolute()
        self.folder.mkdir(exist_ok=True)
        text = CONFIGURATION.replace('{ulimits}', ''.join(f', "{limit}"' for limit in ulimits)).replace('seccomp_profile = ""\n', '')
        (self.folder / 'containers.conf').write_text(text)
        self.environment = dict(os.environ, CONTAINERS_CONF=str(self.folder / 'containers.conf'))
        # Paths of sockets are short: /run is the test's own.
        self.storage = ['--storage-driver', 'vfs', '--root', self.folder / 'storage', '--runroot', '/run/podman']

    def __call__(self, *command, **options):
        return ops.run('podman', *self.storage, '--tmpdir', '/run/podman-tmp', *command, env=self.environment, **options)


def bare_root(folder):
    """A bare Debian root at `folder` to write to; what is written lies beside it and goes with the test."""
    ops.need(ops.CACHE / 'root' / 'complete')
    folder = pathlib.Path(folder).absolute()
    parts = {name: folder.parent / f'{folder.name}-{name}' for name in ('upper', 'work')}
    for path in [folder, *parts.values()]:
        path.mkdir()
    ops.run('mount', '-t', 'overlay', 'overlay', '-o',
            f'lowerdir={ops.CACHE / "root"},upperdir={parts["upper"]},workdir={parts["work"]}', folder)
    return folder


def in_root(root, *command, **options):
    """Runs a command in the root, as in a machine of its own: its own /proc, no variables of this one."""
    environment = {'PATH': '/usr/sbin:/usr/bin:/sbin:/bin', 'HOME': '/root', 'LC_ALL': 'C.UTF-8', 'DEBIAN_FRONTEND': 'noninteractive'}
    if not (root / 'proc' / 'self').exists():
        ops.run('mount', '-t', 'proc', 'proc', root / 'proc')
    return ops.run('chroot', root, *command, env=environment, **options)


def install_server(root):
    """Installs ballast-server and what it depends on from the packages that prepare.sh has fetched."""
    cached = root / 'var/cache/apt/ballast-server.deb'
    if not cached.exists():
        raise ops.Skip('no build/ops/root/var/cache/apt/ballast-server.deb; tests/ops/prepare.sh makes it and says why it could not')
    return in_root(root, 'sh', '-ec', 'cd /var/cache/apt && dpkg --force-unsafe-io --unpack archives/*.deb ballast-server.deb'
                   ' && dpkg --configure --pending')


