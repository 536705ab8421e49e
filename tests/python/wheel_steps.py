"""Some steps of AdamW on an embedded server with a directory, then SIGKILL; or, with `resume`, the rest of them.

Usage: wheel_steps.py DIRECTORY [resume]
Runs on each Python that the wheel is for. Where torch is not installed, the steps go through the native module alone.
"""
import array
import importlib.util
import os
import signal
import sys

import ballast
from ballast import _native

KILLED_AFTER, STEPS = 3, 6


def native_steps(directory: str, resume: bool) -> float:
    values = array.array('f', [1.0] * 1000)
    options = _native.OpenOptions()
    options.job, options.durability, options.resume = 'native', 'step', 'must' if resume else 'never'
    server = _native.Server(directory, 256 << 20, 512 << 20, 1)
    session = _native.Session.open(options, [_native.Tensor('weight', 'unit', [10, 100], 0)], server, None)
    if resume:
        session.pull([values])
    else:
        session.initialise([values])
    assert session.version == (KILLED_AFTER if resume else 0), session.version
    group = _native.GroupHyper()
    group.learning_rate, group.weight_decay = 0.25, 0.0
    for step in range(session.version, STEPS if resume else KILLED_AFTER):
        report = session.step([array.array('f', [step + 1.0] * 1000)], [values], [group])
        assert report.version == step + 1 and abs(report.norm - (step + 1) * 1000**0.5) < 1e-3, (report.version, report.norm)
    if not resume:
        os.kill(os.getpid(), signal.SIGKILL)
    session.close()
    server.stop()
    assert len(set(values)) == 1
    return values[0]


def torch_steps(directory: str, resume: bool) -> float:
    import torch

    import ballast.torch

    model = torch.nn.Linear(100, 10, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = ballast.torch.AdamW(model.parameters(), lr=0.25, weight_decay=0, directory=directory, dram='256MiB', nvme='512MiB',
                                    resume='must' if resume else 'never')
    start, _ = optimizer.resume()
    assert start == (KILLED_AFTER if resume else 0), start
    for step in range(start, STEPS if resume else KILLED_AFTER):
        model.weight.grad = torch.full_like(model.weight, step + 1.0)
        optimizer.step()
    if not resume:
        os.kill(os.getpid(), signal.SIGKILL)
    return model.weight[0, 0].item()


def reference() -> float:
    """AdamW of one number."""
    value, first, second = 1.0, 0.0, 0.0
    for t in range(1, STEPS + 1):
        first, second = 0.9 * first + 0.1 * t, 0.999 * second + 0.001 * t * t
        value -= 0.25 * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)) ** 0.5 + 1e-8)
    return value


def main() -> None:
    directory, resume = sys.argv[1], sys.argv[2:] == ['resume']
    has_torch = importlib.util.find_spec('torch') is not None
    ended = (torch_steps if has_torch else native_steps)(directory, resume)
    assert abs(ended - reference()) < 1e-5, (ended, reference())
    assert _native.__file__.endswith('_native.abi3.so'), _native.__file__
    how = 'optimizer steps' if has_torch else 'steps of the native module (torch is not installed)'
    print(f'wheel: Python {sys.version.split()[0]}, ballast {ballast.__version__}: {STEPS} {how}, killed after {KILLED_AFTER}')


main()
