"""Ways that state leaves a job and comes back x durable or not x one rank, DDP, FSDP2 x the same parameters or others: as torch.optim where
torch defines it, else an error or a warning that names a parameter; never a silent difference. The cells are state_ways.py's."""
import re

import pytest
import state_ways
import torch
from test_ranks import run_ranks

import ballast.errors

LATER, GONE = r"'3\.(weight|bias)'", r"'2\.(weight|bias)'"


def expected(durability, way, order):
    """(what comes of it, what is said)."""
    durable, full, torchs = durability == 'step', 'full' in way and way in state_ways.DSD, way in state_ways.DSD
    if way == 'torch.optim':  # it has no names
        refused = {'fewer here': ('raised', 'group 0 has 6 parameters, here 4'),
                   'more here': ('raised', 'group 0 has 6 parameters, here 8')}
        return refused.get(order, ('warned', 'went to parameters by their places, as in torch.optim'))
    if 'order' in order:
        return 'equal', ''
    if order == 'fewer here':
        if durable and full and 'rank 0' not in way:
            return 'raised', 'KeyError.*param_groups'  # torch's own, whose full states have all parameters
        # torch's functions take what there is; a job has all of its tensors or is not opened.
        return ('equal', '') if torchs and not durable else ('raised', GONE)
    if way == 'resume' or (durable and (full or way == 'get_state_dict flat')):
        return 'warned', f'no state of 2 parameters, {LATER} among them; the next step starts'
    if way.startswith('dcp') and (way == 'dcp flat' or not durable):
        return 'raised', r'Missing key in checkpoint state_dict: \S+\.3\.weight'
    return 'raised', LATER


def check(cells):
    wrong = []
    for (label, durability, way, order), came in cells.items():
        what, said = came if isinstance(came, tuple) else (came, '')
        to_be, words = expected(durability, way, order)
        if what != to_be or not re.search(words, said, re.S):
            wrong.append(f'{label}, {durability}, {way}, {order}: {what} {said!r}; expected {to_be} {words!r}')
    assert not wrong, '\n'.join(wrong)


@pytest.fixture
def server(tmp_path):
    with state_ways.server(tmp_path / 'server') as address:
        yield address


def test_a_clone_may_be_called_ballast():
    assert not state_ways.ours('/home/me/ballast/build/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/state_dict.py')
    assert not state_ways.ours(torch.__file__)
    assert state_ways.ours(ballast.errors.__file__)
    assert state_ways.ours(state_ways.__file__)


def test_one_rank(server, tmp_path):
    cells = state_ways.all_cells('one', lambda model: model, server, str(tmp_path))
    check(cells)
    assert len(cells) == 104


def test_two_ranks(server, tmp_path):
    mine, other = run_ranks('ways', tmp_path, servers=server)[0]
    check(mine)
    check(other)
    assert len(mine) == len(other) == 64 + 111
