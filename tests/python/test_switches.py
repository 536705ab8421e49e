"""The public surface under each process-wide switch of torch: to the last bit what it gives without."""
import pytest
import torch
from own_process import run
from switches import FRESH, OPERATIONS, SWITCHES

CELLS = [(switch, operation) for switch in (*SWITCHES, *FRESH) for operation in OPERATIONS]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """switch -> operation -> what it gave. One process for all switches that may be set and taken back, one for each that must be set
    before there is a server."""
    folder = tmp_path_factory.mktemp('switches')
    found = {}
    for name, switches in [('all', ('none', *SWITCHES)), *((fresh, (fresh,)) for fresh in FRESH)]:
        run(folder, f'''
            import switches
            torch.save(switches.run_all({switches!r}, {str(folder / name)!r}), {str(folder / name) + '.pt'!r})
            ''')
        found.update(torch.load(folder / f'{name}.pt', weights_only=False))
    return found


def same(a, b):
    """To the last bit, and of one dtype and device."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a.reshape(-1).view(torch.uint8),
                                                                                           b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize('switch, operation', CELLS, ids=lambda value: value)
def test_changes_nothing(switch, operation, results):
    expected, came = results['none'][operation], results[switch].get(operation, 'it did not come to that')
    assert not isinstance(expected, str) or not expected.startswith('Traceback'), expected
    assert same(expected, came), came if isinstance(came, str) else f'expected {expected}, came {came}'


def test_cells():
    assert len(CELLS) == len(set(CELLS)) == (len(SWITCHES) + len(FRESH)) * len(OPERATIONS)
    print(f'{len(SWITCHES) + len(FRESH)} switches x {len(OPERATIONS)} operations = {len(CELLS)} cells')
