"""A state server whose DRAM holds neither state nor working copies of a model: pulls round masters that lie on NVMe, and training has the
bits of a server with room for all working copies."""
import json
import pathlib
import shutil

import test_ranks
from own_process import NewProcess

from ballast.embedded_daemon import Daemon

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
BLOCKS = 42  # 12.25 MiB of parameters each
ROOMY, TIGHT = 1300 * MIB, 384 * MIB


def resident(pid):
    """The most bytes of process `pid` that were resident."""
    lines = pathlib.Path(f'/proc/{pid}/status').read_text(encoding='ascii').splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith('VmHWM:'))


def train(name, dram, folder):
    """What the trainer tells, and the server's most resident bytes."""
    daemon = Daemon(folder / f'{name}-server', dram, 6 << 30, 2)
    trainer = NewProcess(HERE / 'shard_memory_main.py', folder, folder / f'{name}.log', name, BLOCKS, 8 << 30, daemon.address, folder,
                         MASTER_ADDR='127.0.0.1', MASTER_PORT=str(test_ranks.free_port()), WORLD_SIZE='1', RANK='0', LOCAL_RANK='0')
    try:
        assert trainer.wait() == 0, trainer.output
        return json.loads((folder / f'{name}-0.json').read_text(encoding='utf-8')), resident(daemon.process.pid)
    finally:
        daemon.stop()
        shutil.rmtree(folder / f'{name}-server')


def test_dram_below_the_working_copies(tmp_path):
    roomy, much = train('roomy', ROOMY, tmp_path)
    tight, little = train('tight', TIGHT, tmp_path)
    print(f'the server: {much / MIB:.0f} and {little / MIB:.0f} MiB; parameters: {tight["parameters"] / MIB:.0f} MiB')
    assert tight['parameters'] > TIGHT
    assert tight['losses'] == roomy['losses']
    assert len(set(tight['losses'])) == len(tight['losses'])  # steps change what later pulls give
    assert little <= 1.1 * TIGHT + 256 * MIB < much
