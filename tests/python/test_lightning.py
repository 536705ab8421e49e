"""Lightning's Trainer: losses and parameters of torch.optim's optimizer under the same model, and runs that go on from checkpoints."""
import pathlib

import pytest
from own_process import Process, import_also
from test_ranks import free_port

pytest.importorskip('lightning')
import lightning_runs as runs  # noqa: E402

CLOSE = {'rtol': 1e-3, 'atol': 1e-4}
EXACT = {'rtol': 0.0, 'atol': 0.0}
# How states are saved: moments of a job that ends with its process, the name of a version, moments of a durable job.
KINDS = {'moments': {}, 'named': {'nvme': '1GiB'}, 'moments of a durable job': {'nvme': '1GiB', 'states': 'full'}}


@pytest.mark.parametrize('case', runs.CASES)
def test_like_torch(case, job):
    runs.assert_same(runs.fit(case, runs.ours(**job)), runs.fit(case, runs.theirs), **CLOSE)


@pytest.mark.parametrize('case,kind', [*(('plain', kind) for kind in KINDS), ('moving average', 'named'), ('gan', 'moments'),
                                       ('gan', 'named')])
def test_goes_on_from_a_checkpoint(case, kind, job, tmp_path):
    more = {**job, **KINDS[kind], **({'directory': tmp_path / 'state'} if 'nvme' in KINDS[kind] else {})}
    whole = runs.fit(case, runs.ours(**more), tmp_path / 'saved')
    more = {**more, 'resume': 'auto'} if kind == 'moments of a durable job' else more
    again = runs.fit(case, runs.ours(**more), start=tmp_path / 'saved/epoch=0.ckpt')
    runs.assert_same(again, whole, **EXACT)


def test_two_devices(tmp_path):
    import_also('lightning_runs')
    port = free_port()
    script = pathlib.Path(__file__).with_name('lightning_main.py')
    ranks = [Process(script, tmp_path, tmp_path / f'{rank}.log', RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK='0', WORLD_SIZE='2',
                     MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port), OMP_NUM_THREADS='1') for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], '\n'.join(rank.output for rank in ranks)
