"""ZeRO++ of shard(): gathers and reductions of 8 bits within their bounds, and the second partition to the bit, on four ranks."""
import pytest
import torch
from conftest import two_state_servers
from test_shard import GATHERS, UNITS, check_near, run
from zeropp_main import FEW, STEPS

from ballast.torch.sharding.collectives import BLOCK, quantized, restored

TRAINED = ['exact', 'second', 'exact_accumulation', 'second_accumulation', 'second_uneven', 'gather', 'reduce', 'every']
REST = ['gathered_values', 'reduced_values', 'not_finite', 'refused']


@pytest.fixture(scope='module')
def four(tmp_path_factory):
    return run([*TRAINED, *REST], tmp_path_factory.mktemp('four'), world=4, script='zeropp_main.py')


@pytest.mark.parametrize('scale', [1e-40, 1e-37, 1e-30, 1e-3, 1.0, 1e30, 5e37])
def test_an_element_is_off_by_a_254th_of_its_block(scale):
    values = torch.randn(10 * BLOCK + 7, generator=torch.Generator().manual_seed(1)) * scale
    values[:BLOCK] = 0
    came = restored(*quantized(values), len(values))
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    bounds = (padded.abs().amax(1) / 254 * (1 + 1e-5) + 6e-39).repeat_interleave(BLOCK)[:len(values)]
    assert ((came - values).abs() <= bounds).all()
    assert (came[:BLOCK] == 0).all() and (came != values).any()


@pytest.mark.parametrize('bad', [float('inf'), float('-inf'), float('nan')])
def test_what_is_not_finite_stays_so(bad):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = bad
    came = restored(*quantized(values), len(values)).view(-1, BLOCK)
    assert came[1].isnan().all() and came[0].isfinite().all() and came[2].isfinite().all()


@pytest.mark.parametrize(('name', 'steps'), [('', STEPS), ('_accumulation', FEW)])
def test_second_partition_has_the_bits_of_one(four, name, steps):
    """And each unit is pulled once a step, however often it is gathered."""
    for (exact, exact_stats), (second, stats) in zip(four[f'exact{name}'], four[f'second{name}']):
        assert torch.equal(exact[1][0], second[1][0])
        assert all(torch.equal(a, b) for a, b in zip(exact[1][2], second[1][2]))
        assert stats['unit_pulls'] <= UNITS * (steps + 1) < exact_stats['unit_pulls']
        assert stats['node_bytes'] > 0


def test_second_partition_that_does_not_divide(four):
    for results, _ in four['second_uneven']:
        check_near(results, 'second_uneven')


def test_bytes_between_ranks(four):
    """Of float32's a 3.76th: a byte and a 16th for four, and padding to blocks."""
    def of(name, way):
        return [stats[way] for _, stats in four[name]]
    for exact, gather, second, every in zip(*(of(name, 'gather_bytes') for name in ('exact', 'gather', 'second', 'every'))):
        assert exact / 3.77 < gather < exact / 3.6
        units = second / exact  # the second partition's gathers are not among them
        assert UNITS / GATHERS - 0.15 < units < UNITS / GATHERS + 0.15
        assert second / 3.77 < every < second / 3.6
    # As many bytes as a gather of each unit, in 8 bits.
    for reduce, second in zip(of('reduce', 'reduce_bytes'), of('second', 'gather_bytes')):
        assert second / 3.9 < reduce < second / 3.5
    # The node's other rank sends half of each unit that is gathered again: 2 quarters of which a gather brings 3.
    for within, exact, second in zip(of('second', 'node_bytes'), of('exact', 'gather_bytes'), of('second', 'gather_bytes')):
        assert within == pytest.approx((exact - second) * 2 / 3, rel=0.1)


@pytest.mark.parametrize('name', ['gather', 'reduce', 'every'])
def test_trains_in_8_bits(four, name):
    for (theirs, came), _ in four[name]:
        assert not torch.equal(theirs[0], came[0])
        assert came[0][-5:].mean().item() == pytest.approx(theirs[0][-5:].mean().item(), rel=0.02)


@pytest.mark.parametrize('name', ['gathered_values', 'reduced_values'])
def test_errors_are_within_their_bounds(four, name):
    for pairs in four[name]:
        assert len(pairs) == 3
        for error, bound in pairs:
            assert 0 < error <= bound * (1 + 1e-4)


def test_gradients_that_are_not_finite_skip_the_step(four):
    assert four['not_finite'] == [[True, True]] * 4


def test_second_partition_follows_a_rollback(tmp_path):
    with two_state_servers(tmp_path / 'servers') as servers:
        done = run(['goes_back'], tmp_path, world=4, script='zeropp_main.py', BALLAST_SERVERS=servers)
    for losses in done['goes_back']:
        assert losses[0] == losses[1] == losses[2] and losses[0][0] != losses[0][-1]


REFUSED = {
    'gather': "shard(gather='q4'): expected None or 'q8'",
    'reduce': "shard(reduce=torch.bfloat16): expected None or 'q8'; dtypes of gathers and reductions are mp_policy's",
    'second': 'expected a DeviceMesh of one dimension that has this rank',
    'apart': 'but ranks [0, 1, 2, 3] are not all among ranks',
    'mixed': "has parameters of several dtypes, which FSDP2 gathers as bytes",
    'gather beside TP': 'Beside tensor or expert parallelism, 8 bits would round replicas differently; leave them out',
    'reduce beside TP': 'Beside tensor or expert parallelism, 8 bits would round replicas differently; leave them out',
}


@pytest.mark.parametrize('what', REFUSED)
def test_bad_use(four, what):
    for said in four['refused']:
        assert REFUSED[what] in said[what], said[what]
