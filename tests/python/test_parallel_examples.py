"""The package's examples of parallel training run on as many ranks as their first lines say, learn, and go on where they were."""
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from own_process import Process
from test_ranks import free_port

EXAMPLES = pathlib.Path(__file__).parents[2] / 'client/python/examples'
NAMES = ['fsdp2_shard.py', 'tensor_by_data_parallel.py', 'pipeline.py', 'experts.py']
# As torchrun's OMP_NUM_THREADS=1, for a process that has imported torch already.
ONE_THREAD = '''
import os, runpy, sys, torch
torch.set_num_threads(1)
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name='__main__')
'''


def run(folder, name, *arguments, ranks=None):
    """What the ranks of the example's usage printed."""
    usage = re.search(rf'Usage: torchrun --nproc-per-node (\d) {name} ', (EXAMPLES / name).read_text(encoding='utf-8'))
    world, port = ranks or int(usage.group(1)), str(free_port())
    script = folder / 'one_thread.py'
    script.write_text(ONE_THREAD, encoding='utf-8')
    processes = [Process(script, folder, folder / f'{rank}.log', EXAMPLES / name, *arguments, MASTER_ADDR='127.0.0.1', MASTER_PORT=port,
                         WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
    codes = [process.wait() for process in processes]
    printed = '\n'.join(process.output for process in processes)
    assert codes == [0] * world, printed
    return printed


def run_by_torchrun(folder, name, *arguments):
    """The usage's command itself."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', EXAMPLES / name]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps(printed):
    """{step: (loss, norm)}."""
    return {int(step): (float(loss), float(norm)) for step, loss, norm in
            re.findall(r'step (\d+): loss ([\d.]+), gradient norm ([\d.]+)', printed)}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """{example: (steps in one run, steps of a run that was ended after 20 and another that went on)}."""
    done = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name[:-3])
        start = run_by_torchrun if name == 'fsdp2_shard.py' else run
        first, second = start(folder, name, '20'), run(folder, name, '30')
        assert '20 steps done' in first and '30 steps done' in second
        done[name] = steps(first), steps(second), folder
    return done


@pytest.mark.parametrize('name', NAMES)
def test_learns_and_goes_on(trained, name):
    first, second, _ = trained[name]
    assert list(first) == [10, 20] and list(second) == [30]
    losses = [loss for loss, _ in (*first.values(), *second.values())]
    assert losses[0] < 3.0 and losses[1] < 0.3 * losses[0] and losses[2] < 0.3 * losses[1], losses  # an untrained one has log(64) = 4.2


@pytest.mark.parametrize('name', ['tensor_by_data_parallel.py', 'pipeline.py'])
def test_norms_do_not_depend_on_how_ranks_are_divided(trained, name):
    """The same model on the same batches: two data-parallel parts."""
    for (_, norm), (_, expected) in zip((*trained[name][0].values(), *trained[name][1].values()),
                                        (*trained['fsdp2_shard.py'][0].values(), *trained['fsdp2_shard.py'][1].values())):
        assert norm == pytest.approx(expected, abs=2e-3)


def test_a_job_goes_on_with_another_division(trained):
    """What two ranks trained goes on by one."""
    folder = trained['fsdp2_shard.py'][2]
    loss, _ = steps(run(folder, 'fsdp2_shard.py', '40', ranks=1))[40]
    assert loss < trained['fsdp2_shard.py'][1][30][0]


def test_what_is_saved_is_whole(trained):
    state = torch.load(trained['fsdp2_shard.py'][2] / 'fsdp2_shard.pt', weights_only=True)
    sys.path.insert(0, str(EXAMPLES))
    try:
        import transformer  # noqa: PLC0415
    finally:
        sys.path.remove(str(EXAMPLES))
    model = transformer.Transformer()
    model.load_state_dict(state)
    tokens = transformer.batch(1000, 0)
    assert transformer.loss_of(model(tokens[:, :-1]), tokens[:, 1:]).item() < 0.1
