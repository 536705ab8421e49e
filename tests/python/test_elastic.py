"""Ranks that are started again: all of them by torchrun --max-restarts, over a new store or one that lives on, and one beside a rank that
stays."""
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from own_process import Process, free_port
from scripts import batches, loss_of, mlp

HERE = pathlib.Path(__file__).parent
ADVICE = 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1'


def losses_of(folder):
    return [torch.load(folder / f'{rank}.pt') for rank in range(2)]


def launch(folder, way, crashes, lives_on=True):
    """In place of torchrun's agent this process keeps the store, or with lives_on=False each attempt has one of its own at its first rank;
    and ends all ranks when one has ended badly, to start them again. What the ranks of the last attempt printed."""
    folder.mkdir()
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) if lives_on else None
    for attempt, dies in enumerate([1, 0, None] if crashes else [None]):
        port = store.port if lives_on else free_port()
        ranks = [Process(HERE / 'elastic_main.py', folder, folder / f'{attempt}-{rank}.log', way, int(crashes), MASTER_ADDR='127.0.0.1',
                         MASTER_PORT=str(port), WORLD_SIZE='2', RANK=str(rank), LOCAL_RANK=str(rank), TORCH_GLOO_LAZY_INIT='1',
                         TORCHELASTIC_USE_AGENT_STORE=str(lives_on), TORCHELASTIC_MAX_RESTARTS='2' if crashes else '0',
                         TORCHELASTIC_RESTART_COUNT=str(attempt)) for rank in range(2)]
        if dies is not None:
            assert ranks[dies].wait() == [-signal.SIGKILL, 1][dies], ranks[dies].output
            os.kill(ranks[1 - dies].pid, signal.SIGKILL)
            ranks[1 - dies].wait()
            continue
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], '\n'.join(rank.output for rank in ranks)
    return [rank.output for rank in ranks]


def launch_by_torchrun(folder, way):
    folder.mkdir()
    done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', '--max-restarts', '2',
                           HERE / 'elastic_main.py', way, '1'], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=400, check=False, env={**os.environ, 'OMP_NUM_THREADS': '1', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'})
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope='module', params=['plain', 'shard'])
def undisturbed(request, tmp_path_factory):
    """The way, and losses by step of both ranks."""
    folder = tmp_path_factory.mktemp('undisturbed') / request.param
    printed = launch(folder, request.param, False)
    assert ADVICE not in printed[0] + printed[1]
    return request.param, losses_of(folder)


def check_last_attempt(folder, undisturbed):
    """A rank raised in step 2 of the first attempt, the other was killed in step 4 of the second."""
    disturbed = losses_of(folder)
    assert [list(each) for each in disturbed] == [[4, 5]] * 2
    for rank in range(2):
        assert {step: undisturbed[rank][step] for step in (4, 5)} == disturbed[rank]


def test_all_ranks_are_started_again_over_a_store_that_lives_on(undisturbed, tmp_path):
    way, losses = undisturbed
    first, second = launch(tmp_path / 'disturbed', way, True)
    check_last_attempt(tmp_path / 'disturbed', losses)
    assert first.count(ADVICE) == 1 and ADVICE not in second


def test_all_ranks_are_started_again_over_a_new_store(undisturbed, tmp_path):
    way, losses = undisturbed
    first, second = launch(tmp_path / 'disturbed', way, True, lives_on=False)
    check_last_attempt(tmp_path / 'disturbed', losses)
    assert ADVICE not in first + second


@pytest.mark.skipif(os.environ.get('TEST_ROUNDS') == 'ci', reason='each of its ranks imports torch anew; the test above does what it does')
def test_torchrun_starts_all_ranks_again(undisturbed, tmp_path):
    way, losses = undisturbed
    printed = launch_by_torchrun(tmp_path / 'disturbed', way)
    check_last_attempt(tmp_path / 'disturbed', losses)
    assert ADVICE not in printed


@pytest.mark.parametrize('way', ['plain', 'shard'])
def test_a_rank_stays_and_the_other_is_replaced(way, tmp_path, two_servers):
    stores = [dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) for _ in range(2)]

    def start(rank, attempt):
        return Process(HERE / 'restart_main.py', tmp_path, tmp_path / f'{rank}-{attempt}.log', way, rank, attempt,
                       *(store.port for store in stores), BALLAST_SERVERS=two_servers)
    stays, dies = start(0, 0), start(1, 0)
    assert dies.wait() == 9, dies.output
    replaced = start(1, 1)
    codes = [each.wait() for each in (stays, replaced)]
    assert codes == [0, 0], f'{stays.output}\n{replaced.output}'
    torch.manual_seed(0)
    twin, each = mlp(), list(batches(12))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        (sum(loss_of(twin, batch) for batch in each[2 * step:2 * step + 2]) / 2).backward()
        optimizer.step()
    for rank in range(2):
        first, parameters = torch.load(tmp_path / f'{rank}.pt')
        assert first == 3
        torch.testing.assert_close(parameters, [p.detach() for p in twin.parameters()], rtol=1e-4, atol=1e-5)
