"""The package's examples run as they are, and go on where they were."""
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / 'client/python/examples'


def run(folder, name, *arguments):
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], cwd=folder, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'lr_scheduler' not in done.stderr, done.stderr  # torch's warning that a schedule stepped before the optimizer
    return done.stdout


def test_plain_loop(tmp_path):
    pytest.importorskip('transformers')
    losses = [float(loss) for loss in re.findall(r'loss ([\d.]+)', run(tmp_path, 'plain_loop.py', '30'))]
    assert len(losses) == 3 and losses[-1] < losses[0]
    again = run(tmp_path, 'plain_loop.py', '40')
    assert re.findall(r'step (\d+)', again) == ['40']


def test_hf_trainer(tmp_path):
    pytest.importorskip('transformers')
    assert "'loss'" in run(tmp_path, 'hf_trainer.py', '20')
    run(tmp_path, 'hf_trainer.py', '30', 'resume')


def test_accelerate_loop(tmp_path):
    pytest.importorskip('accelerate')
    assert 'epoch 1: loss' in run(tmp_path, 'accelerate_loop.py', '1')
