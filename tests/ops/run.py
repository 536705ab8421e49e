#!/usr/bin/env python3
"""Runs the operations tests, each in namespaces of its own.

Usage: tests/ops/run.py [--list] [--jobs N] [NAME...]     NAME: a part of file.function, such as chart or unit.kill
  --jobs N  so many tests at a time (default: one more than there are processors)

A test is a function test_*() of tests/ops/*_test.py, or a whole tests/ops/*_test.sh. It runs as root in its own mount, process,
network, IPC and host name namespace: processes and mounts end with it even when it is interrupted, and 127.0.0.1 is its own. Its
working folder (TMPDIR too) is removed at its end. A test that cannot run here raises ops.Skip(reason), or ends with 77 after
printing the reason as its last line.
Exit: 0 when none failed.
"""
import argparse
import ast
import concurrent.futures
import ctypes
import glob
import importlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRATCH = ROOT / 'build' / 'ops' / 'scratch'
SKIPPED = 77
TEST_SECONDS_MAX = 600  # far above the slowest test: only a hang is longer


def tests():
    """[(file.function, path, function or None)] of all tests."""
    found = []
    for path in sorted(HERE.glob('*_test.py')):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
                found.append((f'{path.stem[:-5]}.{node.name[5:]}', path, node.name))
    for path in sorted(HERE.glob('*_test.sh')):
        found.append((path.stem[:-5], path, None))
    return found


def inside(path, function):
    """The first process of the new namespaces: sets them up, and runs one test in a child. Returns its exit code."""
    # Sockets and pid files of daemons live in /run: an empty one is this test's own.
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'mode=755', 'tmpfs', '/run'], check=True)
    # The C library resolves names, numbers too, on machines alone that have an address beside 127.0.0.1.
    subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
    subprocess.run(['ip', 'address', 'add', '10.0.0.1/32', 'dev', 'lo'], check=True)
    socket.sethostname('node1')
    with open('/run/hosts', 'w') as hosts:
        hosts.write('127.0.0.1 localhost node1\n')
    subprocess.run(['mount', '--bind', '/run/hosts', '/etc/hosts'], check=True)
    test = os.fork()
    while test != 0:  # the first process of the namespace reaps what daemons leave behind
        ended, status = os.wait()
        if ended == test:
            return os.waitstatus_to_exitcode(status)
    if function is None:
        os.execv(path, [path])
    sys.path.insert(0, str(HERE))
    import ops
    try:
        getattr(importlib.import_module(pathlib.Path(path).stem), function)()
    except ops.Skip as reason:
        print(reason)
        return SKIPPED
    return 0


NAMESPACES = ['unshare', '--mount', '--pid', '--net', '--ipc', '--uts', '--fork', '--kill-child', '--mount-proc']


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


running = set()  # processes of tests


def run(name, path, function, log):
    """Exit code of the test."""
    scratch = SCRATCH / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [*NAMESPACES, sys.executable, str(HERE / 'run.py'), '--inside', str(path), function or '']
    environment = dict(os.environ, TMPDIR=str(scratch), PYTHONDONTWRITEBYTECODE='1', PYTHONUNBUFFERED='1',
                       OMP_NUM_THREADS='1')
    test = subprocess.Popen(command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                            start_new_session=True, preexec_fn=die_with_parent)
    running.add(test)
    try:
        return test.wait(TEST_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        log.write(f'\nno end after {TEST_SECONDS_MAX} s\n')
        return 124
    finally:
        if test.poll() is None:
            test.kill()  # ends unshare, whose death ends all processes of the namespace
            test.wait()
        running.discard(test)
        shutil.rmtree(scratch, ignore_errors=True)


def result(chosen):
    """(name, verdict, seconds, output) of a test."""
    name, path, function = chosen
    start = time.monotonic()
    with open(ROOT / 'build' / 'ops' / 'logs' / f'{name}.log', 'w+') as log:
        code = run(name, path, function, log)
        log.flush()
        text = pathlib.Path(log.name).read_text(errors='replace').strip()
    return name, {0: 'passed', SKIPPED: 'skipped'}.get(code, 'FAILED'), time.monotonic() - start, text


def cgroups():
    """Folders that container engines and systemd make for what they start; the kernel has no namespace that removes them."""
    names = ('libpod_parent', 'machine.slice', 'ballast-ops*')
    return {folder for name in names for folder in glob.glob(f'/sys/fs/cgroup/*/{name}') + glob.glob(f'/sys/fs/cgroup/{name}')}


def remove_cgroups(folders):
    for folder in folders:
        for directory, _, _ in os.walk(folder, topdown=False):
            for _ in range(20):
                try:
                    os.rmdir(directory)
                    break
                except OSError:  # its last process still ends
                    time.sleep(0.05)


def interrupted(number, frame):
    raise KeyboardInterrupt


def results(chosen, jobs):
    """Results of all tests, as they end."""
    before = cgroups()
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        for future in concurrent.futures.as_completed([pool.submit(result, test) for test in chosen]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for test in list(running):
            test.kill()  # ends unshare, whose death ends all processes of the namespace
        pool.shutdown()
        remove_cgroups(cgroups() - before)


def main():
    if sys.argv[1:2] == ['--inside']:
        sys.exit(inside(sys.argv[2], sys.argv[3] or None))
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument('--list', action='store_true')
    parser.add_argument('--jobs', type=int, default=(os.cpu_count() or 1) + 1)  # many wait
    parser.add_argument('names', nargs='*')
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f'--jobs: expected 1 or more, got {options.jobs}')
    chosen = [test for test in tests() if not options.names or any(part in test[0] for part in options.names)]
    if options.list or not chosen:
        print('\n'.join(name for name, _, _ in chosen) or f'ops: no test is called like {options.names}')
        sys.exit(0 if chosen else 2)
    allowed = subprocess.run([*NAMESPACES, 'true'], capture_output=True, text=True)
    if os.geteuid() != 0 or allowed.returncode != 0:
        print(f'ops: SKIPPED, all {len(chosen)}: tests run as root in namespaces of their own: {allowed.stderr.strip() or "not root"}')
        sys.exit(0)
    signal.signal(signal.SIGTERM, interrupted)
    (ROOT / 'build' / 'ops' / 'logs').mkdir(parents=True, exist_ok=True)
    began, counts = time.monotonic(), {'passed': 0, 'skipped': 0, 'FAILED': 0}
    for name, verdict, seconds, text in results(chosen, options.jobs):
        counts[verdict] += 1
        reason = ': ' + text.splitlines()[-1] if verdict == 'skipped' and text else ''
        print(f'ops: {verdict:7} {seconds:6.1f} s  {name}{reason}', flush=True)
        if verdict == 'FAILED':
            print('\n'.join('    ' + line for line in text.splitlines()[-60:]), flush=True)
    print('ops: ' + ', '.join(f'{count} {verdict}' for verdict, count in counts.items()) + f', {time.monotonic() - began:.0f} s')
    sys.exit(1 if counts['FAILED'] else 0)


if __name__ == '__main__':
    main()
