"""What an import says if this Python, or its torch, is not one that the package can use."""
import subprocess
import sys

import pytest


def said(script, folder):
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize('version', ['2.3.1', '1.13.0+cu117'])
def test_an_older_torch(version, tmp_path):
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch/__init__.py').write_text(f"__version__ = '{version}'\n", encoding='utf-8')
    text = said('import ballast.torch', tmp_path)
    assert f'ImportError: ballast.torch needs PyTorch 2.4 or later, and this is {version} of ' in text and 'torch/__init__.py' in text


def test_no_torch(tmp_path):
    hidden = "import sys\nsys.modules['torch'] = None\nimport ballast.torch"
    assert 'ImportError: ballast.torch needs PyTorch 2.4 or later, and' in said(hidden, tmp_path)


def test_an_older_python(tmp_path):
    older = "import sys\nsys.version_info = (3, 8, 10)\nimport ballast"
    assert 'ImportError: ballast needs Python 3.10 or later, and this is 3.8.10' in said(older, tmp_path)


def test_a_module_of_another_python(tmp_path):
    other = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == 'ballast._native' else find(name, *more)
import ballast.torch
"""
    assert 'ImportError: ballast has no native module for Python' in said(other, tmp_path)
