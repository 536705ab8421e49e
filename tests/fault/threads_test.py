#!/usr/bin/env python3
"""A server that may make only so many threads: at each limit it does not start, refuses the job, or trains it to the end.

    threads_test.py BIN [--rounds full|ci]

The limit is the number of processes (RLIMIT_NPROC) of a user who has the server alone; only the superuser can make one.
"""
import argparse, os, resource, subprocess, sys, tempfile, threading

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


def train(binaries, address):
    return subprocess.run(
        [f"{binaries}/train_bytes_lm", "--servers", address, "--steps", "40", "--stop-at", "10", *MODEL, "--digest", "--job",
         "first", "--timeout", str(PATIENCE)], capture_output=True, text=True, timeout=20 * PATIENCE)


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
