"""Faults that operators meet: a slow or full disk, damaged files, a rank with a slow uplink, a kernel that refuses."""

import asyncio
import contextlib
import ctypes
import os
import pathlib
import secrets
import struct
import threading

import ops

BLOCK = 4096
BATCH_MAGIC = struct.pack('<Q', 0x484354424C4C4142)  # storage/log/log_format.h, BatchHead


def group(controller):
    """A new control group, which the runner removes. A sleeper keeps it from other runners, who remove what is empty."""
    folder = pathlib.Path(f'/sys/fs/cgroup/{controller}/ballast-ops-{secrets.token_hex(4)}')
    try:
        folder.mkdir()
    except OSError as error:
        raise ops.Skip(f'no control groups (version 1) of {controller} to slow something down: {error}') from None
    ops.start('sh', '-c', f'echo 0 > {folder}/cgroup.procs; exec sleep infinity', log='sleeper.log')
    return folder


class SlowDisk:
    """A blkio group whose reads and writes are throttled, for processes whose commands begin with `into`."""

    def __init__(self):
        self.group = group('blkio')
        device = os.stat('.').st_dev
        node = pathlib.Path(f'/sys/dev/block/{os.major(device)}:{os.minor(device)}')
        # A partition has no limits of its own.
        whole = node.resolve().parent / 'dev' if (node / 'partition').exists() else node / 'dev'
        if not whole.exists():
            raise ops.Skip(f'the scratch folder is on no block device ({os.major(device)}:{os.minor(device)}) that can be slowed down')
        self.device = whole.read_text().strip()
        self.into = ['sh', '-c', f'echo 0 > {self.group}/cgroup.procs; exec "$@"', 'sh']

    def limit(self, bytes_per_second=0, operations_per_second=0):
        """0: no limit."""
        for what in ('read', 'write'):
            (self.group / f'blkio.throttle.{what}_bps_device').write_text(f'{self.device} {bytes_per_second}')
            (self.group / f'blkio.throttle.{what}_iops_device').write_text(f'{self.device} {operations_per_second}')


class Disk:
    """An ext4 on a loop device, at `folder`. Its image is sparse, so that it takes of this machine's disk what is written to it."""

    def __init__(self, folder, mebibytes):
        ops.need('mkfs.ext4')
        self.folder = pathlib.Path(folder)
        self.folder.mkdir()
        image = f'{folder}.img'
        os.truncate(os.open(image, os.O_CREAT | os.O_RDWR), mebibytes << 20)
        ops.run('mkfs.ext4', '-q', '-m', '0', '-E', 'lazy_journal_init=1', image)
        ops.run('mount', '-o', 'loop', image, self.folder)

    def fill(self, free):
        """Something else takes space until the share `free` is left."""
        state = os.statvfs(self.folder)
        with open(self.folder / 'filler', 'ab', buffering=0) as file, contextlib.suppress(OSError):
            file.writelines(bytes(1 << 20) for _ in range(int((state.f_bavail - free * state.f_blocks) * state.f_frsize) >> 20))

    def empty(self):
        (self.folder / 'filler').unlink()


class SlowUplink:
    """Proxies before servers, which pass on what a rank sends at `bytes_per_second` for each server; 0: at once."""

    def __init__(self, servers, port=7500):
        self.bytes_per_second = 0
        self.addresses = []
        loop = asyncio.new_event_loop()
        for i, server in enumerate(servers):
            self.addresses.append(f'127.0.0.1:{port + i}')
            loop.run_until_complete(asyncio.start_server(self._handler(server.listen), '127.0.0.1', port + i))
        threading.Thread(target=loop.run_forever, daemon=True).start()

    def _handler(self, address):
        host, port = address.split(':')

        async def handle(reader, writer):
            inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._pump(reader, inner_writer, True), self._pump(inner_reader, writer, False))

        return handle

    async def _pump(self, reader, writer, up):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if up and self.bytes_per_second:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                writer.write(data)
                await writer.drain()
        writer.close()


def certificate(folder, days, pair=True):
    """A certificate that signs itself, for `days`, and its key; without `pair` the key is another's. Both appear at once."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    for name in ('new', 'other'):
        ops.run('openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-days', str(days),
                '-subj', '/CN=node1', '-addext', 'subjectAltName=IP:127.0.0.1',
                '-keyout', folder / f'{name}.key', '-out', folder / f'{name}.crt')  # fmt: skip
    os.replace(folder / ('new.key' if pair else 'other.key'), folder / 'tls.key')
    os.replace(folder / 'new.crt', folder / 'tls.crt')


def pull(address, job, version, seconds=0.2):
    """A client that asks for a version of the job's first parameter, and gives up after `seconds`: gRPC by hand."""
    message = b'\x0a' + bytes([len(job)]) + job.encode()  # PullRequest.job
    for field, value in ((2, version), (3, 1), (6, 1)):  # version, content, end
        message += bytes([field << 3]) + varint(value)
    path = pathlib.Path('pull.grpc')
    path.write_bytes(b'\0' + struct.pack('>I', len(message)) + message)
    ops.run('curl', '--silent', '--http2-prior-knowledge', '--max-time', '5', '--header', 'content-type: application/grpc',
            '--header', 'te: trailers', '--header', f'grpc-timeout: {int(seconds * 1000)}m', '--data-binary', f'@{path}',
            '--output', '/dev/null', f'http://{address}/ballast.v1.StateService/Pull')  # fmt: skip


def varint(value):
    encoded = b''
    while value > 127:
        encoded, value = encoded + bytes([value & 127 | 128]), value >> 7
    return encoded + bytes([value])


def damage_copies(log):
    """Flips a bit in the first copy of every batch's records of a gradient log; the second copy stays whole. Returns how many."""
    path, count = pathlib.Path(log), 0
    with open(path, 'r+b') as file:
        for offset in range(0, path.stat().st_size, BLOCK):
            file.seek(offset)
            head = file.read(BLOCK)
            if head[:8] == BATCH_MAGIC and struct.unpack_from('<I', head, 12)[0] == 0:
                file.seek(offset + 100)
                file.write(bytes([head[100] ^ 1]))
                count += 1
    return count


def damage_all(path):
    """Flips a bit in each block of a file that is not all zeros."""
    with open(path, 'r+b') as file:
        for offset in range(0, pathlib.Path(path).stat().st_size, BLOCK):
            file.seek(offset)
            block = file.read(BLOCK)
            if any(block):
                file.seek(offset + 1000)
                file.write(bytes([block[1000] ^ 1]))


def without_io_uring():
    """For preexec_fn: io_uring_setup answers ENOSYS, as under the default profile of container engines."""
    libc = ctypes.CDLL(None, use_errno=True)
    setup, enosys = 425, 38
    # Loads the call's number; equal: refuse with ENOSYS; else allow.
    program = b''.join(struct.pack('<HBBI', *instruction) for instruction in (
        (0x20, 0, 0, 0), (0x15, 0, 1, setup), (0x06, 0, 0, 0x00050000 | enosys), (0x06, 0, 0, 0x7FFF0000)))  # fmt: skip
    buffer = ctypes.create_string_buffer(program)
    filter_ = ctypes.create_string_buffer(struct.pack('@HxxxxxxP', len(program) // 8, ctypes.addressof(buffer)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, filter_, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# Words before a command that may lock 64 KiB of memory, as in a container of a non-root user.
LITTLE_MEMLOCK = ['setpriv', '--bounding-set=-ipc_lock', '--inh-caps=-ipc_lock', 'prlimit', '--memlock=65536:65536']
