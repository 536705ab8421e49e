"""A checkpoint streams into servers whose DRAM is a fraction of it, and out again, in memory that does not grow with it.

WEIGHTS_WIDTH, WEIGHTS_BLOCKS, WEIGHTS_FILES, WEIGHTS_DRAM and WEIGHTS_NVME (MiB), in the environment, make it as large as you like. A disk
that is too small for the state of all blocks may do for WEIGHTS_FROZEN of them."""
import filecmp
import json
import os
import pathlib
import shutil

import test_ranks
import torch
from own_process import NewProcess
from shard_memory_main import Net
from test_shard_memory import MALLOC, MIB

from ballast.embedded_daemon import Daemon
from ballast.torch.weights.shards import Planned, Writing

HERE = pathlib.Path(__file__).parent
WIDTH, BLOCKS, FILES, DRAM, NVME = (int(os.environ.get(f'WEIGHTS_{name}', usual))
                                    for name, usual in (('WIDTH', 896), ('BLOCKS', 21), ('FILES', 8), ('DRAM', 256), ('NVME', 1536)))
# What a server takes beyond its budget: its program, and buffers for the wire and the disk.
BEYOND = 256 * MIB


def make_checkpoint(folder):
    """FILES files and an index, as save_pretrained() names them. Values are made tensor by tensor, so that this process stays small."""
    import shard_memory_main  # noqa: PLC0415
    shard_memory_main.WIDTH = WIDTH
    folder.mkdir()
    with torch.device('meta'):
        tensors = list(Net(BLOCKS).state_dict().items())
    index, total = {}, 0
    for i in range(FILES):
        mine = tensors[len(tensors) * i // FILES:len(tensors) * (i + 1) // FILES]
        name = f'model-{i + 1:05}-of-{FILES:05}.safetensors'
        writing = Writing(str(folder / name), [Planned(key, value.dtype, tuple(value.shape)) for key, value in mine])
        for j, (key, value) in enumerate(mine):
            generator = torch.Generator().manual_seed(1000 * i + j)
            writing.add([torch.randn(value.shape, generator=generator) * WIDTH ** -0.5])
            index[key] = name
            total += value.nbytes
        writing.end()
        with open(folder / name, 'rb') as file:  # so that the trainer reads it from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {'total_size': total}, 'weight_map': index}))
    return total


def run(what, checkpoint, daemon, folder):
    trainer = NewProcess(HERE / 'weights_memory_main.py', folder, folder / f'{what}.log', what, WIDTH, BLOCKS, checkpoint, daemon.address,
                         folder, MASTER_ADDR='127.0.0.1', MASTER_PORT=str(test_ranks.free_port()), WORLD_SIZE='1', RANK='0', LOCAL_RANK='0',
                         **MALLOC)
    assert trainer.wait(3000) == 0, trainer.output
    return json.loads((folder / f'{what}.json').read_text(encoding='utf-8'))


def peak_of(daemon):
    with open(f'/proc/{daemon.process.pid}/status', encoding='ascii') as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith('VmHWM:'))


def test_in_and_out(tmp_path):
    total = make_checkpoint(tmp_path / 'checkpoint')
    daemon = Daemon(tmp_path / 'server', DRAM * MIB, NVME * MIB, 2)
    try:
        before = peak_of(daemon)
        loaded = run('load', tmp_path / 'checkpoint', daemon, tmp_path)
        resumed = run('resume', tmp_path / 'checkpoint', daemon, tmp_path)
        server = peak_of(daemon)
    finally:
        daemon.stop()
        shutil.rmtree(tmp_path / 'server')
    told = {**loaded['peaks'], 'resume': resumed['peaks']['resume'], 'server': server - DRAM * MIB}
    print(f'{total / MIB:.0f} MiB; peaks in MiB:', {key: round(value / MIB) for key, value in told.items()},
          f'start {loaded["start"] / MIB:.0f} and {before / MIB:.0f}; from the disk {loaded["from disk"] / MIB:.0f}; losses '
          f'{loaded["losses"]}, {resumed["losses"]}')
    assert loaded['from disk'] <= 1.1 * total + 64 * MIB
    assert loaded['read'] == total and resumed['read'] == 0
    assert (loaded['begun'], resumed['begun']) == (0, 2)
    assert resumed['losses'][0] < loaded['losses'][0]
    unit = 4 * (2 * 2 * WIDTH * WIDTH)
    assert max(told[what] for what in ('load', 'save', 'resume')) <= 5 * unit + 64 * MIB < total
    assert server <= DRAM * MIB + BEYOND
    start = loaded['start']
    for what in ('load', 'save', 'resume'):
        assert told[what] + start <= 1.05 * (loaded['peaks']['train'] + start), what
    names = sorted(path.name for path in (tmp_path / 'checkpoint').iterdir())
    saved = tmp_path / 'saved'
    assert names == sorted(path.name for path in saved.iterdir())
    same, different, errors = filecmp.cmpfiles(tmp_path / 'checkpoint', saved, [name for name in names if not name.endswith('.json')],
                                               shallow=False)
    assert (len(same), different, errors) == (FILES, [], [])
