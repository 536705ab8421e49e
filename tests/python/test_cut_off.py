"""Calls that end amid what they do, by a kill, Ctrl-C or an error: the job goes on from there, with the numbers of torch.optim."""
import pytest
from own_process import run

# A loop over three steps, then four with one parameter more, that may be left as that one registers.
GROWING = '''
class Leaving:
    """A session whose initialise() is not reached."""
    def __init__(self, session, leave):
        self._session, self._leave = session, leave
    def __getattr__(self, name):
        return getattr(self._session, name)
    def initialise(self, *_):
        self._leave()

def late_gradient(i):
    return torch.tensor([1.0, -2.0, 3.0]) * (i + 1)

def loop(model, late, optimizer, begin, end, grow=True):
    for i, batch in list(enumerate(batches(end)))[begin:]:
        if i == 3 and grow:
            optimizer.add_param_group({'params': [('late', late)] if isinstance(optimizer, bt.AdamW) else [late]})
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if i >= 3:
            late.grad = late_gradient(i)
        optimizer.step()

def check(model, late):
    """Against torch.optim's, after seven steps."""
    torch.manual_seed(5)
    theirs, theirs_late = mlp(), torch.nn.Parameter(torch.ones(3))
    loop(theirs, theirs_late, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 0, 7)
    for mine, expected in zip([*model.parameters(), late], [*theirs.parameters(), theirs_late]):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)

late = torch.nn.Parameter(torch.ones(3))
'''

LEFT = GROWING + '''
model = mlp()
optimizer = make(model)
loop(model, late, optimizer, 0, 3)
torch.save(model.state_dict(), 'trained.pt')
def leave():
    if os.environ['END'] == 'kill':
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyboardInterrupt if os.environ['END'] == 'Ctrl-C' else ballast.Error('no memory', 'BUDGET')
optimizer.job.opened.session = Leaving(optimizer.job.opened.session, leave)
try:
    loop(model, late, optimizer, 3, 4)
except (KeyboardInterrupt, ballast.Error):
    pass
'''

RESUMED = GROWING + '''
torch.manual_seed(9)
model = mlp()
optimizer = bt.AdamW([{'params': list(model.named_parameters())}, {'params': [('late', late)]}], lr=1e-2, directory='state',
                     dram='128MiB', nvme='1GiB', threads=2, resume='must')
assert optimizer.resume().step == 3
for name, value in torch.load('trained.pt').items():
    assert torch.equal(value, model.state_dict()[name]), name
assert torch.equal(late, torch.ones(3))
loop(model, late, optimizer, 3, 7, grow=False)
check(model, late)
optimizer.close()
'''


@pytest.mark.parametrize('end', ['kill', 'Ctrl-C'])
def test_a_job_that_was_left_as_a_parameter_registered_is_resumed(end, tmp_path):
    run(tmp_path, LEFT, expect=-9 if end == 'kill' else 0, END=end)
    run(tmp_path, RESUMED)


@pytest.mark.parametrize('end', ['Ctrl-C', 'error'])
def test_the_same_optimizer_goes_on_after_a_registration_that_did_not_end(end, tmp_path):
    run(tmp_path, LEFT + '''
optimizer.job.opened.session = optimizer.job.opened.session._session
assert optimizer.resume().step == 3
loop(model, late, optimizer, 3, 7, grow=False)
check(model, late)
''', END=end)


def test_ctrl_c_behind_the_registration_itself(tmp_path):
    """The servers have the tensor, and this process has not noted that."""
    run(tmp_path, GROWING + '''
class Interrupted(Leaving):
    def register(self, tensors):
        self._session.register(tensors)
        raise KeyboardInterrupt
model = mlp()
optimizer = make(model)
loop(model, late, optimizer, 0, 3)
session = optimizer.job.opened.session
optimizer.job.opened.session = Interrupted(session, None)
try:
    loop(model, late, optimizer, 3, 4)
except KeyboardInterrupt:
    pass
optimizer.job.opened.session = session
loop(model, late, optimizer, 3, 7, grow=False)
check(model, late)
''')


def test_a_job_without_a_disk_stays_where_its_next_optimizer_leaves(tmp_path):
    """It has steps, though one of its tensors has no values."""
    left = LEFT.replace('make(model)', 'make(model, directory=None, nvme=None)').replace("os.environ['END']", "'Ctrl-C'")
    run(tmp_path, left + '''
from ballast.torch.job.opened import OpenJob
torch.manual_seed(9)
other = mlp()
again = bt.AdamW([{'params': list(other.named_parameters())}, {'params': [('late', late)]}], lr=1e-2, resume='must')
def fail(*_):
    raise KeyboardInterrupt
real, OpenJob.take_blob = OpenJob.take_blob, fail
try:
    again.resume()
except KeyboardInterrupt:
    pass
OpenJob.take_blob = real
assert again.resume().step == 3
loop(other, late, again, 3, 7, grow=False)
check(other, late)
''')


@pytest.mark.parametrize('call', ['rollback', 'load_state_dict'])
def test_ctrl_c_behind_a_version_that_came_back(call, tmp_path):
    """The job is there, and the parameters follow, with the steps and the blob."""
    run(tmp_path, f'''
class Interrupted:
    def __init__(self, session):
        self._session = session
    def __getattr__(self, name):
        return getattr(self._session, name)
    def restore(self, version):
        self._session.restore(version)
        raise KeyboardInterrupt
model = mlp()
optimizer = make(model)
def train(count):
    for batch in batches(count):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step(blob=b'%d' % count)
train(2)
state, version = optimizer.state_dict(), optimizer.versions()[-1]
kept = [parameter.detach().clone() for parameter in model.parameters()]
train(3)
session = optimizer.job.opened.session
optimizer.job.opened.session = Interrupted(session)
try:
    optimizer.rollback(version) if {call!r} == 'rollback' else optimizer.load_state_dict(state)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError
optimizer.job.opened.session = session
assert optimizer.resume() == (2, b'2'), optimizer.resume()
assert all(map(torch.equal, kept, model.parameters()))
''')


def test_ctrl_c_behind_the_last_of_a_load(tmp_path):
    run(tmp_path, '''
class Interrupted:
    def __init__(self, session):
        self._session, self.left = session, 2
    def __getattr__(self, name):
        return getattr(self._session, name)
    def commit_state(self, *arguments):
        self._session.commit_state(*arguments)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
model, theirs = mlp(), mlp()
other = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
for batch in batches(5):
    other.zero_grad()
    loss_of(theirs, batch).backward()
    other.step()
optimizer = make(model)
optimizer.resume()
session = optimizer.job.opened.session
optimizer.job.opened.session = Interrupted(session)
try:
    optimizer.load_state_dict(other.state_dict())
except KeyboardInterrupt:
    pass
else:
    raise AssertionError
optimizer.job.opened.session = session
assert optimizer.resume().step == 5
optimizer.close()
assert make(model, resume='must').resume().step == 5
''')
