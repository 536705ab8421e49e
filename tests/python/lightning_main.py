"""A rank of test_lightning.py: two devices, each way of training beside torch.optim's, and resumed from each kind of checkpoint."""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import lightning_runs as runs  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

CLOSE = {'rtol': 1e-3, 'atol': 1e-4}
EXACT = {'rtol': 0.0, 'atol': 0.0}
torch.set_num_threads(1)
os.environ.pop('BALLAST_SERVERS', None)
here = pathlib.Path.cwd()

for number, case in enumerate(('accumulated and clipped by norm', 'moving average', 'gan')):
    expected = runs.fit(case, runs.theirs, devices=2)
    runs.assert_same(runs.fit(case, runs.ours(name=f'like{number}'), devices=2), expected, **CLOSE)
for number, more in enumerate(({}, {'directory': here / 'named', 'nvme': '1GiB'}, {'directory': here / 'full', 'nvme': '1GiB',
                                                                                 'states': 'full'})):
    saved = here / f'saved{number}'
    whole = runs.fit('plain', runs.ours(name=f'saved{number}', **more), saved, devices=2)
    more = {**more, 'resume': 'auto'} if 'states' in more else more
    again = runs.fit('plain', runs.ours(name=f'saved{number}', **more), start=saved / 'epoch=0.ckpt', devices=2)
    runs.assert_same(again, whole, **EXACT)
dist.destroy_process_group()
