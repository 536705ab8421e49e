"""Durable jobs: killed and restarted processes, state dicts, going back. Each in processes of its own."""
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

HERE = pathlib.Path(__file__).parent

HEAD = f'''
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where whoever runs the tests ignores it
import torch
sys.path.insert(0, {str(HERE)!r})
from scripts import batches, loss_of, mlp
import ballast, ballast.torch as bt
torch.manual_seed(5)
def make(model, **more):
    arguments = dict(lr=1e-2, directory='state', dram='128MiB', nvme='1GiB', threads=2)
    return bt.AdamW(model.named_parameters(), **{{**arguments, **more}})
'''


def run(folder, body, expect=0, seconds=300, **variables):
    script = folder / 'script.py'
    script.write_text(HEAD + textwrap.dedent(body), encoding='utf-8')
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
                          env={**os.environ, **variables})
    assert done.returncode == expect, f'{done.returncode}\n{done.stdout}\n{done.stderr}'
    return done


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
    for _ in range(2):
        run(killed, LOOP, expect=-9, KILL='1', **variables)
    run(killed, LOOP, KILL='1', **variables)
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
assert sum(value.numel() for value in saved['optimizer']['ballast'].values()) < 100
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
        saved = torch.load('checkpoint.pt', weights_only=True)['optimizer']
        for name, change, reason in (('other', {}, 'BAD_SPEC'), ('default', {'version': torch.tensor(3)}, 'VERSION_GONE')):
            optimizer = make(mlp(), name=name)
            try:
                optimizer.load_state_dict({**saved, 'ballast': {**saved['ballast'], **change}})
            except ballast.Error as error:
                assert error.reason == reason, error
            else:
                raise AssertionError(name)
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


def test_after_a_budget_that_was_too_small_another_may_be_given(tmp_path):
    run(tmp_path, '''
        try:
            make(mlp(), dram='4KiB', nvme=0, durability='none').resume()
        except ballast.Error as error:
            assert error.reason == 'BUDGET', error
        else:
            raise AssertionError('accepted')
        assert make(mlp()).resume().step == 0
        try:
            make(mlp(), name='second', dram='96MiB').resume()  # in use now
        except ballast.Error as error:
            assert error.reason == 'BAD_CONFIG', error
        else:
            raise AssertionError('accepted')
        ''')


def test_a_directory_in_use_names_its_process(tmp_path):
    run(tmp_path, '''
        optimizer = make(mlp(), resume='auto')
        optimizer.resume()
        child = os.popen(f"{sys.executable} -c 'import torch, ballast.torch as bt; "
                         "bt.AdamW([torch.nn.Parameter(torch.zeros(4))], directory=\\"state\\").resume()' 2>&1").read()
        assert str(os.getpid()) in child and 'state' in child, child
        ''')


def test_threads_that_open_at_once_share_a_server(tmp_path):
    run(tmp_path, '''
        import threading
        from ballast import embedded
        together, ended = threading.Barrier(4), []
        def first_step(i):
            model = mlp() if i else torch.nn.Linear(1 << 14, 1 << 12)  # which has no room
            optimizer = make(model, name=f'job{i}', resume='never')
            together.wait()
            try:
                optimizer.resume()
            except ballast.Error as error:
                ended.append((i, error.reason))
            else:
                ended.append((i, None))
        threads = [threading.Thread(target=first_step, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ended) == [(0, 'BUDGET'), (1, None), (2, None), (3, None)], ended
        assert embedded.directory() == os.path.abspath('state')
        ''')


def test_forked_workers_of_a_data_loader(tmp_path):
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))),
                                           batch_size=8, num_workers=2)
        for epoch in range(2):
            for batch in data:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                optimizer.step()
            except ballast.Error as error:
                os._exit(7 if 'fork' in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        # One that ends in the ordinary way waits for no thread of the parent's.
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(into, 1)
            print('said', end='')
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert os.read(out, 9) == b'said'
        optimizer.zero_grad()
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        ''')


def test_ctrl_c_leaves_no_lock_behind(tmp_path):
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model)
        for i, batch in enumerate(batches(5)):
            loss_of(model, batch).backward()
            optimizer.step()
            if i == 3:
                os.kill(os.getpid(), signal.SIGINT)
        ''', expect=-2)
    run(tmp_path, 'assert make(mlp(), resume="must").resume().step == 4')


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


def test_an_edit_after_the_last_step_is_in_the_state_dict(tmp_path):
    run(tmp_path, '''
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
        state = optimizer.state_dict()
        train(2)
        optimizer.load_state_dict(state)
        assert model[0].weight.abs().max() <= 0.05
        ''')


def test_closing_while_another_thread_steps(tmp_path):
    run(tmp_path, '''
        import threading, time
        model = mlp()
        optimizer = make(model)
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        raised = []
        def work():
            try:
                for _ in range(2000):
                    optimizer.step()
            except ballast.Error as error:
                raised.append(str(error))
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive() and optimizer.stats()['steps'] < 5:
            time.sleep(0.001)
        optimizer.close()
        thread.join()
        assert raised and 'closed' in raised[0], raised
        ''')


def test_the_same_line_finds_room_again_on_a_disk_that_is_nearly_full(tmp_path):
    from ballast import place
    (tmp_path / 'jobs').mkdir()
    before = place.budgets(tmp_path / 'jobs', 1, None)[1]
    with open(tmp_path / 'jobs' / 'nvme.tier', 'wb') as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 30)
    assert abs(place.budgets(tmp_path / 'jobs', 1, None)[1] - before) < 1 << 28


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
    assert "job 'default' has no state of 2 parameters, '2.bias' among them: they begin anew" in told.stderr
    run(tmp_path, GROWING + '''
model = mlp()
try:
    bt.AdamW([(name + 'x' * (name[0] == '2'), p) for name, p in model.named_parameters()], directory='state', dram='128MiB',
             nvme='1GiB', threads=2, resume='must').resume()
except ballast.Error as error:
    assert error.reason == 'BAD_SPEC' and 'which this session does not name' in str(error), error
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
    assert error.reason == 'BAD_SPEC' and "tensor '2." in str(error) and 'is not in the job' in str(error), error
else:
    raise AssertionError
model = mlp()
assert bt.AdamW(small(model), resume='must', **keep).resume().step in (2, 4)  # the last pin may not have been there yet
""")


@pytest.mark.parametrize('daemon', [False, True])
def test_temporary_directories_of_killed_processes_go(daemon, tmp_path):
    start = f'''
from ballast import embedded, embedded_daemon, temporary
def start():
    if {daemon}:
        return embedded_daemon.Daemon(None, '64MiB', None, 1)
    return embedded.server(dram='64MiB', threads=1)
server = start()
'''
    temporary = tmp_path / 'temporary'
    temporary.mkdir()
    (temporary / 'ballast-of-somebody').mkdir()

    def left():
        return {path.name for path in temporary.iterdir()} - {'ballast-of-somebody'}
    run(tmp_path, start + 'os.kill(os.getpid(), signal.SIGKILL)', expect=-9, TMPDIR=str(temporary))
    stale = left()
    assert len(stale) == 1
    run(tmp_path, start + f'''
assert not os.path.exists({str(temporary)!r} + '/{stale.pop()}')
mine = server.place.directory
# Another process, a child, and this one again: while its process lives, a directory stays.
import subprocess
code = 'from ballast import temporary; temporary.remove(temporary.make())'
subprocess.run([sys.executable, '-c', code], check=True)
temporary.remove(temporary.make())
subprocess.run([sys.executable, '-c', code], check=True)
child = os.fork()
if child == 0:
    temporary.remove(temporary.make())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.path.isdir(mine)
''', TMPDIR=str(temporary))
    assert not left() and (temporary / 'ballast-of-somebody').is_dir()


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


STOPPED = '''
import atexit, subprocess, threading
import ballast.embedded_daemon
server = subprocess.Popen([ballast.embedded_daemon._binary(), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0',
                           '--metrics_listen', '127.0.0.1:0', '--data_directory', 'server', '--budget.dram', '64MiB', '--log_level', 'warn'],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
atexit.register(server.kill)
address = server.stdout.readline().split('listen=')[1].split()[0]
def interrupt():
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
model = mlp()
def make(**more):
    return bt.AdamW(model.parameters(), servers=address, durability='none', step_timeout=3000, open_timeout=3000, **more)
def step():
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
'''


@pytest.mark.parametrize('what', ['open', 'step', 'overlapped step'])
def test_ctrl_c_ends_the_wait_for_a_server_that_does_not_answer(what, tmp_path):
    """And then the process, at once: nothing waits any more."""
    body = {'open': '''
optimizer = make()
server.send_signal(signal.SIGSTOP)
interrupt()
step()
''', 'step': '''
optimizer = make()
step()
server.send_signal(signal.SIGSTOP)
interrupt()
step()
''', 'overlapped step': '''
optimizer = make(overlap=model)
step()
optimizer.wait()
server.send_signal(signal.SIGSTOP)
interrupt()
step()
optimizer.wait()
'''}[what]
    done = run(tmp_path, STOPPED + body, expect=-2, seconds=60)
    assert 'KeyboardInterrupt' in done.stderr


def test_ctrl_c_amid_a_step_that_ends_leaves_the_session_as_it_is(tmp_path):
    run(tmp_path, STOPPED + '''
optimizer = make()
step()
server.send_signal(signal.SIGSTOP)
interrupt()
threading.Timer(2, server.send_signal, (signal.SIGCONT,)).start()
try:
    step()
except KeyboardInterrupt:
    interrupted = True
assert interrupted
assert optimizer.resume().step == 2
step()
assert optimizer.resume().step == 3
''', seconds=60)
