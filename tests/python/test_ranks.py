"""Two ranks, each a process: DDP and FSDP2 against torch's optimizer, over a private state server and over two named ones."""
import pathlib
import re

import pytest
import torch
from conftest import two_state_servers
from own_process import NewProcess, Process, free_port, import_also

HERE = pathlib.Path(__file__).parent
WORLD = 2


def run_pair(script, folder, *arguments, expect=0, anew=False, **variables):
    """A script of this folder on two ranks; their logs. anew: as launchers start them, with hashes of strings that differ."""
    port = str(free_port())
    ranks = [(NewProcess if anew else Process)(
        HERE / script, folder, folder / f'{rank}.log', *arguments, MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE=str(WORLD),
        RANK=str(rank), LOCAL_RANK=str(rank), **({'PYTHONHASHSEED': str(rank + 1)} if anew else {}), **variables) for rank in range(WORLD)]
    codes = [rank.wait() for rank in ranks]
    logs = '\n'.join(f'--- rank {i}\n{rank.output}' for i, rank in enumerate(ranks))
    assert codes == [expect] * WORLD, logs
    return logs


def run_ranks(script, folder, servers=None, expect=0):
    """What the ranks saved, in their order, and their logs."""
    saved, logs = run_scripts([script], folder, servers, expect)
    return saved[script], logs


def run_scripts(scripts, folder, servers=None, expect=0):
    """Functions of rank_main.py one after the other in one pair of processes, which take seconds to start: ({script: what the ranks saved},
    logs)."""
    variables = {'BALLAST_SERVERS': servers} if servers else {}
    logs = run_pair('rank_main.py', folder, ','.join(scripts), folder, expect=expect, **variables)
    return {script: [torch.load(folder / f'{script}-{rank}.pt') for rank in range(WORLD)] for script in scripts}, logs


def check(results):
    for (their_losses, their_parameters), (our_losses, our_parameters) in results:
        torch.testing.assert_close(our_losses, their_losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(our_parameters, their_parameters, rtol=1e-4, atol=1e-5)


PRIVATE = ['ddp', 'ddp_no_sync', 'ddp_edit', 'ddp_overlap', 'fsdp2', 'fsdp2_edit', 'fsdp2_moved']
NAMED = ['ddp_load', 'fsdp2_load', 'fsdp2_load_whole', 'ddp', 'fsdp2']


@pytest.fixture(scope='module')
def over_a_private_server(tmp_path_factory):
    return run_scripts([*PRIVATE, 'early'], tmp_path_factory.mktemp('private'))


@pytest.fixture(scope='module')
def over_two_servers(tmp_path_factory):
    with two_state_servers(tmp_path_factory.mktemp('servers')) as servers:
        return run_scripts(NAMED, tmp_path_factory.mktemp('named'), servers=servers)[0]


@pytest.mark.parametrize('script', PRIVATE)
def test_two_ranks_over_a_private_server(script, over_a_private_server):
    results, logs = over_a_private_server
    check(results[script])
    assert 'error' not in logs.lower(), logs


def test_gradients_do_not_go_early(over_a_private_server):
    for told in over_a_private_server[0]['early']:
        assert told.startswith('push_early works with one rank alone: DistributedDataParallel reduces gradients after')


@pytest.mark.parametrize('script', NAMED)
def test_two_ranks_over_two_servers(script, over_two_servers):
    """Those with `load` bring a state of torch's in."""
    check(over_two_servers[script])


@pytest.mark.parametrize('wrap', ['ddp', 'fsdp2'])
def test_models_on_two_ranks_over_two_servers(wrap, tmp_path, two_servers):
    """models.MODELS, all in one pair of processes."""
    pytest.importorskip('transformers')
    pytest.importorskip('peft')
    import models
    import_also('models')
    ranks, _ = run_ranks(f'models_{wrap}', tmp_path, servers=two_servers)
    assert {name for name, _ in ranks[0]} == set(models.MODELS)
    for rank in ranks:
        for (_, dtype), losses in rank.items():
            models.check(dtype, *losses)


def test_a_gradient_that_one_rank_has_not(tmp_path):
    """Not silently a zero there."""
    (mine, told), (other, told_other) = run_ranks('none_on_one_rank', tmp_path)[0]
    torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert told == told_other and len(told) == 3 and told[2] == 'accepted'
    for name, each in zip(('3.bias', '0.weight'), told):
        assert each.startswith(f"parameter '{name}' has a gradient on rank 0 and none on rank 1. Gradients must be reduced "
                               'before step()')


def test_an_error_on_one_rank_is_told_on_all(tmp_path):
    (there, mine), (here, other) = run_ranks('sparse_on_one_rank', tmp_path)[0]
    assert here.startswith("parameter '3.bias' has a sparse gradient")
    assert there == 'rank 1: ' + here
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_state_that_one_rank_cannot_load_is_refused_on_all(tmp_path):
    (there, off, mine), (here, off_other, other) = run_ranks('rotten_on_one_rank', tmp_path)[0]
    digest = r' \(digest [0-9a-f]{8}\)'
    expected = ["'exp_avg' of parameter '0.weight' has an Inf or a NaN", "loaded state dict contains a parameter group that doesn't match"]
    expected += [f'what is loaded is the state of 6 parameters after 1 steps{digest} on rank 0 and the state of 6 parameters after {steps} '
                 f'steps{digest} on rank 1; expected the same on all ranks' for steps in (0, 2)]
    for what, mine_told, other_told in zip(expected * 2, there, here):
        assert re.match(what, other_told)
        assert re.search(what, mine_told)
    assert len(there) == len(here) == 2 * len(expected)
    assert off == off_other == 0
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_rank_that_comes_late_to_a_load(tmp_path):
    ranks, _ = run_ranks('late_to_a_load', tmp_path)
    for told, steps in ranks:
        assert told == ("load_state_dict() of job 'late_to_a_load': rank 0 waited 2 s (step_timeout) for rank 1; expected all ranks to "
                        'make this call, the same number of times [RANK_MISSING]')
        assert steps == 1
