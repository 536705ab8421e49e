"""Scripts in processes of their own."""
import os
import pathlib
import subprocess
import sys
import textwrap

HERE = pathlib.Path(__file__).parent

HEAD = f'''
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever runs the tests ignores it
import torch
sys.path.insert(0, {str(HERE)!r})
from scripts import batches, loss_of, mlp
import ballast, ballast.torch as bt
torch.manual_seed(5)
def make(model, **more):
    arguments = dict(lr=1e-2, directory='state', dram='128MiB', nvme='1GiB', threads=2)
    return bt.AdamW(model.named_parameters(), **{{**arguments, **more}})
'''


def run(folder, body, expect=0, seconds=300, **variables):
    script = folder / 'script.py'
    script.write_text(HEAD + textwrap.dedent(body), encoding='utf-8')
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
                          env={**os.environ, **variables})
    assert done.returncode == expect, f'{done.returncode}\n{done.stdout}\n{done.stderr}'
    return done
