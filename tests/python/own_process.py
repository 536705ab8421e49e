"""Scripts in processes of their own, which may be killed."""
import atexit
import contextlib
import gc
import importlib
import itertools
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import types

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

# What ranks and torch's optimizers import beside torch itself takes as long again.
OF_TORCH = ('torch.distributed.checkpoint.state_dict', 'torch.distributed.fsdp', 'torch.distributed.pipelining',
            'torch.distributed.tensor.parallel', 'torch.nn.parallel', 'torch.nn.utils.parametrize', 'torch.utils.checkpoint')

_imported = None
_ports = itertools.count()


def free_port():
    """One that is still free when a rank takes it: the system chooses none below 32768, and each process of tests has some of its own."""
    while True:
        port = 10000 + os.getpid() % 1000 * 20 + next(_ports) % 20
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(('', port))
            except OSError:
                continue
            return port


class Process:
    """A fork of a process that has imported torch and ballast, and has done nothing else: the imports take longer than most scripts.
    What a test tells about a process's begin or end takes subprocess instead."""

    def __init__(self, script, folder, output, *arguments, **variables):
        """output: the file that both stdout and stderr go to. arguments: of the script. variables: of the environment, beside the test's
        own."""
        self._output = pathlib.Path(output)
        self.pid = _ask('start', str(script), str(folder), str(output), [str(each) for each in arguments],
                        {**os.environ, **variables})

    def wait(self, seconds=900):
        """Its exit code, or minus the signal that killed it."""
        code = _ask('wait', self.pid, seconds)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            _ask('wait', self.pid, seconds)
            raise TimeoutError(f'after {seconds} s it had not ended\n{self.output}')
        return code

    @property
    def output(self):
        return self._output.read_text(encoding='utf-8')


class NewProcess:
    """The same as a process of its own from the start: two of them have different hashes of strings, by variables' PYTHONHASHSEED."""

    def __init__(self, script, folder, output, *arguments, **variables):
        self._output = pathlib.Path(output)
        with open(output, 'w', encoding='utf-8') as file:
            self._process = subprocess.Popen([sys.executable, script, *map(str, arguments)], cwd=folder, stdin=subprocess.DEVNULL,
                                             stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **variables})
        self.pid = self._process.pid

    def wait(self, seconds=900):
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(f'after {seconds} s it had not ended\n{self.output}') from None

    @property
    def output(self):
        return self._output.read_text(encoding='utf-8')


def import_also(*modules):
    """What all scripts of a file import beside torch and ballast: once, in the process that they are forks of."""
    _ask('import', *modules)


def _ask(*request):
    global _imported
    if _imported is None:
        _imported = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                     env={**os.environ, 'OPENBLAS_NUM_THREADS': '1'})  # a thread that a fork would not have
        atexit.register(_imported.communicate)
    _imported.stdin.write(json.dumps(request) + '\n')
    _imported.stdin.flush()
    return json.loads(_imported.stdout.readline())


def fork_from_here():
    """Before pytest is imported: the imports of this process are those of the scripts, too. Without it the first script imports anew."""
    global _imported
    import_all()
    (requests, stdin), (stdout, answers) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(requests, 0)
        os.dup2(answers, 1)
        for each in (requests, stdin, stdout, answers):
            os.close(each)
        _serve()
        end()
    os.close(requests)
    os.close(answers)
    _imported = types.SimpleNamespace(stdin=open(stdin, 'w', encoding='utf-8'), stdout=open(stdout, encoding='utf-8'))
    atexit.register(lambda: (_imported.stdin.close(), _imported.stdout.close(), os.waitpid(pid, 0)))


def write(folder, body):
    script = folder / 'script.py'
    script.write_text(HEAD + textwrap.dedent(body), encoding='utf-8')
    return script


def run(folder, body, expect=0, **variables):
    """HEAD and body; what the script printed."""
    process = Process(write(folder, body), folder, folder / 'script.log', **variables)
    code = process.wait()
    assert code == expect, f'{code}\n{process.output}'
    return process.output


def run_anew(folder, body, expect=0, seconds=300, **variables):
    """The same in a process that begins with nothing imported, and ends as Python's do."""
    done = subprocess.run([sys.executable, write(folder, body)], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
                          env={**os.environ, **variables})
    assert done.returncode == expect, f'{done.returncode}\n{done.stdout}\n{done.stderr}'
    return done


# --- the process that has imported all

def _become(script, folder, output, arguments, variables):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, file), (2, file)):
        os.dup2(source, target)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    main = vars(sys.modules['__main__'])
    main['__file__'] = script
    with open(script, encoding='utf-8') as source:
        exec(compile(source.read(), script, 'exec'), main)


def end(code=0):
    """Ends a fork. But in full rounds it does not take apart all that was imported, as Python does: that copies the memory which the fork
    shares with the process that it is of."""
    if os.environ.get('TEST_ROUNDS') == 'full':
        sys.exit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ended(pid, seconds):
    descriptor = os.pidfd_open(pid)
    with contextlib.closing(select.epoll()) as ends:
        ends.register(descriptor, select.EPOLLIN)
        has_ended = ends.poll(seconds)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if has_ended else None


def import_all(*more):
    gc.disable()  # nothing of it is garbage
    import torch  # noqa: F401, PLC0415

    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # in the build folder: other processes need not compile it again
    import ballast.torch  # noqa: F401, PLC0415
    sys.dont_write_bytecode = writes
    torch.optim.SGD([torch.zeros(1)])  # imports more
    for module in (*OF_TORCH, *more):
        importlib.import_module(module)
    gc.freeze()  # else each fork's collector looks through all that was imported, which takes a second
    gc.enable()
    assert len(os.listdir('/proc/self/task')) == 1 == threading.active_count(), 'a fork would have one of these threads alone'


def _serve():
    answers = sys.stdout
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == 'start':
            pid = os.fork()
            if pid == 0:
                _become(*arguments)
                return end()
            answer = pid
        elif what == 'import':
            answer = import_all(*arguments)
        else:
            answer = _ended(*arguments)
        print(json.dumps(answer), file=answers, flush=True)
    return None


if __name__ == '__main__':
    import_all()
    _serve()
