"""pytest, or exit code 77 (skipped) with a word where torch or pytest are not there."""
import importlib.util
import sys

missing = [name for name in ('torch', 'pytest') if importlib.util.find_spec(name) is None]
if missing:
    print(f'skipped: {", ".join(missing)} not installed for {sys.executable}; tests/run.sh makes an environment with them')
    sys.exit(77)

import pytest  # noqa: E402

# Directories of tests hold gigabytes: those of failed ones are enough to keep.
sys.exit(pytest.main(['-p', 'no:cacheprovider', '-o', 'tmp_path_retention_policy=failed', *sys.argv[1:]]))
