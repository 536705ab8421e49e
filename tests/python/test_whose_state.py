"""States say which job, and which history of it, they are of; what goes away is announced; an ended session says what is left."""
import os

import pytest
from own_process import run

# Two jobs or histories that differ in the learning rate alone, so that every version number is there twice.
HISTORIES = '''
import shutil, warnings
def open_job(resume, lr):
    model = mlp()
    optimizer = make(model, resume=resume, lr=lr)
    optimizer.resume()
    for group in optimizer.param_groups:
        group['lr'] = lr
    return model, optimizer
def train(model, optimizer, begin, end):
    """What is saved at the end."""
    for batch in list(batches(end))[begin:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'saved.pt')
    return torch.load('saved.pt', weights_only=True)
def stop(optimizer):
    optimizer.close()
    ballast.embedded.stop()
def parameters(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
def same(a, b):
    return all(torch.equal(value, b[name]) for name, value in a.items())
def refused(model, optimizer, saved, reason, *words):
    """The load is, by name, and changes nothing."""
    before, version = parameters(model), optimizer.job.opened.session.version
    try:
        optimizer.load_state_dict(saved['optimizer'])
    except ballast.Error as error:
        assert error.reason == reason and all(word in str(error) for word in words), error
    else:
        raise AssertionError('loaded')
    assert same(before, parameters(model)) and optimizer.job.opened.session.version == version
'''


@pytest.mark.parametrize('how', ['removed', 'dropped'])
@pytest.mark.parametrize('steps', [2, 4])  # 2: the new job is at the very version
def test_a_state_of_an_earlier_job_of_that_name_is_refused(how, steps, tmp_path):
    run(tmp_path, HISTORIES + '''
model, first = open_job('never', 1e-2)
earlier = train(model, first, 0, 2)
if os.environ['HOW'] == 'removed':
    stop(first)
    shutil.rmtree('state')
else:
    first.close()
    ballast.drop('default', 'state')
model, second = open_job('never', 1e-3)
own = train(model, second, 0, 2)
train(model, second, 2, int(os.environ['STEPS']))
refused(model, second, earlier, 'BAD_SPEC', "version 2 is of an earlier job 'default', which was dropped or whose data directories")
second.load_state_dict(own['optimizer'])
assert same(own['model'], parameters(model)) and second.resume().step == 2
''', HOW=how, STEPS=str(steps))


def test_a_state_of_a_history_that_a_restored_backup_gave_up_is_refused(tmp_path):
    run(tmp_path, HISTORIES + '''
model, optimizer = open_job('never', 1e-2)
common = train(model, optimizer, 0, 2)
stop(optimizer)
shutil.copytree('state', 'backup')
model, optimizer = open_job('must', 1e-2)
given_up = train(model, optimizer, 2, 4)
stop(optimizer)
shutil.rmtree('state')
shutil.move('backup', 'state')
model, optimizer = open_job('must', 1e-3)
own = train(model, optimizer, 2, 4)
assert not same(own['model'], given_up['model'])
refused(model, optimizer, given_up, 'VERSION_GONE', "version 4 of job 'default' is of another history", 'older copy')
train(model, optimizer, 4, 5)
refused(model, optimizer, given_up, 'VERSION_GONE', "version 4 of job 'default' is of another history", 'older copy')
for saved, step in ((own, 4), (common, 2)):  # also what both histories have
    optimizer.load_state_dict(saved['optimizer'])
    assert same(saved['model'], parameters(model)) and optimizer.resume().step == step
''')


def test_a_state_of_an_earlier_version_loads_with_a_warning(tmp_path):
    run(tmp_path, HISTORIES + '''
import json
model, optimizer = open_job('never', 1e-2)
saved = train(model, optimizer, 0, 2)
for group in saved['optimizer']['param_groups']:
    said = json.loads(bytes(group['ballast'].tolist()))
    old = {key: said[key] for key in ('job', 'version', 'steps', 'origin', 'begins')}
    group['ballast'] = torch.frombuffer(bytearray(json.dumps(old).encode().ljust(1024)), dtype=torch.uint8)
train(model, optimizer, 2, 3)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    optimizer.load_state_dict(saved['optimizer'])
assert len(told) == 1 and "names version 2 of job 'default' as earlier versions of the package did" in str(told[0].message), told
assert same(saved['model'], parameters(model)) and optimizer.resume().step == 2
''')


def test_what_goes_away_is_announced_before_it_goes(tmp_path):
    run(tmp_path, HISTORIES + '''
model = mlp()
optimizer = make(model, checkpoints=2)
saved, told = [], []
for step in range(5):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter('always')
        saved.append(train(model, optimizer, step, step + 1))
    told.append([str(each.message) for each in heard])
    there = [1, 2, 3, 4, 5][max(0, step - 2):step + 1]
    assert optimizer.versions() == there, optimizer.versions()
assert [len(each) for each in told] == [0, 0, 1, 0, 0], told
assert "so the next state_dict() gives up version 1." in told[2][0] and 'checkpoints=N' in told[2][0] and "states='full'" in told[2][0]
refused(model, optimizer, saved[0], 'VERSION_GONE', "do not keep version 1 of job 'default'", 'they keep 3, 4, 5', 'checkpoints=N',
        "states='full'")
''')


# An interrupt amid a step, whose call then takes as long as `body` of slow() says.
INTERRUPTED = HISTORIES + '''
import time
class Slow:
    """A session whose step calls slow() once, as the server updates."""
    def __init__(self, session, slow):
        self._session, self._slow = session, slow
    def __getattr__(self, name):
        return getattr(self._session, name)
    def step(self, *arguments, ready=None, **more):
        calls = [self._slow]
        return self._session.step(*arguments, ready=lambda _: calls and calls.pop()(), **more)
def interrupted_step(model, optimizer, batch, slow):
    """The loop's next step; what the step raised."""
    session = optimizer.job.opened.session
    optimizer.job.opened.session = Slow(session, slow)
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    try:
        optimizer.step()
    except KeyboardInterrupt as error:
        return error
    finally:
        optimizer.job.opened.session = session
    raise AssertionError('no interrupt')
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
data = list(batches(6))
def undisturbed():
    torch.manual_seed(5)
    twin = mlp()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for batch in data:
        theirs.zero_grad()
        loss_of(twin, batch).backward()
        theirs.step()
    return twin
def go_on(model, optimizer, begin):
    for batch in data[begin:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    for mine, expected in zip(model.parameters(), undisturbed().parameters()):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
'''
PLACES = {'memory': "where = {'directory': None, 'nvme': None}\n", 'directory': 'where = {}\n'}


@pytest.mark.parametrize('place', ['memory'] if os.environ.get('TEST_ROUNDS') == 'ci' else PLACES)
def test_ctrl_c_amid_a_slow_step_loses_nothing(place, tmp_path):
    """The server is in this process, so the step ends by itself."""
    run(tmp_path, INTERRUPTED + PLACES[place] + '''
torch.manual_seed(5)
model = mlp()
optimizer = make(model, **where)
train(model, optimizer, 0, 2)
def slow():
    ctrl_c()
    time.sleep(2.5)  # longer than a call has before its wait is ended
interrupted_step(model, optimizer, data[2], slow)
assert optimizer.resume().step == 3
go_on(model, optimizer, 3)
''')


@pytest.mark.parametrize('place', PLACES)
def test_an_ended_session_says_why_and_what_is_left(place, tmp_path):
    output = run(tmp_path, INTERRUPTED + PLACES[place] + '''
torch.manual_seed(5)
model = mlp()
optimizer = make(model, resume='auto', **where)
train(model, optimizer, 0, 2)
def slow():
    ctrl_c()
    time.sleep(2.5)
    ctrl_c()
    time.sleep(0.5)
interrupted_step(model, optimizer, data[2], slow)
for call in (optimizer.resume, optimizer.step, optimizer.state_dict):
    try:
        call()
    except ballast.Error as error:
        assert "the session of job 'default' has ended after step 3: an interrupt (Ctrl-C)" in str(error), error
        assert "make a new optimizer with name='default' and resume='auto', which continues from there" in str(error), error
        left = 'in memory until this optimizer is closed' if 'directory' in where else 'on disk'
        assert left in str(error), error
    else:
        raise AssertionError(call)
torch.manual_seed(6)
model = mlp()
again = make(model, resume='auto', **where)
assert again.resume().step == 3
go_on(model, again, 3)
''')
    lines = [line for line in output.splitlines() if line.startswith('ballast: ')]
    assert lines[0] == "ballast: job 'default' is new" and lines[-1].startswith("ballast: job 'default' goes on after step 3 (version 3)")
    assert any('A second Ctrl-C ends the session' in line for line in lines)


def test_an_opening_is_told_to_whoever_sets_up_logging(tmp_path):
    output = run(tmp_path, HISTORIES + '''
import io, logging
said = io.StringIO()
logging.basicConfig(stream=said, level=logging.INFO, format='%(name)s %(levelname)s %(message)s')
model, optimizer = open_job('auto', 1e-2)
train(model, optimizer, 0, 2)
optimizer.close()
open_job('auto', 1e-2)
open_job('must', 1e-2)
goes_on = "ballast INFO job 'default' goes on after step 2 (version 2)"
assert said.getvalue().splitlines() == ["ballast INFO job 'default' is new", goes_on, goes_on]
''')
    assert "job 'default' is new" not in output
