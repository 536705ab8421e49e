"""What a server of the trainer's own is asked for is checked against the machine before it starts."""
import os
import warnings

import pytest

from ballast import place
from ballast.errors import Error


def refused(*, match, directory=None, dram=None, nvme=None):
    made = []
    make = place.temporary.make
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Error, match=match):
        patch.setattr(place.temporary, 'make', lambda: made.append(make()) or made[-1])
        place.make(directory, dram, nvme)
    assert not any(os.path.exists(each) for each in made), 'no directory stays'


def test_a_directory_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    refused(directory=tmp_path / 'file', match='expected a folder that can be created and written to; the system says: File')
    refused(directory='/proc/ballast', match='expected a folder that can be created and written to')


def test_budgets_that_the_machine_has_not_are_refused(tmp_path):
    refused(dram='900TiB', match=r'dram: 9\.22e\+05 GiB were asked for, but this machine or its container has .* of memory; lower dram')
    refused(directory=tmp_path, nvme='900TiB', match=r'nvme: 9\.22e\+05 GiB were asked for, but the disk of .* has only .* free; lower')
    refused(nvme='900TiB', match='nvme: .* were asked for')


def test_what_jobs_hold_there_is_not_asked_for_twice(tmp_path, monkeypatch):
    """And nothing else there counts as theirs. A job that goes on may need no more than it has: beyond that is warned of."""
    for name in ('nvme.tier', 'log-job', 'dataset.bin'):
        with open(tmp_path / name, 'wb') as file:
            os.posix_fallocate(file.fileno(), 0, 64 << 20)
    monkeypatch.setattr(place.shutil, 'disk_usage', lambda _: type('Usage', (), {'free': 1 << 30}))
    asked = (1 << 30) + (128 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert place.make(tmp_path, '256MiB', asked).nvme == asked
    with pytest.warns(UserWarning, match='nvme: .* were asked for, .* has only 1 GiB free. Jobs in this directory already hold 0.125 GiB'):
        place.make(tmp_path, '256MiB', asked + (32 << 20))


@pytest.mark.skipif(not os.path.ismount('/dev/shm'), reason='needs a file system in memory')
def test_nvme_in_memory_is_warned_of():
    with pytest.warns(UserWarning, match=r"directory='/dev/shm' lies in memory \(tmpfs\)"):
        place.make('/dev/shm', '64MiB', '1MiB')


def test_more_memory_than_is_free_is_warned_of(monkeypatch):
    monkeypatch.setattr(place, '_limits', lambda: (1 << 40, 1 << 28))
    with pytest.warns(UserWarning, match='dram: 1 GiB were asked for, but only 0.25 GiB of memory are free now'):
        made = place.make(None, '1GiB', None)
    place.temporary.remove(made.directory)


@pytest.mark.parametrize('lines, limited, names', [
    ('0::/slurm/job_7/step_0\n', 'slurm/job_7', ('memory.max', 'memory.current', 'inactive_file')),
    ('0::/\n', '', ('memory.max', 'memory.current', 'inactive_file')),
    ('4:memory:/docker/0123\n3:cpu,cpuacct:/\n', 'memory', ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'))])
def test_a_cgroup_has_what_its_limit_leaves(lines, limited, names, tmp_path, monkeypatch):
    """Its own or one above; within a container, whose path is not there, the root. Page cache is free."""
    folder = tmp_path / 'cgroup' / limited
    folder.mkdir(parents=True)
    (tmp_path / 'self').write_text(lines)
    for name, value in zip(names, (8 << 30, 7 << 30)):
        (folder / name).write_text(f'{value}\n')
    (folder / 'memory.stat').write_text(f'anon 12\n{names[2]} {4 << 30}\n')
    cgroups = place._cgroups
    monkeypatch.setattr(place, '_cgroups', lambda: cgroups(str(tmp_path / 'self'), str(tmp_path / 'cgroup')))
    monkeypatch.setattr(place, '_memory', lambda: {'MemTotal': 64 << 30, 'MemFree': 1 << 30, 'MemAvailable': 60 << 30})
    assert place._limits() == (8 << 30, 5 << 30)
    assert place.budgets(None, None, None) == (4 << 30, 0)


def test_a_budget_that_staging_would_use_up_is_refused(tmp_path):
    refused(directory=tmp_path, dram='16MiB', nvme='1MiB', match='dram: 0.0156 GiB is too little: .* take 0.0508 GiB')
    refused(directory=tmp_path, dram=0, nvme='1MiB', match='dram: 0 GiB is too little: the buffers')


def test_the_kind_of_a_file_system(tmp_path):
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / 'mountinfo'
    mounts.write_text(f'1 2 0:999 / /a\\040b rw - tmpfs  rw\n1 2 {os.major(device)}:{os.minor(device)} / / rw shared:1 - ext4 /dev/x rw\n')
    assert place._file_system(tmp_path, mounts) == 'ext4'
    assert place._file_system(tmp_path, tmp_path / 'none') == ''
