"""Durable jobs: killed and restarted processes, state dicts, going back. Each in processes of its own."""
import pytest
import torch
from own_process import run, run_anew

LOOP = '''
model = mlp()
optimizer = make(model, resume='auto', durability=os.environ['DURABILITY'], pin_interval=int(os.environ['PIN_INTERVAL']))
start, blob = optimizer.resume()
cursor = int(blob or b'0')
assert cursor == start, (cursor, start)
data = list(batches(30))
for i in range(start, 30):
    optimizer.zero_grad()
    loss = loss_of(model, data[i])
    loss.backward()
    optimizer.step(blob=str(i + 1).encode())
    with open('losses.txt', 'a') as out:
        print(i, loss.item().hex(), file=out, flush=True)
    if i in (9, 17) and not os.path.exists(f'killed{i}') and 'KILL' in os.environ:
        open(f'killed{i}', 'w').close()
        os.kill(os.getpid(), signal.SIGKILL)
torch.save(model.state_dict(), 'model.pt')
'''


def last_losses(folder):
    """By step: the last that was printed, since a step may be made again."""
    return dict(line.split() for line in (folder / 'losses.txt').read_text().splitlines())


@pytest.mark.parametrize('durability,interval', [('step', '0'), ('every-K', '4')])
def test_a_killed_trainer_goes_on_with_the_same_bits(durability, interval, tmp_path):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    whole.mkdir()
    killed.mkdir()
    variables = {'DURABILITY': durability, 'PIN_INTERVAL': interval}
    run(whole, LOOP, **variables)
    # Nothing may hang on the order of sets and the hashes of strings, which are others in each process.
    start = run_anew if durability == 'step' else run
    for i in range(3):
        start(killed, LOOP, expect=-9 if i < 2 else 0, KILL='1', PYTHONHASHSEED=str(i + 1), **variables)
    assert last_losses(killed) == last_losses(whole)
    steps_made = len((killed / 'losses.txt').read_text().splitlines())
    assert steps_made == 30 if durability == 'step' else 30 <= steps_made <= 38
    expected = torch.load(whole / 'model.pt')
    for name, value in torch.load(killed / 'model.pt').items():
        assert torch.equal(value, expected[name]), name


CHECKPOINT = '''
model = mlp()
optimizer = make(model)
data = list(batches(30))
def train(begin, end):
    for i in range(begin, end):
        optimizer.zero_grad()
        loss_of(model, data[i]).backward()
        optimizer.step()
train(0, 10)
optimizer.param_groups[0]['lr'] = 5e-3
saved = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
torch.save(saved, 'checkpoint.pt')
assert not saved['optimizer']['state'] and os.path.getsize('checkpoint.pt') < 20000 + sum(4 * p.numel() for p in model.parameters())
train(10, 20)
torch.save(model.state_dict(), 'expected.pt')
'''


RESUME = '''
model = mlp()
optimizer = make(model)
saved = torch.load('checkpoint.pt', weights_only=True)
model.load_state_dict(saved['model'])
optimizer.load_state_dict(saved['optimizer'])
assert optimizer.param_groups[0]['lr'] == 5e-3
assert optimizer.resume().step == 10
for batch in list(batches(30))[10:20]:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
for name, value in torch.load('expected.pt').items():
    assert torch.equal(value, model.state_dict()[name]), name
'''


def test_a_state_dict_takes_the_job_back(tmp_path):
    run(tmp_path, CHECKPOINT)
    run(tmp_path, RESUME)
    run(tmp_path, RESUME)  # again: the version is still there


def test_a_state_dict_of_another_job_or_version_is_refused(tmp_path):
    run(tmp_path, CHECKPOINT)
    run(tmp_path, '''
        from ballast.torch.states import marker
        saved = torch.load('checkpoint.pt', weights_only=True)['optimizer']
        said = marker.of(saved['param_groups'])
        for name, change, reason in (('other', {}, 'BAD_SPEC'), ('default', {'version': 3}, 'VERSION_GONE')):
            optimizer = make(mlp(), name=name)
            saved['param_groups'][0][marker.KEY] = said._replace(**change).tensor()
            try:
                optimizer.load_state_dict(saved)
            except ballast.Error as error:
                assert error.reason == reason, error
            else:
                raise AssertionError(name)
            optimizer.close()
        ''')


def test_going_back_to_the_current_version_gives_up_edits_that_no_step_has_taken(tmp_path):
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model, checkpoints=1)
        data = list(batches(5))
        def train(begin, end):
            for i in range(begin, end):
                optimizer.zero_grad()
                loss_of(model, data[i]).backward()
                optimizer.step()
        train(0, 3)
        named = optimizer.state_dict()
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model[0].weight.add_(1)
        optimizer.sync_from_params()
        optimizer.load_state_dict(named)
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name]), name
        train(3, 4)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.load_state_dict(named)
        train(3, 4)
        for name, value in model.state_dict().items():
            assert torch.equal(value, trained[name]), name
        optimizer.close()
    ''')


def test_going_back_within_a_run(tmp_path):
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model, checkpoints=1)
        data = list(batches(9))
        def train(begin, end):
            for i in range(begin, end):
                optimizer.zero_grad()
                loss_of(model, data[i]).backward()
                optimizer.step(blob=b'%d' % i)
        named = []
        for i in range(3):
            train(3 * i, 3 * i + 3)
            named.append(optimizer.state_dict())
            bits = {name: value.clone() for name, value in model.state_dict().items()} if i == 1 else bits if i else None
        assert optimizer.versions() == [6, 9], optimizer.versions()
        optimizer.rollback(6)
        assert optimizer.resume() == (6, b'5'), optimizer.resume()
        for name, value in bits.items():
            assert torch.equal(value, model.state_dict()[name]), name
        train(6, 9)
        ''')


def test_a_wrong_tensor_on_resume_is_named(tmp_path):
    run(tmp_path, CHECKPOINT)
    run(tmp_path, '''
        try:
            make(torch.nn.Sequential(torch.nn.Linear(16, 8)), resume='auto').resume()
        except ballast.Error as error:
            assert error.reason == 'BAD_SPEC' and '0.weight' in str(error), error
        else:
            raise AssertionError('accepted')
        ''')


def test_a_missing_job_under_must(tmp_path):
    run(tmp_path, '''
        try:
            make(mlp(), resume='must').resume()
        except ballast.Error as error:
            assert error.reason == 'JOB_MISSING', error
        else:
            raise AssertionError('accepted')
        ''')


SAVING = '''
model = mlp()
optimizer = make(model, checkpoints=1)
if os.path.exists('saved.pt'):
    optimizer.load_state_dict(torch.load('saved.pt', weights_only=True))
for batch in batches(5):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
state = optimizer.state_dict()
if os.path.exists('saved.pt'):
    os.kill(os.getpid(), signal.SIGKILL)  # before it is saved
torch.save(state, 'saved.pt')
'''


def test_a_saved_state_dict_survives_processes_that_die_before_they_save(tmp_path):
    run(tmp_path, SAVING)
    for _ in range(4):
        run(tmp_path, SAVING, expect=-9)
    run(tmp_path, '''
        optimizer = make(mlp())
        optimizer.load_state_dict(torch.load('saved.pt', weights_only=True))
        assert optimizer.resume().step == 5
        ''')


def test_an_edit_that_a_skipped_step_left_is_in_the_models_state_and_in_nobodys_way(tmp_path):
    run(tmp_path, '''
        import copy
        import warnings
        model = mlp()
        optimizer = make(model, checkpoints=3)
        def train(count):
            for batch in batches(count):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        def clamp_and_skip(bound):
            with torch.no_grad():
                model[0].weight.clamp_(-bound, bound)
            optimizer.zero_grad()
            loss_of(model, next(batches(1))).backward()
            model[3].bias.grad[1] = float('nan')
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                optimizer.step()
            assert optimizer.last_step_skipped
        train(3)
        first, weight = optimizer.state_dict(), model[0].weight.detach().clone()
        clamp_and_skip(0.05)
        second, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        train(2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            optimizer.load_state_dict(second)
        assert "Only the model's own state_dict() has those values" in str(said[0].message)
        model.load_state_dict(weights)
        assert model[0].weight.abs().max() <= 0.05
        clamp_and_skip(0.01)
        optimizer.load_state_dict(first)
        assert torch.equal(model[0].weight, weight)
        clamp_and_skip(0.02)
        optimizer.load_state_dict(optimizer.full_state_dict())
        train(1)
        assert model[0].weight.abs().max() <= 0.02 + 1.1e-2, 'the rate, and a little'
        ''')


def test_an_edit_after_the_last_step_is_the_models_own(tmp_path):
    """A named state taken over an edit leaves parameters to the model's state, in either order of the loads."""
    run(tmp_path, '''
        import copy
        model = mlp()
        optimizer = make(model)
        def train(count):
            for batch in batches(count):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        train(3)
        with torch.no_grad():
            model[0].weight.clamp_(-0.05, 0.05)
        state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        for loads in ((model, weights), (optimizer, state)), ((optimizer, state), (model, weights)):
            train(2)
            assert not torch.equal(model[0].weight, weights['0.weight'])
            for owner, each in loads:
                owner.load_state_dict(each)
            assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
        train(1)
        assert optimizer.resume().step == 4
        ''')


GROWING = '''
def named(model, layer):
    return [(name, p) for name, p in model.named_parameters() if name.startswith(layer)]
def grow(model, optimizer, i):
    if i == 5:
        optimizer.add_param_group({'params': named(model, '2'), 'lr': 1e-3})
    if i == 10:
        model[0].weight.requires_grad_(True)
def make_growing(model, **more):
    model[0].weight.requires_grad_(False)
    return bt.AdamW([{'params': [(name, p) for name, p in model.named_parameters() if name[0] != '2']}], lr=1e-2,
                    directory='state', dram='128MiB', nvme='1GiB', threads=2, **more)
def loop(model, optimizer, begin, end):
    for i, batch in list(enumerate(batches(end)))[begin:]:
        grow(model, optimizer, i)
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
'''


@pytest.mark.parametrize('frozen', [True, False])
def test_a_job_that_grew_is_resumed(frozen, tmp_path):
    """By a script that has all groups from the start; with the tensor that was unfrozen later frozen again, or not."""
    run(tmp_path, GROWING + '''
model = mlp()
loop(model, make_growing(model, name='whole'), 0, 25)
torch.save(model.state_dict(), 'expected.pt')
torch.manual_seed(5)
model = mlp()
loop(model, make_growing(model), 0, 15)
''')
    run(tmp_path, GROWING + f'''
model = mlp()
optimizer = make_growing(model, resume='must')
optimizer.add_param_group({{'params': named(model, '2'), 'lr': 1e-3}})
model[0].weight.requires_grad_(not {frozen})
assert optimizer.resume().step == 15
model[0].weight.requires_grad_(True)
loop(model, optimizer, 15, 25)
for name, value in torch.load('expected.pt').items():
    assert torch.equal(value, model.state_dict()[name]), name
''')


def test_a_job_of_a_smaller_model_is_resumed(tmp_path):
    """What the job has not got begins with the next step, as if it had come amid training; a model that has less is refused."""
    run(tmp_path, GROWING + '''
model = mlp()
loop(model, make_growing(model, name='whole'), 0, 15)
torch.save(model.state_dict(), 'expected.pt')
torch.manual_seed(5)
model = mlp()
loop(model, make_growing(model), 0, 5)
''')
    told = run(tmp_path, GROWING + '''
model = mlp()
model[0].weight.requires_grad_(False)
def groups():
    return [{'params': [(name, p) for name, p in model.named_parameters() if (name[0] == '2') == own], 'lr': lr}
            for own, lr in ((False, 1e-2), (True, 1e-3))]
optimizer = bt.AdamW(groups(), directory='state', dram='128MiB', nvme='1GiB', threads=2, resume='must')
assert optimizer.resume().step == 5
assert optimizer.state[model[2].weight] == {} and optimizer.state[model[3].weight]['step'] == 5
def grow(model, optimizer, i):
    if i == 10:
        model[0].weight.requires_grad_(True)
loop(model, optimizer, 5, 15)
for name, value in torch.load('expected.pt').items():
    assert torch.equal(value, model.state_dict()[name]), name
''')
    assert "job 'default' has no state of 2 parameters, '2.bias' among them; the next step starts their state from zero" in told
    run(tmp_path, GROWING + '''
model = mlp()
try:
    bt.AdamW([(name + 'x' * (name[0] == '2'), p) for name, p in model.named_parameters()], directory='state', dram='128MiB',
             nvme='1GiB', threads=2, resume='must').resume()
except ballast.Error as error:
    assert error.reason == 'TENSORS_DIFFER' and 'which this session does not name' in str(error), error
else:
    raise AssertionError
''')


def test_a_job_of_every_k_takes_on_no_more(tmp_path):
    """Its kept versions would have no state of it."""
    small = """
def small(model):
    return [(name, p) for name, p in model.named_parameters() if name[0] != '2']
keep = dict(lr=1e-2, directory='state', dram='128MiB', nvme='1GiB', threads=2, durability='every-K', pin_interval=2)
"""
    run(tmp_path, small + """
model = mlp()
optimizer = bt.AdamW(small(model), **keep)
for batch in batches(4):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
""")
    run(tmp_path, small + """
try:
    bt.AdamW(mlp().named_parameters(), resume='must', **keep).resume()
except ballast.Error as error:
    assert error.reason == 'TENSORS_DIFFER' and "the job does not have tensor '2." in str(error), error
else:
    raise AssertionError
model = mlp()
assert bt.AdamW(small(model), resume='must', **keep).resume().step in (2, 4)  # the last pin may not have been there yet
""")


def test_a_job_of_every_k_does_not_grow_and_goes_on(tmp_path):
    run(tmp_path, '''
        model, late = mlp(), torch.nn.Parameter(torch.ones(4))
        optimizer = make(model, durability='every-K', pin_interval=2)
        def step():
            loss_of(model, next(batches(1))).backward()
            optimizer.step()
        step()
        optimizer.add_param_group({'params': [late]})
        try:
            step()
        except ballast.Error as error:
            assert 'every-K' in str(error) and 'group1.0' in str(error), error
        else:
            raise AssertionError('accepted')
        optimizer.param_groups.pop()
        step()
        assert optimizer.stats()['steps'] == 2
        ''')
