"""Machines on one network: network namespaces that a bridge joins. A test says which of them reach each other."""
import subprocess

import ops

_NOWHERE = '02:00:00:00:00:99'  # no machine's link address: the bridge brings a frame for it to all, and none takes it


class Network:
    """The test itself reaches all machines, always. All of it ends with the test's own namespace."""

    def __init__(self, *names):
        ops.need('ip')
        self._addresses = {name: f'10.1.0.{number}' for number, name in enumerate(names, 1)}
        try:
            ops.run('ip', 'link', 'add', 'br0', 'type', 'bridge')
            ops.run('ip', 'netns', 'add', names[0])
            ops.run('ip', 'netns', 'del', names[0])
        except AssertionError as error:
            raise ops.Skip(f'no bridge or no network namespace can be made here: {error}') from error
        ops.run('ip', 'address', 'add', '10.1.0.254/24', 'dev', 'br0')
        ops.run('ip', 'link', 'set', 'br0', 'up')
        for name, address in self._addresses.items():
            ops.run('ip', 'netns', 'add', name)
            ops.run('ip', 'link', 'add', f'to-{name}', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
            ops.run('ip', 'link', 'set', f'to-{name}', 'master', 'br0', 'up')
            ops.run('ip', '-n', name, 'address', 'add', f'{address}/24', 'dev', 'eth0')
            for interface in ('lo', 'eth0'):
                ops.run('ip', '-n', name, 'link', 'set', interface, 'up')

    def address(self, name):
        return self._addresses[name]

    def on(self, name, *command):
        """The command line that runs `command` on the machine; its process is the command itself."""
        return ['ip', 'netns', 'exec', name, *command]

    def start(self, name, *command, log):
        return ops.start(*self.on(name, *command), log=log)

    def cut(self, some, others):
        """No packet goes between one of `some` and one of `others` any more, and nobody is told so."""
        for one, other in self._pairs(some, others):
            ops.run('ip', '-n', one, 'neighbour', 'replace', self._addresses[other], 'lladdr', _NOWHERE, 'dev', 'eth0', 'nud', 'permanent')

    def join(self, some, others):
        """Ends a cut."""
        for one, other in self._pairs(some, others):
            ops.run('ip', '-n', one, 'neighbour', 'del', self._addresses[other], 'dev', 'eth0')

    def reaches(self, one, other, port):
        """Whether a connection comes about within half a second."""
        probe = f'import socket; socket.create_connection(("{self._addresses[other]}", {port}), 0.5)'
        return subprocess.run(self.on(one, 'python3', '-c', probe), capture_output=True, check=False).returncode == 0

    @staticmethod
    def _pairs(some, others):
        return [pair for one in some for other in others for pair in ((one, other), (other, one))]
