#!/usr/bin/env python3
"""A server that may open few descriptors, while a job trains and strangers hold as many connections as there are descriptors.

    descriptors_test.py BIN

The job goes on. Once the strangers are gone, the next client connects, a new job trains, and /readyz says 200. So it is with the
bound on connections that fits the descriptors, and with a larger one, where the system refuses to accept connections.
"""
import os, socket, subprocess, sys, tempfile, time

from served import MODEL, Server

DESCRIPTORS = 64
HANG = 60  # seconds, after which nothing comes any more


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def hold(server, count):
    """Connections to both ports that say nothing; those that the kernel keeps waiting count as well."""
    held = []
    for i in range(count):
        host, port = (server.http if i % 4 == 3 else server.address).rsplit(":", 1)
        held.append(socket.create_connection((host, int(port)), HANG))
    return held


def first_of(server, condition, what):
    until = time.time() + HANG
    while not condition():
        assert time.time() < until, f"not within {HANG} s: {what}; {descriptors(server)} descriptors"
        assert server.process.poll() is None, f"the server ended with {server.process.returncode}"
        time.sleep(0.02)


def run(server):
    trainer = server.train(100000)
    try:
        assert server.await_step(1, HANG) >= 1, "the job does not train"
        before = descriptors(server)
        most, held = before, hold(server, 2 * DESCRIPTORS)
        until = time.time() + 2
        while time.time() < until:
            most = max(most, descriptors(server))
            time.sleep(0.01)
        for one in held:
            one.close()
        print(f"{before} descriptors of {DESCRIPTORS} beside a job, {most} at most with {len(held)} strangers", flush=True)
        assert most >= DESCRIPTORS - 2, "the server was never short of descriptors"
        step = server.await_step(1, HANG)
        assert server.await_step(step + 3, HANG) >= step + 3, f"no further step after {step}"
        first_of(server, lambda: server.get("/readyz")[0] == 200, "/readyz says 200")
        assert trainer.poll() is None, open(f"{server.dir}/trainer.err").read()[-500:]
    finally:
        trainer.kill()
        trainer.wait()
    client = server.client_connects()
    assert client.returncode == 0, client.stdout + client.stderr
    done = subprocess.run([f"{server.bin}/train_bytes_lm", "--servers", server.address, "--steps", "5", *MODEL, "--job", "next",
                           "--token-file", f"{server.dir}/trainer", "--timeout", str(HANG)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def serve(flags):
    with tempfile.TemporaryDirectory(prefix="ballast-descriptors-") as directory:
        server = Server(sys.argv[1], directory, flags, prefix=["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"])
        server.prefix = []
        try:
            run(server)
            return open(f"{directory}/err").read()
        except BaseException:
            print(open(f"{directory}/err").read()[-2000:], flush=True)
            raise
        finally:
            server.process.kill()
            server.process.wait()


serve([])
said = serve(["--connections", "1000"])
assert "cannot accept a connection: Too many open files" in said, said[-2000:]
