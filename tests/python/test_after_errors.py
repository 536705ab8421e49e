"""A process that lives on after an error, as a notebook's does: exceptions, their tracebacks and all that these hold are kept, nothing
is collected, and the same call with the advice followed works."""
import json
import textwrap

import pytest
from own_process import run

CASES = {
    'job exists, resume=auto': '''
        first(steps=2)
        refused('JOB_EXISTS', lambda: make(mlp()).resume())
        assert works(make(mlp(), resume='auto')) == 3
        ''',
    'job exists, another name': '''
        first()
        refused('JOB_EXISTS', lambda: make(mlp()).resume())
        assert works(make(mlp(), name='another')) == 1
        ''',
    'job exists, another directory': '''
        first()
        refused('JOB_EXISTS', lambda: make(mlp()).resume())
        assert works(make(mlp(), directory='another')) == 1
        ''',
    'job exists, dropped': '''
        first()
        refused('JOB_EXISTS', lambda: make(mlp()).resume())
        assert ballast.jobs(here) == ['default']
        ballast.drop('default', here)
        assert ballast.jobs(here) == []
        assert works(make(mlp())) == 1
        ''',
    'job exists beside another optimizer': '''
        first()
        other = make(mlp(), name='other')
        assert works(other, close=False) == 1
        refused('JOB_EXISTS', lambda: make(mlp()).resume())
        assert works(make(mlp(), resume='auto')) == 2
        assert works(other) == 2
        ''',
    'job exists at the first step': '''
        first()
        refused('JOB_EXISTS', lambda: works(make(mlp())))
        assert works(make(mlp(), resume='auto')) == 2
        ''',
    'job missing': '''
        refused('JOB_MISSING', lambda: make(mlp(), resume='must').resume())
        assert works(make(mlp(), resume='auto')) == 1
        ''',
    'dram too small': '''
        refused('BUDGET', lambda: make(mlp(), dram='4KiB', nvme=0, durability='none').resume())
        assert works(make(mlp(), durability='none')) == 1
        ''',
    'dram too small, temporary directory': '''
        refused('BUDGET', lambda: make(mlp(), directory=None, nvme=None, dram='4KiB').resume())
        assert works(make(mlp(), directory=None, nvme=None)) == 1
        ''',
    'dram too small after an optimizer that was closed': '''
        assert works(make(torch.nn.Linear(2, 2), name='small', dram='16MiB', nvme=0, durability='none')) == 1
        refused('BUDGET', lambda: make(torch.nn.Linear(4096, 2048), dram='16MiB', nvme=0, durability='none').resume())
        assert works(make(mlp(), durability='none')) == 1
        ''',
    'dram too small beside an open optimizer': '''
        other = make(torch.nn.Linear(2, 2), name='small', dram='16MiB', nvme=0, durability='none')
        assert works(other, close=False) == 1
        refused('BUDGET', lambda: make(torch.nn.Linear(4096, 2048), dram='16MiB', nvme=0, durability='none').resume())
        refused('BAD_CONFIG', lambda: make(mlp(), durability='none').resume())
        other.close()
        assert works(make(mlp(), durability='none')) == 1
        ''',
    'nvme too small': '''
        refused('BUDGET', lambda: make(mlp(), nvme='1MiB').resume())
        assert works(make(mlp())) == 1
        ''',
    'more than the machine has': '''
        refused('BAD_CONFIG', lambda: make(mlp(), dram='64TiB').resume())
        assert works(make(mlp())) == 1
        ''',
    'a directory that cannot be made': '''
        open(here, 'w').close()
        refused('BAD_CONFIG', lambda: make(mlp(), directory=here + '/within').resume())
        assert works(make(mlp(), directory=here + '-beside')) == 1
        ''',
    'a directory in use by another process': '''
        import subprocess
        os.makedirs(here)
        code = f"from ballast import embedded; embedded.server({here!r}, '64MiB', 0, 1); print('held', flush=True); input()"
        holder = subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout.readline() == 'held\\n'
        refused('BUSY', lambda: make(mlp()).resume())
        holder.communicate('\\n')
        assert works(make(mlp())) == 1
        ''',
    'other moments than the job': '''
        first()
        refused('BAD_SPEC', lambda: make(mlp(), resume='auto', moments='i8').resume())
        assert works(make(mlp(), resume='auto')) == 2
        ''',
    'another model than the job': '''
        first()
        refused('', lambda: make(torch.nn.Sequential(torch.nn.Linear(16, 32)), resume='auto').resume())
        assert works(make(mlp(), resume='auto')) == 2
        ''',
    'a name that servers do not take': '''
        refused('', lambda: make(mlp(), name='my run').resume())
        assert works(make(mlp(), name='my-run')) == 1
        ''',
    'an argument': '''
        refused('BAD_CONFIG', lambda: make(mlp(), dram='a lot').resume())
        assert works(make(mlp())) == 1
        ''',
    'a state_dict of another job': '''
        model = mlp()
        optimizer = make(model, name='one')
        works(optimizer, close=False)
        saved = optimizer.state_dict()
        optimizer.close()
        optimizer = make(mlp(), name='two')
        refused('BAD_SPEC', lambda: optimizer.load_state_dict(saved))
        assert works(optimizer) == 1
        optimizer = make(model, name='one', resume='must')
        optimizer.load_state_dict(saved)
        assert works(optimizer) == 2
        ''',
    'a state that does not fit': '''
        optimizer = make(mlp(), durability='none')
        saved = torch.optim.AdamW(mlp().parameters(), lr=1e-2).state_dict()
        wrong = {'state': {0: {'step': torch.tensor(1.0), 'exp_avg': torch.zeros(3), 'exp_avg_sq': torch.zeros(3)}},
                 'param_groups': saved['param_groups']}
        refused('BAD_SPEC', lambda: optimizer.load_state_dict(wrong))
        model = mlp()
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, next(batches(1))).backward()
        theirs.step()
        optimizer.load_state_dict(theirs.state_dict())
        assert works(optimizer) == 2
        ''',
    'a version that is not kept': '''
        optimizer = make(mlp())
        works(optimizer, close=False)
        optimizer.state_dict()
        refused(None, lambda: optimizer.rollback(77))
        assert works(optimizer, close=False) == 2
        optimizer.rollback(optimizer.versions()[0])
        assert works(optimizer) == 2
        ''',
    'an export that is not there': '''
        optimizer = make(mlp(), durability='none')
        works(optimizer, close=False)
        refused('BAD_CONFIG', lambda: bt.import_state(optimizer, here + '-export'))
        bt.export_state(optimizer, here + '-export')
        refused('BAD_CONFIG', lambda: bt.export_state(optimizer, here + '-export'))
        bt.import_state(optimizer, here + '-export')
        assert works(optimizer) == 2
        ''',
    'a gradient that is refused': '''
        model = mlp()
        optimizer = make(model, durability='none')
        model[0].weight.grad = torch.zeros(64, 16).to_sparse()
        refused('UNSUPPORTED', optimizer.step)
        optimizer.zero_grad()
        assert works(optimizer) == 1
        ''',
    'an optimizer that was closed': '''
        optimizer = make(mlp())
        works(optimizer)
        refused('BAD_REQUEST', optimizer.step)
        assert works(make(mlp(), resume='auto')) == 2
        ''',
    'a drop of a job that is used, or not there': '''
        optimizer = make(mlp())
        works(optimizer, close=False)
        refused('BUSY', lambda: ballast.drop('default'))
        refused('UNKNOWN_JOB', lambda: ballast.drop('another'))
        optimizer.close()
        ballast.drop('default')
        refused('BAD_CONFIG', lambda: ballast.drop('default', here + '-not-there'))
        assert not os.path.exists(here + '-not-there')
        assert works(make(mlp())) == 1
        ''',
}

BODY = '''
import gc, json, shutil, traceback
from ballast import embedded
gc.disable()
kept = []  # as sys.last_exc, IPython's and pytest's: the exception, and by its traceback every frame's variables

def make(model, **more):
    arguments = dict(lr=1e-2, directory=here, dram='128MiB', nvme='1GiB', threads=2)
    return bt.AdamW(model.named_parameters(), **{**arguments, **more})

def works(optimizer, close=True):
    """Makes a step; how many there are then."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert not any(map(torch.equal, before, parameters))
    steps = optimizer.resume().step
    if close:
        optimizer.close()
    return steps

def first(steps=1):
    optimizer = make(mlp())
    for i in range(steps):
        assert works(optimizer, close=i + 1 == steps) == i + 1

def refused(reason, call):
    try:
        call()
    except ballast.Error as error:
        assert reason in (None, '') or error.reason == reason, (error.reason, error)
        kept.append(error)
    else:
        raise AssertionError('it was not refused')

outcomes = {}
for number, (name, case) in enumerate(cases.items()):
    here = os.path.abspath(f'state{number}')
    try:
        exec(case, {**globals(), 'here': here})
        outcomes[name] = ''
    except BaseException as error:
        kept.append(error)
        outcomes[name] = traceback.format_exc()
    assert not kept or kept[-1].__traceback__ is not None
    embedded.stop()
    for path in (here, here + '-beside', 'another'):
        shutil.rmtree(path, ignore_errors=True)
    json.dump(outcomes, open('outcomes.json', 'w'))
print(len(kept), 'exceptions kept')
'''


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
    """All of them in one process, one after another: what an earlier one left behind is part of it."""
    folder = tmp_path_factory.mktemp('after_errors')
    cases = {name: textwrap.dedent(case) for name, case in CASES.items()}
    run(folder, f'cases = {cases!r}\n{BODY}')
    return json.loads((folder / 'outcomes.json').read_text())


@pytest.mark.parametrize('case', CASES)
def test_the_advice_works(case, outcomes):
    assert outcomes[case] == '', outcomes[case]


def test_all_cases_ran(outcomes):
    assert list(outcomes) == list(CASES)


def test_every_place_of_a_server_is_taken(tmp_path):
    """256 jobs are all that there may be: closed ones that are not durable do not count, and others go by ballast.drop()."""
    run(tmp_path, '''
        def optimizer(name, **more):
            arguments = dict(directory='state', dram='768MiB', nvme='64MiB', threads=1, chunk_elements=1 << 16, durability='none')
            return bt.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, name=name, **{**arguments, **more})
        for i in range(300):
            made = optimizer(f'closed{i}')
            made.resume()
            made.close()
        assert ballast.jobs() == []
        held = [optimizer(f'held{i}') for i in range(255)]
        for each in held:
            each.resume()
        lasting = optimizer('lasting', durability='every-K', pin_interval=1)
        lasting.resume()
        lasting.close()
        assert len(ballast.jobs()) == 256
        more = optimizer('more')
        try:
            more.resume()
        except ballast.Error as error:
            kept = error
        assert kept.reason == 'BUDGET' and '256 jobs' in str(kept) and 'ballast.drop(name)' in str(kept), kept
        ballast.drop('lasting')
        assert more.resume().step == 0
        again = optimizer('again')
        try:
            again.resume()
        except ballast.Error as error:
            kept = error
        assert '256 jobs' in str(kept), kept
        held.pop().close()
        assert again.resume().step == 0
        ''')
