#!/usr/bin/env python3
"""Runs the operations tests, one after another, each in namespaces of its own.

Usage: tests/ops/run.py [--list] [NAME...]     NAME: a part of file.function, such as chart or unit.kill

A test is a function test_*() of tests/ops/*_test.py, or a whole tests/ops/*_test.sh. It runs as root in its own mount, process,
network, IPC and host name namespace: processes and mounts end with it even when it is interrupted, and 127.0.0.1 is its own. Its
working folder (TMPDIR too) is removed at its end. A test that cannot run here raises ops.Skip(reason), or ends with 77 after
printing the reason as its last line.
Exit: 0 when none failed.
"""
import ast
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
TEST_SECONDS_MAX = 240  # far above the slowest test: only a hang is longer


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


def run(name, path, function, log):
    """Exit code of the test."""
    scratch = SCRATCH / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [*NAMESPACES, sys.executable, str(HERE / 'run.py'), '--inside', str(path), function or '']
    environment = dict(os.environ, TMPDIR=str(scratch), PYTHONDONTWRITEBYTECODE='1', PYTHONUNBUFFERED='1')
    before = cgroups()
    test = subprocess.Popen(command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                            start_new_session=True, preexec_fn=die_with_parent)
    try:
        return test.wait(TEST_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        log.write(f'\nno end after {TEST_SECONDS_MAX} s\n')
        return 124
    finally:
        if test.poll() is None:
            test.kill()  # ends unshare, whose death ends all processes of the namespace
            test.wait()
        remove_cgroups(cgroups() - before)
        shutil.rmtree(scratch, ignore_errors=True)


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


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ['--inside']:
        sys.exit(inside(arguments[1], arguments[2] or None))
    listing = '--list' in arguments
    wanted = [argument for argument in arguments if argument != '--list']
    chosen = [test for test in tests() if not wanted or any(part in test[0] for part in wanted)]
    if listing or not chosen:
        print('\n'.join(name for name, _, _ in chosen) or f'ops: no test is called like {wanted}')
        sys.exit(0 if chosen else 2)
    allowed = subprocess.run([*NAMESPACES, 'true'], capture_output=True, text=True)
    if os.geteuid() != 0 or allowed.returncode != 0:
        print(f'ops: SKIPPED, all {len(chosen)}: tests run as root in namespaces of their own: {allowed.stderr.strip() or "not root"}')
        sys.exit(0)
    signal.signal(signal.SIGTERM, interrupted)
    logs = ROOT / 'build' / 'ops' / 'logs'
    logs.mkdir(parents=True, exist_ok=True)
    began, counts = time.monotonic(), {'passed': 0, 'skipped': 0, 'FAILED': 0}
    for name, path, function in chosen:
        start = time.monotonic()
        with open(logs / f'{name}.log', 'w+') as log:
            code = run(name, path, function, log)
            log.flush()
            text = pathlib.Path(log.name).read_text(errors='replace').strip()
        verdict = {0: 'passed', SKIPPED: 'skipped'}.get(code, 'FAILED')
        counts[verdict] += 1
        reason = ': ' + text.splitlines()[-1] if verdict == 'skipped' and text else ''
        print(f'ops: {verdict:7} {time.monotonic() - start:6.1f} s  {name}{reason}', flush=True)
        if verdict == 'FAILED':
            print('\n'.join('    ' + line for line in text.splitlines()[-60:]), flush=True)
    print('ops: ' + ', '.join(f'{count} {verdict}' for verdict, count in counts.items()) + f', {time.monotonic() - began:.0f} s')
    sys.exit(1 if counts['FAILED'] else 0)


if __name__ == '__main__':
    main()
