"""Four ranks whose parameters are placed in every way: the optimizer against torch's on the same model."""
import os
import pathlib

import pytest
import torch
from own_process import Process, free_port

HERE = pathlib.Path(__file__).parent
WORLD = 4
STEPS = 30 if os.environ.get('TEST_ROUNDS') == 'full' else 4
CASES = ['fsdp2', 'uneven', 'hsdp', 'last_dimension', 'tensor_parallel', 'tensor_by_data_parallel', 'sequence_parallel',
         'fsdp_by_tensor_parallel', 'pipeline_gpipe', 'pipeline_1f1b', 'experts_by_fsdp', 'plain_experts']

# Data parallelism by hand is no shard()'s.
SHARDED = [name for name in CASES if name != 'tensor_by_data_parallel']
if os.environ.get('TEST_ROUNDS') != 'full':  # those of which others are made, and second schedules, come with full
    CASES = [name for name in CASES if name not in ('fsdp2', 'tensor_parallel', 'pipeline_gpipe')]
    SHARDED = ['uneven', 'hsdp', 'fsdp_by_tensor_parallel', 'pipeline_1f1b', 'experts_by_fsdp', 'plain_experts']


def run_four(cases, folder, script='placed_main.py', **variables):
    """Processes of four ranks, which run the cases one after another."""
    port = str(free_port())
    return [Process(HERE / script, folder, folder / f'{rank}.log', ','.join(cases), folder, MASTER_ADDR='127.0.0.1',
                    MASTER_PORT=port, WORLD_SIZE=str(WORLD), RANK=str(rank), LOCAL_RANK=str(rank), PLACED_STEPS=str(STEPS), **variables)
            for rank in range(WORLD)]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('placed')
    ranks = run_four([*CASES, 'norms', 'other_divisions', 'state_of_stages', 'kept_back', 'differing'], folder)
    codes = [rank.wait(1500) for rank in ranks]
    assert codes == [0] * WORLD, '\n'.join(rank.output for rank in ranks)
    return folder


@pytest.fixture(scope='module')
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp('sharded')
    ranks = run_four([f'sharded_{name}' for name in SHARDED], folder)
    codes = [rank.wait(1500) for rank in ranks]
    assert codes == [0] * WORLD, '\n'.join(rank.output for rank in ranks)
    return folder


def compare(ours, theirs):
    """Losses and this rank's parts after them."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert theirs[1].keys() == ours[1].keys()
    for key, value in theirs[1].items():
        torch.testing.assert_close(ours[1][key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f'{key}: {text}')


@pytest.mark.parametrize('name', CASES)
def test_trains_as_torchs(results, name):
    for theirs, ours in own_of(results, name):
        compare(ours, theirs)


@pytest.mark.parametrize('name', SHARDED)
def test_trains_from_servers_as_torchs(sharded, name):
    for theirs, ours, kept in own_of(sharded, f'sharded_{name}'):
        compare(ours, theirs)
        assert torch.equal(kept[0], theirs[0][:1]), 'the first forward pass has the bits of FSDP2'
        for key, gradient in theirs[2].items():
            assert ours[2][key] is None, f'{key}: its gradient stayed in the trainer'
            assert torch.equal(kept[2][key], gradient), f'{key}: the first backward pass has the bits of FSDP2'


def own_of(results, name):
    for rank in range(WORLD):
        came = torch.load(results / f'{name}-{rank}.pt', weights_only=False)
        assert not isinstance(came, str), f'rank {rank}: {came}'
        yield came


def check_parameters(ours, theirs):
    assert ours
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key].detach(), rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f'{key}: {text}')


def test_norm_and_skip_cover_all_stages(results):
    for losses, norms, parameters, skipped, (their_losses, their_norms, theirs) in own_of(results, 'norms'):
        torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norms, their_norms.to(norms.dtype), rtol=1e-5, atol=0)
        assert (their_norms > 0.02).all(), 'all steps are clipped'
        check_parameters(parameters, theirs)
        assert skipped


def test_goes_on_under_other_divisions(results):
    for losses, parameters, (their_losses, _, theirs) in own_of(results, 'other_divisions'):
        torch.testing.assert_close(losses, their_losses, rtol=1e-5, atol=1e-5)
        check_parameters(parameters, theirs)


def test_replicas_that_differ(results):
    """Under every wrapping that has replicas: nobody is overwritten without a word."""
    for rank in range(WORLD):
        said = torch.load(results / f'differing-{rank}.pt', weights_only=False)
        assert len(said) == 10
        for case, (values, gradients) in said.items():
            assert 'norm.weight' in values and 'has different values on rank 3 and on rank' in values, (case, values)
            if case == ('sequence_parallel', False):
                assert gradients == 'accepted'  # each rank has a part of the sum
                continue
            assert 'norm.weight' in gradients and 'has different gradients on rank 3 and on rank' in gradients, (case, gradients)


def test_stages_load_their_own_state(results):
    for loaded, same, differs, exported in own_of(results, 'state_of_stages'):
        assert loaded == 'accepted' and same
        assert "exp_avg of parameter '2." in differs and 'differs between rank 3 and rank 2' in differs
        assert exported.startswith('export_state() writes the parameters of the calling rank, but the ranks of this job have different')


def test_ranks_that_keep_something_back(results):
    for rank, (missing, descending, lone) in enumerate(own_of(results, 'kept_back')):
        assert "parameter '0.norm.weight' is a DTensor over the ranks [0, 1, 2, 3], but the optimizer on rank 1 was not given it" in missing
        torch.testing.assert_close(descending, torch.arange(8.0) - 0.5)
        torch.testing.assert_close(lone, torch.full((3,), 0.5 if rank == 0 else 1.0))


# Where the last rank is killed in its third step, and the version at which all stages come back: of the second step, or of the third.
POINTS = {'gradients': {2}, 'pushed': {2}, 'decided': {3}}
if os.environ.get('TEST_ROUNDS') == 'full':  # beside these: before the gradients, and behind the decision
    POINTS.update({'forward': {2}, 'after': {3}})


@pytest.mark.parametrize('point', POINTS)
def test_all_stages_come_back_at_one_version(point, tmp_path):
    ranks = run_four(['killed'], tmp_path, POINT=point)
    assert ranks[-1].wait() == -9, ranks[-1].output
    for rank in ranks[:-1]:
        rank.wait()
    came_back = [rank.wait() for rank in run_four(['killed'], tmp_path, POINT='')]
    assert came_back == [0] * WORLD, '\n'.join((tmp_path / f'{rank}.log').read_text() for rank in range(WORLD))
    found, losses, parameters = zip(*own_of(tmp_path, 'killed'))
    assert len(set(found)) == 1 and found[0] in POINTS[point], found
    their_losses, _, theirs = torch.load(tmp_path / 'alone.pt', weights_only=False)
    for rank in range(WORLD):
        torch.testing.assert_close(losses[rank], their_losses[found[rank]:], rtol=1e-5, atol=1e-5)
        check_parameters(parameters[rank], theirs)
