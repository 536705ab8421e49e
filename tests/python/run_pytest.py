"""pytest, or exit code 77 (skipped) with a word where torch or pytest are not there."""
import importlib.util
import sys

missing = [name for name in ('torch', 'pytest') if importlib.util.find_spec(name) is None]
if missing:
    print(f'skipped: {", ".join(missing)} not installed for {sys.executable}; tests/run.sh makes an environment with them')
    sys.exit(77)

import pytest  # noqa: E402

sys.exit(pytest.main(['-p', 'no:cacheprovider', *sys.argv[1:]]))
