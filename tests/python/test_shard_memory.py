"""A trainer's memory does not grow with the model: shard() from the meta device, recompute and one short sequence, on two ranks, with state
on NVMe. The parameters are four times the data that a trainer may allocate."""
import json
import pathlib
import shutil

import test_ranks
from own_process import NewProcess

from ballast.embedded_daemon import Daemon

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
# Data that a trainer may take beyond its start (shard_memory_main.py): about six units of 12 MiB, in FSDP2's buffers, pulls ahead and
# gradients on their way, and 1 MiB for the stack of each thread of the client's.
ALLOWED = 128 * MIB
BLOCKS = 42  # 12.25 MiB of parameters each
# glibc keeps freed memory of these sizes for itself unless they are mapped one by one, and a heap for each of many threads.
MALLOC = {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}


def run(name, blocks, folder):
    """Exit codes and outputs of two ranks, beside a server with DRAM for working copies and gradients on their way; state is on NVMe."""
    daemon = Daemon(folder / f'{name}-server', 1300 * MIB, 6 << 30, 2)
    port = str(test_ranks.free_port())
    ranks = [NewProcess(HERE / 'shard_memory_main.py', folder, folder / f'{name}-{rank}.log', name, blocks, ALLOWED, daemon.address, folder,
                        MASTER_ADDR='127.0.0.1', MASTER_PORT=port, WORLD_SIZE='2', RANK=str(rank), LOCAL_RANK=str(rank), **MALLOC)
             for rank in range(2)]
    try:
        return [rank.wait() for rank in ranks], [rank.output for rank in ranks]
    finally:
        daemon.stop()
        shutil.rmtree(folder / f'{name}-server')


def test_twice_the_layers_take_the_same_memory(tmp_path):
    found = {}
    for name, blocks in (('half', BLOCKS // 2), ('whole', BLOCKS)):
        codes, outputs = run(name, blocks, tmp_path)
        assert codes == [0, 0], '\n'.join(outputs)
        found[name] = [json.loads((tmp_path / f'{name}-{rank}.json').read_text(encoding='utf-8')) for rank in range(2)]
    # Gradients on their way to a busy server come and go: the lesser of the ranks' peaks has fewer of them. A model's memory is in both.
    half, whole = (min(each['peak'] for each in found[name]) for name in ('half', 'whole'))
    print(f'peaks beyond the start: {half / MIB:.0f} and {whole / MIB:.0f} MiB')
    for each in found['whole']:
        assert each['parameters'] >= 4 * ALLOWED
        assert each['losses'][-1] < each['losses'][0]
    assert half > 2 * 12 * MIB  # a unit that is used, and the one behind it: the figure is of something
    assert whole <= 1.1 * half


def test_kept_gradients_exceed_the_allowance(tmp_path):
    """The allowance binds: gradients of a rank's half of 512 MiB do not fit; nothing else differs from the test above."""
    codes, outputs = run('kept', BLOCKS, tmp_path)
    assert 0 not in codes
    assert any("can't allocate memory" in output or 'bad_alloc' in output for output in outputs), '\n'.join(outputs)
