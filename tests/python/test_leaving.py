"""Rank 0 leaves a private server, which other ranks still use."""
import pathlib
import signal
import time

import pytest
from own_process import Process
from test_ranks import free_port

HERE = pathlib.Path(__file__).parent


def run(case, folder):
    """Codes and logs of both ranks, and seconds."""
    port, started = str(free_port()), time.monotonic()
    ranks = [Process(HERE / 'leaving_main.py', folder, folder / f'{rank}.log', case, MASTER_ADDR='127.0.0.1', MASTER_PORT=port,
                     WORLD_SIZE='2', RANK=str(rank), LOCAL_RANK=str(rank), TMPDIR=str(folder)) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    return codes, [rank.output for rank in ranks], time.monotonic() - started


@pytest.mark.parametrize('case', ['close', 'drop', 'exit'])
def test_a_slow_rank_still_reads(case, tmp_path):
    """However rank 0 leaves: by close(), by the last reference, or by the end of the script."""
    codes, logs, _ = run(case, tmp_path)
    assert codes == [0, 0] and logs == ["ballast: job 'default' is new\n", ''], logs
    assert (tmp_path / 'read').exists()
    assert not list(tmp_path.glob('ballast-*')), 'the temporary directory goes with the server'


@pytest.mark.parametrize(('case', 'codes'), [('killed', [0, -signal.SIGKILL]), ('stays', [0, 0]), ('interrupted', [0, 0]),
                                             ('error', [1, 0])])
def test_rank_0_waits_in_vain_for_nobody(case, codes, tmp_path):
    """A process that is gone, a rank that does not close, Ctrl-C, an error that ends the script. In vain: 120 s, in 'stays' 2 s."""
    found, logs, seconds = run(case, tmp_path)
    assert found == codes, logs
    assert seconds < 110
    assert not list(tmp_path.glob('ballast-*'))
