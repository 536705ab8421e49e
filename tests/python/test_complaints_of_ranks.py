"""Programs of DistributedDataParallel's users on two ranks: each comes to the same with torch.optim's optimizer and with ours, or is
refused by name on both ranks. complaints_ranks_main.py has them. torch itself refuses SyncBatchNorm, and its hook for bf16, without a
GPU."""
import os
import pathlib

import complaints_ranks_main
import pytest
import torch
from own_process import Process, free_port
from scripts import batches, loss_of, mlp
from torch import nn

MAIN = pathlib.Path(__file__).parent / 'complaints_ranks_main.py'
UNREDUCED = "parameter '0.bias' has different gradients on rank 1 and on rank 0. Gradients must be reduced before step()"
REFUSED = {
    'the_last_batch_is_not_reduced': UNREDUCED,
    'each_fourth_pass_goes_round_the_wrapper': UNREDUCED,
    'gradients_stay_local_after_four_steps': UNREDUCED,
}
# What the kind changes; all programs with each in full rounds.
SOME = {
    'overlap': ['gradients_are_views_of_buckets', 'layers_take_turns_in_views', 'views_gather_three_batches', 'a_graph_is_static'],
    'named': ['layers_take_turns_in_views', 'the_shortest_rank_ends_an_epoch'],
}


def programs_of(kind):
    everything = os.environ.get('TEST_ROUNDS') == 'full' or kind == 'plain'
    return list(complaints_ranks_main.complaint) if everything else SOME[kind]


def run_world(world, folder, *arguments):
    port = str(free_port())
    ranks = [Process(MAIN, folder, folder / f'{rank}.log', *arguments, MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE=str(world),
                     RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
    codes = [rank.wait(300) for rank in ranks]
    assert codes == [0] * world, '\n'.join(rank.output for rank in ranks)


@pytest.fixture(scope='module')
def came_to(tmp_path_factory):
    """came_to(kind): what each program came to, by name and rank. All programs of a kind are in one pair of processes."""
    known = {}

    def of(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            run_world(2, folder, kind, ','.join(programs_of(kind)), folder)
            known[kind] = {name: [torch.load(folder / f'{kind}-{name}-{rank}.pt') for rank in range(2)] for name in programs_of(kind)}
        return known[kind]
    return of


@pytest.mark.parametrize(('kind', 'program'), [(kind, name) for kind in complaints_ranks_main.KINDS for name in programs_of(kind)])
def test_as_torch_or_refused_by_name(kind, program, came_to):
    for theirs, ours in came_to(kind)[program]:
        if program in REFUSED:
            assert isinstance(ours, str) and ours.startswith(REFUSED[program])
            continue
        assert not isinstance(ours, str), ours
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_preempted_run_goes_on_with_other_numbers_of_ranks(tmp_path):
    """Against torch.optim's undisturbed run of one process, which has all ranks' batches."""
    torch.manual_seed(3)
    model, losses, total = mlp(), [], 12
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(total):
        optimizer.zero_grad()
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for world, start in ((2, 0), (1, 4), (2, 8)):
        run_world(world, tmp_path, 'preempted', tmp_path, total)
        told = [torch.load(tmp_path / f'{start}-{rank}.pt') for rank in range(world)]
        assert all(list(mine) == [start, start + 1, start + 2, start + 3] for mine, _ in told)
        for i in range(start, start + 4):
            torch.testing.assert_close(sum(mine[i] for mine, _ in told) / world, losses[i].item(), rtol=1e-5, atol=1e-5)
    for _, parameters in told:
        torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()], rtol=1e-5, atol=1e-5)
