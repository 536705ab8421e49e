"""Four ranks whose parameters are placed in every way: the optimizer against torch's on the same model."""
import pathlib
import socket

import pytest
import torch
from own_process import Process

HERE = pathlib.Path(__file__).parent
WORLD = 4
CASES = ['fsdp2', 'uneven', 'hsdp', 'last_dimension', 'tensor_parallel', 'tensor_by_data_parallel', 'sequence_parallel',
         'fsdp_by_tensor_parallel', 'pipeline_gpipe', 'pipeline_1f1b', 'experts_by_fsdp', 'plain_experts']


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('placed')
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = str(probe.getsockname()[1])
    ranks = [Process(HERE / 'placed_main.py', folder, folder / f'{rank}.log', ','.join(CASES), folder, MASTER_ADDR='127.0.0.1',
                     MASTER_PORT=port, WORLD_SIZE=str(WORLD), RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(WORLD)]
    codes = [rank.wait(600) for rank in ranks]
    assert codes == [0] * WORLD, '\n'.join(rank.output for rank in ranks)
    return folder


@pytest.mark.parametrize('name', CASES)
def test_trains_as_torchs(results, name):
    for rank in range(WORLD):
        came = torch.load(results / f'{name}-{rank}.pt', weights_only=False)
        assert not isinstance(came, str), f'rank {rank}: {came}'
        (their_losses, theirs), (our_losses, ours) = came
        torch.testing.assert_close(our_losses, their_losses, rtol=1e-5, atol=1e-5)
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f'rank {rank}, {key}: {text}')
