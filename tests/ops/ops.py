"""What operations tests share: where things are, processes, waiting, a training run and its undisturbed twin."""
import os
import pathlib
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / 'deploy'
BIN = ROOT / 'build' / 'ops-release' / 'bin'
CACHE = ROOT / 'build' / 'ops'  # made by tests/ops/prepare.sh
HELM = CACHE / 'tools' / 'helm'


class Skip(Exception):
    """The machine lacks something; the text says what."""


def need(*things):
    """Skips unless each is there: a Path, or a command's name."""
    for thing in things:
        if isinstance(thing, pathlib.Path):
            if not thing.exists():
                raise Skip(f'no {thing.relative_to(ROOT)}; tests/ops/prepare.sh makes it and says why it could not')
        elif shutil.which(thing) is None:
            raise Skip(f'no {thing}; deploy/packages.sh ops installs it')


def run(*command, fails=False, **options):
    """Output, with the errors, of a command that must succeed (or, with `fails`, must not)."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors='replace', **options)
    assert (done.returncode != 0) == fails, f'{command} ended with {done.returncode}:\n{done.stdout}'
    return done.stdout


def start(*command, log, **options):
    """A process in the background, output into the file `log`; it ends with the test at the latest."""
    with open(log, 'ab') as output:
        return subprocess.Popen([str(word) for word in command], stdout=output, stderr=subprocess.STDOUT, **options)


def ended(process, log, seconds=300, code=0):
    """Waits for a process of start()."""
    got = process.wait(seconds)
    assert got == code, f'{process.args} ended with {got}, expected {code}:\n{pathlib.Path(log).read_text(errors="replace")}'


def wait_for(condition, what, seconds=120):
    """Value of condition() as soon as it is true; an exception within it counts as not yet."""
    last, end = None, time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except Exception as error:  # noqa: BLE001
            last = error
        time.sleep(0.05)
    raise AssertionError(f'not within {seconds} s: {what}' + (f' ({last})' if last else ''))


def http(url):
    """(status, text); status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors='replace')
    except OSError as error:
        return 0, str(error)


# A model of 0.5 million parameters, 40 steps, some seconds: long enough to be killed in mid-run.
MODEL = ['--steps', '40', '--layers', '4', '--width', '96', '--batch', '1', '--micro-batches', '2', '--chunk-elements', '65536']


def trainer(servers, *extra):
    """Command line of one trainer, or of a rank with further arguments."""
    return [BIN / 'train_bytes_lm', *MODEL, '--servers', servers, '--resume', 'auto', *extra]


def reference(dump):
    """Trains without servers and without a fault; writes the master weights to `dump`."""
    run(BIN / 'train_bytes_lm', *MODEL, '--reference', '--dump-master', dump)


def committed(servers, *into):
    """The newest step that all servers decided; -1 for none. Raises where a server does not answer. `into`: words before the command."""
    text = run(*into, BIN / 'ballastctl', 'status', '--json', '--servers', servers)
    return int(text.split('"committed_min":')[1].split(',')[0].split('}')[0])


def same_bits(left, right):
    a, b = pathlib.Path(left).read_bytes(), pathlib.Path(right).read_bytes()
    assert len(a) > 1 << 20, f'{left} has {len(a)} bytes only'
    assert a == b, f'{left} and {right} differ in {sum(x != y for x, y in zip(a, b))} of {len(a)} and {len(b)} bytes'


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
