"""shard() on a GPU: what test_shard.py checks of two ranks on CPUs, here with one rank, for NCCL takes a GPU for each. Skipped where
there is no GPU."""
import pytest
import test_shard
import torch
from conftest import two_state_servers
from test_pushes import (  # noqa: F401
    SCRIPTS,
    test_a_push_that_fails_behind_backward,
    test_a_step_that_does_not_begin,
    test_gradients_that_are_copied,
    test_the_only_push_fails,
)
from test_shard import (  # noqa: F401
    test_16_bits_come_of_what_is_gathered_in_bf16,
    test_a_step_that_is_skipped,
    test_bits_of_fsdp2,
    test_clipping_by_max_norm,
    test_gathered,
    test_gradients_leave_the_trainer,
    test_gradients_that_go_in_backward,
    test_gradients_that_no_step_takes,
    test_late_pulls,
    test_one_pull_for_each_gather,
    test_passes_without_a_step,
    test_resume_from_meta,
    test_rollback,
)

# Of the bad uses some cut off a pass, which FSDP2 before torch 2.13 cannot forget.
FORGETS_PASSES = hasattr(torch.distributed.fsdp.FSDPModule, 'reset_iter_state')
if FORGETS_PASSES:
    from test_shard import test_bad_uses_are_named  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')


def run(scripts, folder, **variables):
    return test_shard.run(scripts, folder, world=1, BALLAST_TEST_DEVICE='cuda', CUBLAS_WORKSPACE_CONFIG=':4096:8', **variables)


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    scripts = [*test_shard.BITS, *test_shard.EARLY, *test_shard.REST]
    if not FORGETS_PASSES:
        scripts.remove('refused')
    scripts.remove('changed')  # by one rank of two
    scripts.remove('after_close')  # FSDP2 itself, of one rank, cannot make its first pass in inference mode
    return run(scripts, tmp_path_factory.mktemp('alone'))


@pytest.fixture(scope='module')
def pushed(tmp_path_factory):
    return run(SCRIPTS, tmp_path_factory.mktemp('pushed'), script='pushes_main.py')


@pytest.fixture(scope='module')
def over_two_servers(tmp_path_factory):
    done = {}
    with two_state_servers(tmp_path_factory.mktemp('servers')) as servers:
        for script in test_shard.NAMED:
            done.update(run([script], tmp_path_factory.mktemp(script), BALLAST_SERVERS=servers))
    return done


def test_memory(tmp_path):
    """Of 512 MiB of parameters: gathered units and gradients of few."""
    [(device, pinned)] = run(['memory_of_a_gpu'], tmp_path)['memory_of_a_gpu']
    print(f'{device} MiB of the GPU, {pinned} MiB pinned')
    assert device <= 8 * 16
