"""Programs of users, as mypy --strict and pyright read them, and what help() and the README say of the arguments."""
import ast
import fcntl
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import ballast
import ballast.torch as bt
from ballast import _native
from ballast.torch import options

README = pathlib.Path(__file__).parents[2] / 'client/python/README.md'
SOURCES = pathlib.Path(ballast.__file__).parents[1]
OPTIMIZERS = [bt.AdamW, bt.AdamW8bit, bt.Adam, bt.SGD, bt.Adagrad, bt.Lion, bt.AdEMAMix, bt.AdamWScheduleFree]
HEAD = '''\
import ballast
import ballast.torch
import torch
from torch import nn

model = nn.Linear(4, 4)
'''
RIGHT = {
    'one_line': '''
        optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        ''',
    'durable': '''
        optimizer = ballast.torch.AdamW(model.parameters(), directory='state', dram='64MiB', nvme=1 << 29, resume='auto').attach(model)
        start, blob = optimizer.resume()
        cursor: int = start + len(blob)
        optimizer.step(blob=str(cursor).encode())
        norm: float | None = optimizer.grad_norm
        skipped: bool = optimizer.last_step_skipped
        optimizer.close()
        ''',
    'every_optimizer': '''
        made: list[torch.optim.Optimizer] = [
            ballast.torch.AdamW([{'params': model.parameters(), 'lr': 0.1}], 1e-3, (0.9, 0.95), moments='bf16'),
            ballast.torch.AdamW8bit(model.parameters(), 1e-3, fused=True, seed=3),
            ballast.torch.Adam(model.parameters(), amsgrad=True, decoupled_weight_decay=True, name='b'),
            ballast.torch.SGD(model.parameters(), 1e-3, 0.9, nesterov=True, momentum_buffer=True, threads=2),
            ballast.torch.Adagrad(model.parameters(), lr_decay=0.1, durability='every-K', pin_interval=10),
            ballast.torch.Lion(model.parameters(), betas=(0.9, 0.99), checkpoints=3),
            ballast.torch.AdEMAMix(model.parameters(), betas=(0.9, 0.999, 0.9999), t_alpha=1000, moments='bf16'),
            ballast.torch.AdamWScheduleFree(model.parameters(), warmup_steps=100),
        ]
        ''',
    'shared_arguments': '''
        common: ballast.torch.Arguments = {'servers': ['a:1', 'b:2'], 'tls': {'ca': 'ca.pem'}, 'step_timeout': 60}
        of_critic: ballast.torch.Arguments = {**common, 'name': 'critic', 'max_norm': 1}
        actor = ballast.torch.AdamW(model.parameters(), **common)
        critic = ballast.torch.Lion(model.parameters(), **of_critic)
        ''',
    'subclass': '''
        class Mine(ballast.torch.AdamW):
            def warm(self, rate: float) -> None:
                for group in self.param_groups:
                    group['lr'] = rate

        Mine(model.named_parameters(), overlap=model, push_early=False).warm(1e-4)
        ''',
    'loop': '''
        def train(batches: list[torch.Tensor]) -> float:
            optimizer = ballast.torch.SGD(model.parameters(), lr=0.1, states='full')
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
            for batch in batches:
                loss = model(batch).square().mean()  # Any: of torch itself, Tensor.backward has no types
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            optimizer.wait()

            def closure() -> float:
                optimizer.zero_grad()
                loss = model(batches[0]).mean()
                loss.backward()
                return float(loss)
            return optimizer.step(closure) + optimizer.stats()['pull_seconds']
        ''',
    'states': '''
        optimizer = ballast.torch.AdamW(model.named_parameters())
        torch.save([optimizer.state_dict(), optimizer.full_state_dict()], 'state.pt')
        optimizer.load_state_dict(torch.load('state.pt')[0])
        optimizer.rollback(max(optimizer.versions()))
        optimizer.sync_from_params()
        moment: torch.Tensor = optimizer.state[model.weight]['exp_avg']
        ballast.torch.export_state(optimizer, 'export')
        ballast.torch.import_state(optimizer, 'export')
        step, schedule, client = ballast.torch.load_universal(optimizer, 'ckpt')
        where: str = ballast.torch.save_universal(optimizer, 'ckpt', client_state={'step': step})
        ''',
    'sixteen_bits': '''
        optimizer = ballast.torch.AdamW(model.half().parameters(), max_norm=1.0, debug=True)
        scaler = ballast.torch.LossScaler()
        scaler.scale(model(torch.ones(1, 4).half()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        ''',
    'sharded': '''
        ballast.torch.shard(model, units=[model], frozen='q8', reshard_after_forward=True)
        optimizer = ballast.torch.AdamW(model.named_parameters(), dram='256MiB', open_timeout=5)
        with ballast.torch.gathered(model) as whole:
            state = whole.state_dict()
        layer: nn.Module = ballast.torch.TiledLinear.of(model, in_tiles=2)
        ''',
    'evaluation': '''
        with ballast.torch.Reader('run', servers='a:1,b:2', tls={'ca': 'ca.pem'}, timeout=60) as reader:
            read = reader.read(model, masters=True)
            later: bool = reader.newest() > read.version
            names: tuple[str, ...] = reader.read(model, strict=False).missing
        ''',
    'memory': '''
        stash = ballast.torch.stash(model, dram=0, nvme='1GiB', directory='.')
        with stash:
            model(torch.ones(4)).sum().backward()
        moved: float = stash.stats()['moved']
        told = ballast.estimate(model, dram='8GiB', nvme='100GiB', ranks=2, servers=0, moments='i8')
        sizes: dict[str, int] = dict(told.tiers)
        print(told.text, told.fits, told.rank_bytes + 1, told.step_seconds)
        try:
            ballast.drop(ballast.jobs('state')[0], 'state')
        except ballast.Error as error:
            reason: str = error.reason
        ''',
}
# One wrong argument each, on the last line.
WRONG = {
    'typo': "ballast.torch.AdamW(model.parameters(), dirctory='state')",
    'choice': "ballast.torch.AdamW(model.parameters(), resume='atuo')",
    'float_of_bytes': 'ballast.torch.SGD(model.parameters(), dram=1.5)',
    'servers': 'ballast.torch.Adam(model.parameters(), servers=7070)',
    'durability': "ballast.torch.Lion(model.parameters(), durability='steps')",
    'moments_of_8_bits': "ballast.torch.AdamW8bit(model.parameters(), moments='bf16')",
    'of_another_optimizer': 'ballast.torch.AdamW(model.parameters(), momentum=0.9)',
    'overlap': 'ballast.torch.Adagrad(model.parameters(), overlap=True)',
    'estimate': 'ballast.estimate(model, rank=2)',
    'blob': "ballast.torch.AdamW(model.parameters()).step(blob='cursor')",
    'method': 'ballast.torch.AdamW(model.parameters()).sync()',
    'reader': "ballast.torch.Reader('run', directory='state')",
    'shard': 'ballast.torch.shard(model, unit=[model])',
}


@pytest.fixture(scope='module')
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('programs')
    for name, text in RIGHT.items():
        (folder / f'right_{name}.py').write_text(HEAD + inspect.cleandoc(text) + '\n')
    for name, text in WRONG.items():
        (folder / f'wrong_{name}.py').write_text(HEAD + text + '\n')
    return folder


def check(found):
    """found: {file: {line, ...}} of errors."""
    last = len(HEAD.splitlines()) + 1
    assert found == {f'wrong_{name}.py': {last} for name in WRONG}


def test_the_stub_has_the_names_of_the_native_module():
    """mypy reads client/python/ballast/_native.pyi, and nothing else says what the module has."""
    def public(names):
        return {name for name in names if not name.startswith('_')}

    def named(body):
        defined = (ast.ClassDef, ast.FunctionDef)
        return public([each.name for each in body if isinstance(each, defined)]
                      + [each.target.id for each in body if isinstance(each, ast.AnnAssign)])
    stub = ast.parse((SOURCES / 'ballast/_native.pyi').read_text(encoding='utf-8')).body
    classes = {each.name: each for each in stub if isinstance(each, ast.ClassDef)}
    assert named(stub) - {'Store'} == public(dir(_native))  # Store: what Session.open() asks of Python
    for name, described in classes.items():
        if name != 'Store':
            assert named(described.body) == public(vars(getattr(_native, name))), name


def test_mypy(programs):
    pytest.importorskip('mypy')
    # The package as one that is installed: what it has to say of itself is not the user's. The cache lies in the build folder, and is that
    # of tests/tools/mypy.sh; options that are not its own would have torch read anew.
    cache = SOURCES.parent / 'mypy_cache'
    with open(f'{cache}.lock', 'w', encoding='ascii') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = subprocess.run([sys.executable, '-m', 'mypy', '--config-file', README.parent / 'pyproject.toml', '--follow-imports=silent',
                              '--cache-dir', cache, '.'], cwd=programs, env={**os.environ, 'MYPYPATH': str(SOURCES)},
                             capture_output=True, text=True)
    found = {}
    for file, line in re.findall(r'^(\w+\.py):(\d+): error', run.stdout, re.M):
        found.setdefault(file, set()).add(int(line))
    print(run.stdout, run.stderr)
    check(found)


def test_pyright(programs):
    """pyright, or basedpyright with pyright's own rules, which brings its program along."""
    program = next((found for name in ('pyright', 'basedpyright')
                    if (found := shutil.which(name, path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'))), None)
    if program is None:
        pytest.skip('neither pyright nor basedpyright is here: pip install basedpyright')
    (programs / 'pyrightconfig.json').write_text(json.dumps({
        'typeCheckingMode': 'standard', 'extraPaths': [str(SOURCES)], 'pythonVersion': '3.11'}))
    run = subprocess.run([program, '--outputjson', '--level', 'error', '--pythonpath', sys.executable, '.'], cwd=programs,
                         capture_output=True, text=True)
    found = {}
    for said in json.loads(run.stdout)['generalDiagnostics']:
        print(said['file'], said['range']['start']['line'] + 1, said['message'])
        found.setdefault(os.path.basename(said['file']), set()).add(said['range']['start']['line'] + 1)
    check(found)


@pytest.mark.parametrize('optimizer', OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_help_shows_every_argument(optimizer):
    parameters = inspect.signature(optimizer).parameters
    assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = options.Shared if optimizer is bt.AdamW8bit else options.Arguments
    assert len(arguments.__annotations__) >= 24 - (optimizer is bt.AdamW8bit)
    for name, default in options.complete('', {}).items():
        if name not in arguments.__annotations__:
            assert name not in parameters
            continue
        assert (parameters[name].default, parameters[name].kind) == (default, inspect.Parameter.KEYWORD_ONLY)
        assert re.search(rf'^    {name}: \w', optimizer.__doc__, re.M) or re.search(rf'^    {name}: `', optimizer.__doc__, re.M)
    assert optimizer.__doc__.startswith(('torch.optim.', 'AdamW with', 'Lion', 'AdEMAMix', 'AdamWScheduleFree'))


def test_torch_arguments_keep_their_order_and_defaults():
    for name in ('AdamW', 'Adam', 'SGD', 'Adagrad'):
        torchs = inspect.signature(getattr(torch.optim, name)).parameters
        ours = inspect.signature(getattr(bt, name)).parameters
        assert set(torchs) <= set(ours)
        positional = [key for key, parameter in torchs.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
        assert list(ours)[:len(positional)] == positional
        assert {key: ours[key].default for key in torchs} == {key: parameter.default for key, parameter in torchs.items()}


def test_the_readme_has_the_table():
    """python -c "from ballast.torch import options; print(options.markdown())" prints it."""
    assert options.markdown() in README.read_text(encoding='utf-8')


def test_an_unknown_argument_names_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"^AdamW\(\) got an unexpected keyword argument 'dirctory'; did you mean 'directory'\?"):
        bt.AdamW(torch.nn.Linear(2, 2).parameters(), dirctory='state')
    with pytest.raises(TypeError, match=r"^Lion\(\) got an unexpected keyword argument 'quite_else'; help\(ballast.torch.AdamW\)"):
        bt.Lion(torch.nn.Linear(2, 2).parameters(), quite_else=1)


@pytest.mark.parametrize('decoupled', [False, True])
def test_adam_with_either_weight_decay(decoupled, job):
    if 'decoupled_weight_decay' not in inspect.signature(torch.optim.Adam).parameters:
        pytest.skip(f'torch {torch.__version__} has no decoupled_weight_decay')
    results = []
    for make, arguments in ((torch.optim.Adam, {}), (bt.Adam, job)):
        torch.manual_seed(7)
        model = torch.nn.Linear(8, 8)
        optimizer = make(model.parameters(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=decoupled, **arguments)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
        assert optimizer.param_groups[0]['decoupled_weight_decay'] == decoupled
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results)
