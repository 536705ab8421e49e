"""Faults that operators meet: a slow or full disk, damaged files, a slow rank, a kernel that refuses."""

import contextlib
import ctypes
import os
import pathlib
import struct

import ops

BLOCK = 4096
BATCH_MAGIC = struct.pack('<Q', 0x484354424C4C4142)  # storage/log/log_format.h, BatchHead


class SlowDisk:
    """A blkio group whose reads and writes are throttled; slow() before the processes that it is for are under way, or at any time."""

    def __init__(self, name='ballast-ops-disk'):
        self.group = pathlib.Path('/sys/fs/cgroup/blkio') / name
        with contextlib.suppress(FileExistsError):
            try:
                self.group.mkdir()
            except OSError as error:
                raise ops.Skip(f'no blkio cgroups (version 1) to slow a disk down: {error}') from None
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


class SmallDisk:
    """An ext4 of a few MiB on a loop device, at `folder`."""

    def __init__(self, folder, mebibytes):
        ops.need('mkfs.ext4')
        self.folder = pathlib.Path(folder)
        self.folder.mkdir()
        image = f'{folder}.img'
        os.truncate(os.open(image, os.O_CREAT | os.O_RDWR), mebibytes << 20)
        ops.run('mkfs.ext4', '-q', '-m', '0', image)
        ops.run('mount', '-o', 'loop', image, self.folder)

    def fill(self, free):
        """Something else takes space until the share `free` is left."""
        state = os.statvfs(self.folder)
        with open(self.folder / 'filler', 'ab', buffering=0) as file, contextlib.suppress(OSError):
            file.writelines(bytes(1 << 20) for _ in range(int((state.f_bavail - free * state.f_blocks) * state.f_frsize) >> 20))

    def empty(self):
        (self.folder / 'filler').unlink()


class SlowRank:
    """A cpu group: what runs in it has the share `processors` of one."""

    def __init__(self, name='ballast-ops-rank'):
        self.group = pathlib.Path('/sys/fs/cgroup/cpu') / name
        with contextlib.suppress(FileExistsError):
            try:
                self.group.mkdir()
            except OSError as error:
                raise ops.Skip(f'no cpu cgroups (version 1) to slow a rank down: {error}') from None

    def take(self, process, processors):
        (self.group / 'cgroup.procs').write_text(str(process.pid))
        self.limit(processors)

    def limit(self, processors):
        """None: no limit."""
        period = 20000
        (self.group / 'cpu.cfs_period_us').write_text(str(period))
        (self.group / 'cpu.cfs_quota_us').write_text(str(-1 if processors is None else int(period * processors)))


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
