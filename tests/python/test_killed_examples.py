"""The examples of trainers run as they are printed, are killed and resumed. Their losses are those that the same script has with torch's
AdamW (and, in place of shard(), FSDP2)."""
import importlib.util
import os
import pathlib
import re
import signal

import pytest
import torch
from own_process import Process, import_also
from test_ranks import free_port

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parents[1] / 'client/python/examples'
# Name: packages, its first argument, backward passes in a step, the kill's step, the step that it goes on with.
CASES = {
    'plain_loop': (['transformers'], 20, 1, 13, 13),
    'hf_trainer': (['transformers', 'accelerate'], 12, 1, 8, 5),
    'hf_sharded': (['transformers', 'accelerate'], 12, 1, 8, 5),
    'accelerate_loop': (['accelerate', 'transformers'], 2, 2, 13, 10),
    'accelerate_sharded': (['accelerate', 'transformers'], 2, 2, 13, 10),
    'lightning_fit': (['lightning', 'transformers'], 2, 1, 23, 20),
    'lightning_sharded': (['lightning', 'transformers'], 2, 1, 13, 10),
    'pretrained_shard': (['transformers', 'safetensors'], 20, 1, 13, 13),
    'trl_sft': (['trl', 'transformers'], 12, 1, 8, 5),
    'trl_sharded': (['trl', 'transformers'], 12, 1, 8, 5),
}
# What they write for from_pretrained().
SAVED = {'hf_sharded': 'hf_sharded_checkpoints/checkpoint-12', 'pretrained_shard': 'trained',
         'trl_sharded': 'trl_sharded_checkpoints/checkpoint-12'}


# What scripts of transformers take longest to import.
OF_TRANSFORMERS = ('transformers.trainer', 'transformers.models.llama.modeling_llama')


@pytest.fixture(scope='module', autouse=True)
def imported():
    if importlib.util.find_spec('transformers') is not None:
        import_also(*OF_TRANSFORMERS)


def run(name, folder, tag, which, kill_at, *arguments):
    """Losses by rank."""
    text = (EXAMPLES / f'{name}.py').read_text(encoding='utf-8')
    usage = re.search(rf'Usage: torchrun --nproc-per-node (\d) {name}.py ', text)
    world = int(usage.group(1)) if usage else 1
    ranks = {} if not usage else {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), 'WORLD_SIZE': str(world)}
    processes = [Process(HERE / 'run_example.py', folder, folder / f'{tag}{rank}.log', EXAMPLES / f'{name}.py',
                         folder / f'{tag}{rank}.losses', which, kill_at, *arguments, **ranks,
                         **({'RANK': str(rank), 'LOCAL_RANK': str(rank)} if usage else {}))
                 for rank in range(world)]
    codes = [process.wait() for process in processes]
    printed = '\n'.join(process.output for process in processes)
    assert codes == [-signal.SIGKILL if kill_at else 0] * world, printed
    assert 'lr_scheduler.step()' not in printed, printed  # torch's warning that a schedule stepped before the optimizer
    return torch.tensor([[float(line) for line in (folder / f'{tag}{rank}.losses').read_text(encoding='utf-8').split()]
                         for rank in range(world)], dtype=torch.float64)


# The nightly run has all; other tests train with Accelerate and Lightning for each change.
IN_CI = ('plain_loop', 'hf_trainer', 'hf_sharded', 'pretrained_shard')


@pytest.mark.parametrize('name', IN_CI if os.environ.get('TEST_ROUNDS') == 'ci' else CASES)
def test_killed_and_resumed_as_torch(name, tmp_path):
    packages, length, backwards, kill_at, goes_on = CASES[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed')
    (tmp_path / 'theirs').mkdir()
    expected = run(name, tmp_path / 'theirs', 'whole', 'theirs', 0, length)
    killed = run(name, tmp_path, 'killed', 'ours', kill_at, length)
    takes_resume = '[resume]' in (EXAMPLES / f'{name}.py').read_text(encoding='utf-8')
    resumed = run(name, tmp_path, 'resumed', 'ours', 0, length, *(['resume'] if takes_resume else []))
    assert killed.shape[1] == kill_at * backwards and resumed.shape[1] == expected.shape[1] - goes_on * backwards
    assert expected[:, -1].mean() < expected[:, 0].mean() - 0.1
    torch.testing.assert_close(killed, expected[:, :killed.shape[1]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(resumed, expected[:, goes_on * backwards:], rtol=1e-5, atol=1e-5)
    if name in SAVED:
        import transformers  # noqa: PLC0415
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / SAVED[name])
        tokens = torch.arange(100, 132)[None]
        assert model(input_ids=tokens, labels=tokens).loss.item() < expected[:, 0].mean() - 0.1


@pytest.mark.parametrize('name', [*CASES, 'ray_train', 'sharded_trainer', 'language_model'])
def test_short_and_by_public_names_alone(name):
    text = (EXAMPLES / f'{name}.py').read_text(encoding='utf-8')
    assert len(text.splitlines()) <= 40
    assert not re.findall(r'\._[a-z]\w*|def _[a-z]\w*', text)
