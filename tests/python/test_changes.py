"""The table of changes: each way in which a program changes parameters, modules or gradients without the optimizer counts as with
torch.optim, or is refused by a parameter's name, at each moment of a training and with each kind of job."""
import os

import pytest
import torch
from changes import GRADIENTS, WAYS
from changes_main import cells, run
from test_ranks import run_pair

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = {
    'fp32': (FP32, {}),
    'fp32, overlap': (FP32, {'overlap': True}),
    'bf16, durable, push_early': (BF16, {'durability': 'step', 'push_early': True}),
}
if os.environ.get('TEST_ROUNDS') != 'ci':
    KINDS.update({'bf16': (BF16, {}), 'fp32, durable': (FP32, {'durability': 'step'}), 'bf16, durable': (BF16, {'durability': 'step'})})
PAIRS = [(kind, way) for kind in KINDS for way in [*WAYS, *GRADIENTS]]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('durable')


@pytest.mark.filterwarnings('ignore:push_early. the gradient of parameter')
@pytest.mark.parametrize(('kind', 'way'), PAIRS, ids=[f'{kind}-{"gradient " * (way in GRADIENTS)}{way.name}' for kind, way in PAIRS])
def test_counts_or_is_refused(kind, way, folder):
    dtype, arguments = KINDS[kind]
    arguments = {**arguments, 'dram': '64MiB', 'threads': 1}
    if 'durability' in arguments:
        arguments.update(directory=folder, nvme='8GiB')
    wrong = {moment: what for moments in cells(way) for moment, what in run(way, moments, dtype, arguments) if what}
    assert not wrong


def test_on_two_ranks(tmp_path):
    run_pair('changes_main.py', tmp_path, tmp_path)
    for rank in range(2):
        count, *wrong = (tmp_path / f'changes-{rank}.txt').read_text(encoding='utf-8').splitlines()
        assert int(count) > 80
        assert not wrong
