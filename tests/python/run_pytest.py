"""pytest, or exit code 77 (skipped) where torch or pytest are not there, or where every test is skipped."""
import importlib.util
import os
import sys

missing = [name for name in ('torch', 'pytest') if importlib.util.find_spec(name) is None]
if missing:
    print(f'skipped: {", ".join(missing)} not installed for {sys.executable}; tests/run.sh makes an environment with them')
    sys.exit(77)

os.environ['OPENBLAS_NUM_THREADS'] = '1'  # a thread that a fork would not have
import own_process  # noqa: E402

own_process.fork_from_here()
import pytest  # noqa: E402


class Ran:
    """Tells whether a test ran."""
    any = False

    def pytest_runtest_logreport(self, report):
        self.any |= report.when == 'call' and not report.skipped


ran = Ran()
# Directories of tests hold gigabytes: those of failed ones are enough to keep.
code = pytest.main(['-rs', '-p', 'no:cacheprovider', '-o', 'tmp_path_retention_policy=failed', *sys.argv[1:]], plugins=[ran])
sys.exit(code if code or ran.any else 77)
