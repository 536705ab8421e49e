"""ballast.estimate's bytes of each process and of the disk are what they take at their peaks."""
import contextlib
import json
import os
import pathlib

import pytest
from conftest import two_state_servers
from own_process import NewProcess, Process, free_port

HERE = pathlib.Path(__file__).parent
FULL = os.environ.get('TEST_ROUNDS') == 'full'
# 135M parameters; else 30M.
CONFIG = {'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'hidden_size': 1024, 'intermediate_size': 2816, 'dtype': 'float32',
          'num_hidden_layers': 8, 'num_attention_heads': 8, 'num_key_value_heads': 8, 'vocab_size': 16000}
# What passes, threads and allocators of a process take at one time or another, and no two runs alike. It counts for the small model alone.
NOISE = 0 if FULL else 8 << 20


@pytest.mark.parametrize('kind, ranks', [('memory', 1), ('directory', 1), ('nvme', 1), ('ranks', 2), ('shard', 2), ('shard_alone', 1),
                                         ('servers', 1)])
def test_each_process_takes_what_was_told(kind, ranks, tmp_path):
    """A server inside the trainer with its jobs in memory, in a durable directory, and mostly on disk; two ranks with a private server;
    shard() on two ranks, and on one; named servers with 8-bit moments. Within 5 %."""
    config = tmp_path / 'config.json'
    if FULL:
        pytest.importorskip('transformers')
        config.write_text(json.dumps(CONFIG), encoding='utf-8')
    group = {'WORLD_SIZE': str(ranks), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    with contextlib.ExitStack() as stack:
        pids: list[int] = []
        servers = ''
        if kind == 'servers':
            budgets = '--compute_threads', '1'
            (tmp_path / 'servers').mkdir()
            servers = stack.enter_context(two_state_servers(tmp_path / 'servers', *budgets, dram='2GiB', pids=pids))
        new = NewProcess if FULL else Process
        several = kind.startswith(('ranks', 'shard'))
        processes = [new(HERE / 'estimate_main.py', tmp_path, tmp_path / f'{rank}.log', kind, str(config) if FULL else '', servers,
                         ','.join(map(str, pids)), **({'RANK': str(rank), **group} if several else {})) for rank in range(ranks)]
        codes = [process.wait() for process in processes]
    said = '\n'.join(process.output for process in processes)
    assert codes == [0] * ranks, said
    wrong = []
    for rank, process in enumerate(processes):
        line = next(line for line in process.output.splitlines() if line.startswith('estimate '))
        answer = json.loads(line.removeprefix('estimate '))
        found = [tuple(each) for each in answer['found']]
        expected = ['server'] * (ranks > 1 and rank == 0) + {'servers': ['server', 'disk'] * 2, 'directory': ['disk'],
                                                             'nvme': ['disk']}.get(kind, [])
        assert sorted(name for name, _ in found) == sorted(['trainer', *expected])
        if kind == 'servers':  # told is the one with most chunks, and the other has what placement gives it
            for name in ('server', 'disk'):
                found.remove(min(each for each in found if each[0] == name))
        for name, size in found:
            told = answer['told'][name]
            row = f'{kind}: {name} {rank} took {size >> 20} MiB, told {told >> 20} MiB: {100 * (told / size - 1):+.1f} %'
            print(row)
            if abs(told - size) > 0.05 * size + NOISE:
                wrong.append(f'{row}\n{answer["text"]}')
    assert not wrong, '\n'.join(wrong)
