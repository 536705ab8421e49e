"""What optimizers are to the processes they are in: directories, locks, threads, forks, Ctrl-C."""
import os
import subprocess

import pytest
from own_process import run as run_fork
from own_process import run_anew as run

import ballast


def test_after_a_budget_that_was_too_small_another_may_be_given(tmp_path):
    run_fork(tmp_path, '''
        try:
            make(mlp(), dram='4KiB', nvme=0, durability='none').resume()
        except ballast.Error as error:
            assert error.reason == 'BUDGET', error
        else:
            raise AssertionError('accepted')
        used = make(mlp())
        assert used.resume().step == 0
        try:
            make(mlp(), name='second', dram='96MiB').resume()  # in use now
        except ballast.Error as error:
            assert error.reason == 'BAD_CONFIG', error
        else:
            raise AssertionError('accepted')
        used.close()
        assert make(mlp(), name='second', dram='96MiB').resume().step == 0
        ''')


def test_a_directory_in_use_names_its_process(tmp_path):
    run(tmp_path, '''
        optimizer = make(mlp(), resume='auto')
        optimizer.resume()
        child = os.popen(f"{sys.executable} -c 'import torch, ballast.torch as bt; "
                         "bt.AdamW([torch.nn.Parameter(torch.zeros(4))], directory=\\"state\\").resume()' 2>&1").read()
        assert str(os.getpid()) in child and 'state' in child, child
        ''')


def test_a_private_daemon_outlives_the_thread_that_started_it(tmp_path):
    run_fork(tmp_path, '''
        import subprocess, threading
        from ballast import embedded_daemon
        daemons = []
        thread = threading.Thread(target=lambda: daemons.append(embedded_daemon.Daemon(None, '64MiB', None, 1)))
        thread.start()
        thread.join()
        try:
            daemons[0].process.wait(2)
        except subprocess.TimeoutExpired:
            daemons[0].stop()
        else:
            raise AssertionError(f'it ended with {daemons[0].process.returncode}')
        ''')


def test_threads_that_open_at_once_share_a_server(tmp_path):
    run_fork(tmp_path, '''
        import threading
        from ballast import embedded
        together, ended, kept = threading.Barrier(4), [], []
        def first_step(i):
            model = mlp() if i else torch.nn.Linear(1 << 14, 1 << 12)  # which has no room
            optimizer = make(model, name=f'job{i}', resume='never')
            kept.append(optimizer)
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
        assert embedded.directory_in_use() == os.path.abspath('state')
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
    run_fork(tmp_path, 'assert make(mlp(), resume="must").resume().step == 4')


def test_closing_while_another_thread_steps(tmp_path):
    run_fork(tmp_path, '''
        import threading, time
        model = mlp()
        optimizer = make(model)
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        raised = []
        def work():
            try:
                while True:
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


def test_a_private_server_that_does_not_start_says_why(tmp_path):
    """Its own standard error may be in another file, as under torchrun."""
    from ballast import embedded_daemon
    first = embedded_daemon.Daemon(tmp_path / 'jobs', '64MiB', '64MiB', 1)
    try:
        with pytest.raises(ballast.Error, match=r'ended with exit code 6 before it was ready: data directory .*jobs is in use by '
                                                r'process \d+; stop it') as raised:
            embedded_daemon.Daemon(tmp_path / 'jobs', '64MiB', '64MiB', 1)
        assert raised.value.reason == 'SERVER_DOWN'
    finally:
        first.stop()


def test_programs_are_found_beside_the_package(monkeypatch):
    from ballast import programs
    for name in ('ballastd', 'ballastctl'):
        assert subprocess.run([programs.path(name), '--help'], stdout=subprocess.DEVNULL, check=False).returncode == 0
    # A script of the package on PATH starts the program beside it, and never itself.
    monkeypatch.setattr(programs, '__file__', '/nowhere/programs.py')
    monkeypatch.delenv('BALLASTD', raising=False)
    with pytest.raises(ballast.Error, match='ballastd is not at /nowhere/bin/ballastd: install the package again'):
        programs.path('ballastd')
    with pytest.raises(SystemExit, match='^ballastd: ballastd is not at'):
        programs.ballastd()


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


CALL_BYTES = 64  # a call has more; what connections say by themselves, as they acknowledge, has less
STOPPED = f'''
import atexit, subprocess
import ballast.programs
from main_thread import ctrl_c, unread_bytes, waits_in, when
server = subprocess.Popen([ballast.programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0',
                           '--metrics_listen', '127.0.0.1:0', '--data_directory', 'server', '--budget.dram', '64MiB',
                           '--log_level', 'warn'],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
atexit.register(server.kill)
address = server.stdout.readline().split('listen=')[1].split()[0]
def stop():
    server.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # until its last thread has stopped: one that runs on may answer
def interrupt(waits=lambda: True):  # once the stopped server has been sent a call
    before = unread_bytes(address)
    when(lambda: unread_bytes(address) > before + {CALL_BYTES} and waits(), ctrl_c)
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
stop()
interrupt()
step()
''', 'step': '''
optimizer = make()
step()
stop()
interrupt()
step()
''', 'overlapped step': '''
optimizer = make(overlap=model)
step()
optimizer.wait()
stop()
interrupt(lambda: waits_in('overlap.py'))
step()
optimizer.wait()
'''}[what]
    done = run(tmp_path, STOPPED + body, expect=-2, seconds=300)
    assert 'KeyboardInterrupt' in done.stderr


def test_ctrl_c_amid_a_step_that_ends_leaves_the_session_as_it_is(tmp_path):
    run(tmp_path, STOPPED + '''
optimizer = make()
step()
loss_of(model, next(batches(1))).backward()
stop()
def handler(*_):  # the wait has noticed Ctrl-C, and gives the step two seconds
    server.send_signal(signal.SIGCONT)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
interrupt()
try:
    optimizer.step()
except KeyboardInterrupt:
    interrupted = True
assert interrupted
assert optimizer.resume().step == 2
step()
assert optimizer.resume().step == 3
''', seconds=300)


def test_ctrl_c_amid_a_readers_call_ends_the_reader(tmp_path):
    run(tmp_path, STOPPED + '''
import ballast
optimizer = make()
step()
reader = bt.Reader(servers=address, timeout=3000)
assert reader.newest() == 1
stop()
try:
    interrupt()
    reader.newest()
except KeyboardInterrupt:
    interrupted = True
assert interrupted
server.send_signal(signal.SIGCONT)
for call in (reader.newest, lambda: reader.read(model)):
    try:
        call()
        raise AssertionError('the reader has not ended')
    except ballast.Error as error:
        assert 'an interrupt (Ctrl-C) amid a call ended the reader; make another' in str(error), error
reader.close()
with bt.Reader(servers=address) as another:
    assert another.newest() == 1
''', seconds=300)


def test_torchs_compilers_are_not_imported_until_somebody_compiles(tmp_path):
    """They take as long as half of torch, and a trainer that comes back after a crash would wait for them."""
    run(tmp_path, '''
        model = mlp()
        optimizer = make(model, resume='auto')
        optimizer.resume()
        for x in batches(2):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        imported = [name for name in ('torch._dynamo', 'torch.distributed.tensor', 'sympy') if name in sys.modules]
        assert not imported, imported
        compiled = torch.compile(optimizer.step, backend='eager')
        for x in batches(2):
            loss_of(model, x).backward()
            compiled()
            optimizer.zero_grad()
        assert optimizer.resume().step == 4, optimizer.resume()
        ''')
