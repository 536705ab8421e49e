#!/usr/bin/env python3
"""A server that may make only so many threads: at each limit it does not start, refuses the job, or trains it to the end.
Where one job fits, a second one is refused at some limit, and the first goes on.

    threads_test.py BIN [--rounds full|ci]

The limit is the number of processes (RLIMIT_NPROC) of a user who has the server alone; only the superuser can make one.
"""
import argparse, os, resource, subprocess, sys, tempfile, threading, time

USER = 50000 + os.getpid() % 10000  # limits count the processes of all runs of this test that go on beside each other
MODEL = ["--layers", "2", "--width", "128", "--heads", "2", "--context", "32", "--batch", "1", "--micro-batches", "2",
         "--chunk-elements", "65536"]
PATIENCE = 15  # of the trainer, for each answer


def start(binaries, directory, limit):
    """The server, and its address; no address if it ended."""
    def restrict():
        os.setgid(USER)
        os.setuid(USER)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

    os.chmod(directory, 0o777)
    server = subprocess.Popen(
        [f"{binaries}/ballastd", "--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0", "--data_directory",
         f"{directory}/data", "--budget.dram", "256MiB", "--budget.nvme", "512MiB", "--compute_threads", "2"],
        stdout=subprocess.PIPE, stderr=open(f"{directory}/err", "w"), text=True, preexec_fn=restrict, cwd=directory)
    late = threading.Timer(150, server.kill)  # nothing takes as long
    late.start()
    line = server.stdout.readline()
    late.cancel()
    if not line.startswith("ballastd ready"):
        return server, None
    return server, dict(word.split("=", 1) for word in line.split()[2:])["listen"]


def threads(server):
    return len(os.listdir(f"/proc/{server.pid}/task"))


def trainer(binaries, address, job, steps):
    return [f"{binaries}/train_bytes_lm", "--servers", address, "--steps", str(4 * steps), "--stop-at", str(steps), *MODEL, "--digest",
            "--job", job, "--timeout", str(PATIENCE), "--log-every", "1"]


def train(binaries, address, job="first"):
    return subprocess.run(trainer(binaries, address, job, 10), capture_output=True, text=True, timeout=20 * PATIENCE)


def makes_steps(process, log, count):
    """Whether the trainer makes so many steps from now on."""
    def lines():
        return open(log).read().count("step ")
    wanted, until = lines() + count, time.time() + 4 * PATIENCE
    while lines() < wanted and process.poll() is None and time.time() < until:
        time.sleep(0.05)
    return lines() >= wanted


def beside(binaries, limit):
    """What becomes of a second job while the first one trains; None if the first one does not."""
    with tempfile.TemporaryDirectory() as directory:
        log = f"{directory}/first"
        server, address = start(binaries, directory, limit)
        first = None
        try:
            if address is None:
                return None
            first = subprocess.Popen(trainer(binaries, address, "first", 100000), stdout=open(log, "w"), stderr=subprocess.STDOUT)
            if not makes_steps(first, log, 1):
                return None
            second = train(binaries, address, "second")
            said = second.stdout + second.stderr
            assert server.poll() is None, f"limit {limit}: the server ended:\n{open(f'{directory}/err').read()}"
            assert makes_steps(first, log, 5), f"limit {limit}: the first job stopped:\n{open(log).read()[-1000:]}\nthe second: {said}"
            if second.returncode == 0:
                return "trained"
            assert "[LIMIT]" in said and "job 'second'" in said, f"limit {limit}: {said}"
            return "refused"
        finally:
            for process in (first, server):
                if process is not None:
                    process.kill()
                    process.wait()


def outcome(binaries, limit):
    with tempfile.TemporaryDirectory() as directory:
        server, address = start(binaries, directory, limit)
        try:
            if address is None:
                code, said = server.wait(timeout=60), open(f"{directory}/err").read()
                # Libraries that make a thread of their own can only abort; the last line still names the limits.
                told = "no further thread" in said if code == 1 else code == -6 and "check the limits of" in said
                assert told, f"limit {limit}: the server ended with {code}:\n{said}"
                return "no server"
            trained = train(binaries, address)
            said = trained.stdout + trained.stderr
            assert server.poll() is None, f"limit {limit}: the server ended:\n{open(f'{directory}/err').read()}"
            if trained.returncode == 0:
                return "trained"
            assert "[LIMIT]" in said and "job 'first'" in said, f"limit {limit}: {said}"
            return "refused"
        finally:
            server.kill()
            server.wait()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("bin")
    options.add_argument("--rounds", choices=("full", "ci"), default="full")
    arguments = options.parse_args()
    if os.geteuid() != 0:
        print("skipped: only the superuser can make a user with a limit")
        return 77
    with tempfile.TemporaryDirectory() as directory:
        try:
            server, address = start(arguments.bin, directory, None)
        except (PermissionError, FileNotFoundError):
            print("skipped: others may not run these programs")
            return 77
        assert address is not None, open(f"{directory}/err").read()
        idle = threads(server)
        server.kill()
        server.wait()
    step = 2 if arguments.rounds == "ci" else 1
    found = {}
    for limit in range(max(2, idle - 14), idle + 12, step):
        found[limit] = outcome(arguments.bin, limit)
        print(f"{idle} threads without a job; limit {limit}: {found[limit]}", flush=True)
    assert "trained" in found.values() and "refused" in found.values() and "no server" in found.values()
    least = min(limit for limit, what in found.items() if what == "trained")
    for limit in range(least, least + 12):
        second = beside(arguments.bin, limit)
        print(f"limit {limit}: the first job trains, the second: {second}", flush=True)
        if second == "refused":
            return 0
    raise AssertionError("at no limit the first job trained and a second one was refused")


if __name__ == "__main__":
    sys.exit(main())
