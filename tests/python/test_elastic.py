"""Ranks that are started again: all of them as by torchrun --max-restarts, whose store lives on, and one beside a rank that stays."""
import os
import pathlib
import signal

import pytest
import torch
import torch.distributed as dist
from own_process import Process
from scripts import batches, loss_of, mlp

HERE = pathlib.Path(__file__).parent


def launch(folder, way, crashes):
    """Losses by step of the last attempt, of both ranks. In place of torchrun's agent this process keeps the store, and ends all ranks when
    one has ended badly, to start them again."""
    folder.mkdir()
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    for attempt, dies in enumerate([1, 0, None] if crashes else [None]):
        ranks = [Process(HERE / 'elastic_main.py', folder, folder / f'{attempt}-{rank}.log', way, int(crashes), MASTER_ADDR='127.0.0.1',
                         MASTER_PORT=str(store.port), WORLD_SIZE='2', RANK=str(rank), LOCAL_RANK=str(rank), TORCH_GLOO_LAZY_INIT='1',
                         TORCHELASTIC_USE_AGENT_STORE='True', TORCHELASTIC_RESTART_COUNT=str(attempt)) for rank in range(2)]
        if dies is not None:
            assert ranks[dies].wait(100) == [-signal.SIGKILL, 1][dies], ranks[dies].output
            os.kill(ranks[1 - dies].pid, signal.SIGKILL)
            ranks[1 - dies].wait(100)
            continue
        codes = [rank.wait(100) for rank in ranks]
        assert codes == [0, 0], '\n'.join(rank.output for rank in ranks)
    return [torch.load(folder / f'{rank}.pt') for rank in range(2)]


@pytest.mark.parametrize('way', ['plain', 'shard'])
def test_all_ranks_are_started_again(way, tmp_path):
    """A rank raises in step 2 of the first attempt, the other is killed in step 4 of the second: losses are the undisturbed run's."""
    calm, disturbed = launch(tmp_path / 'calm', way, False), launch(tmp_path / 'disturbed', way, True)
    assert [list(each) for each in disturbed] == [[4, 5]] * 2
    for rank in range(2):
        assert {step: calm[rank][step] for step in (4, 5)} == disturbed[rank]


@pytest.mark.parametrize('way', ['plain', 'shard'])
def test_a_rank_stays_and_the_other_is_replaced(way, tmp_path, two_servers):
    stores = [dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) for _ in range(2)]

    def start(rank, attempt):
        return Process(HERE / 'restart_main.py', tmp_path, tmp_path / f'{rank}-{attempt}.log', way, rank, attempt,
                       *(store.port for store in stores), BALLAST_SERVERS=two_servers)
    stays, dies = start(0, 0), start(1, 0)
    assert dies.wait(100) == 9, dies.output
    replaced = start(1, 1)
    codes = [each.wait(100) for each in (stays, replaced)]
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
