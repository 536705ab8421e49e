"""What a server of the trainer's own is asked for is checked against the machine before it starts."""
import os
import warnings

import pytest

from ballast import place
from ballast.errors import Error


def refused(*, match, directory=None, dram=None, nvme=None):
    before = set(os.listdir('/tmp'))
    with pytest.raises(Error, match=match):
        place.make(directory, dram, nvme)
    assert {name for name in set(os.listdir('/tmp')) - before if name.startswith('ballast-')} == set(), 'no directory stays'


def test_a_directory_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    refused(directory=tmp_path / 'file', match='directory=.*expected a folder that can be made and written, came: File exists')
    refused(directory='/proc/ballast', match='expected a folder that can be made and written')


def test_budgets_that_the_machine_has_not_are_refused(tmp_path):
    refused(dram='900TiB', match=r'dram: 9\.22e\+05 GiB were asked for, there are .* of memory here: lower dram')
    refused(directory=tmp_path, nvme='900TiB', match=r'nvme: 9\.22e\+05 GiB were asked for, the disk of .* has .* free: lower nvme')
    refused(nvme='900TiB', match='nvme: .* were asked for')


def test_what_jobs_hold_there_is_not_asked_for_twice(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with open(tmp_path / 'nvme.tier', 'wb') as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 30)
    assert place.make(tmp_path, '64MiB', free - (1 << 28)).nvme == free - (1 << 28)


@pytest.mark.skipif(not os.path.ismount('/dev/shm'), reason='needs a file system in memory')
def test_nvme_in_memory_is_warned_of():
    with pytest.warns(UserWarning, match=r"directory='/dev/shm' is in memory \(tmpfs\)"):
        place.make('/dev/shm', '64MiB', '1MiB')


def test_more_memory_than_is_free_is_warned_of(monkeypatch):
    monkeypatch.setattr(place, '_limits', lambda: (1 << 40, 1 << 28))
    with pytest.warns(UserWarning, match='dram: 1 GiB were asked for, 0.25 GiB of memory are available now'):
        made = place.make(None, '1GiB', None)
    place.temporary.remove(made.directory)


def test_a_container_has_what_its_limit_leaves(monkeypatch):
    numbers = {'/sys/fs/cgroup/memory.max': 8 << 30, '/sys/fs/cgroup/memory.current': 3 << 30}
    monkeypatch.setattr(place, '_number_in', numbers.get)
    monkeypatch.setattr(place, '_memory', lambda: {'MemTotal': 64 << 30, 'MemAvailable': 60 << 30})
    assert place._limits() == (8 << 30, 5 << 30)
    assert place.budgets(None, None, None) == (4 << 30, 0)


def test_staging_is_a_part_of_the_budget(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert place.make(tmp_path, '64MiB', 0).staging == 0
        assert place.make(tmp_path, '128MiB', '1MiB').staging == 48 << 20
        assert place.make(tmp_path, '256MiB', '1MiB').staging == 64 << 20
        assert place.make(tmp_path, '1GiB', '1MiB').staging == 96 << 20
