"""pytest, or exit code 77 (skipped) where torch or pytest are not there, or where every test is skipped.

Usage: run_pytest.py [pytest's arguments...] FILE...   Each file runs in a process of its own, a fork of one that has imported torch.
"""
import importlib.util
import os
import sys
import time

missing = [name for name in ('torch', 'pytest') if importlib.util.find_spec(name) is None]
if missing:
    print(f'skipped: {", ".join(missing)} not installed for {sys.executable}; tests/run.sh makes an environment with them')
    sys.exit(77)

os.environ['OPENBLAS_NUM_THREADS'] = '1'  # a thread that a fork would not have
import own_process  # noqa: E402


class Ran:
    """Tells whether a test ran."""
    any = False

    def pytest_runtest_logreport(self, report):
        self.any |= report.when == 'call' and not report.skipped


def run(arguments):
    own_process.fork_from_here()
    import pytest  # noqa: PLC0415 - the fork shall not have it
    ran = Ran()
    # Directories of tests hold gigabytes: those of failed ones are enough to keep.
    code = pytest.main(['-rs', '-p', 'no:cacheprovider', '-o', 'tmp_path_retention_policy=failed', *arguments], plugins=[ran])
    return code if code or ran.any else 77


def run_each(options, files):
    """77 where all are skipped, 1 where one failed."""
    own_process.import_all()
    codes = {}
    for file in files:
        began = time.monotonic()
        print(f'--- {file}', flush=True)
        pid = os.fork()
        if pid == 0:
            own_process.end(run([*options, file]))
        _, status, used = os.wait4(pid, 0)
        codes[file] = os.waitstatus_to_exitcode(status)
        print(f'--- {time.monotonic() - began:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of processors, exit code {codes[file]}',
              flush=True)
    failed = [file for file, code in codes.items() if code not in (0, 77)]
    print('\n'.join(['failed:', *failed]) if failed else 'no file failed')
    return 1 if failed else min(codes.values())


files = [each for each in sys.argv[1:] if each.endswith('.py')]
if len(files) < 2:
    sys.exit(run(sys.argv[1:]))
sys.exit(run_each([each for each in sys.argv[1:] if each not in files], files))
