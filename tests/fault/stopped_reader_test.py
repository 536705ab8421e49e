#!/usr/bin/env python3
"""The reader of a server's standard error stops, while a job trains, gRPC logs each frame, and strangers fill the audit.

    stopped_reader_test.py BIN [--seconds 60]

Training goes on behind each sixth of the time, lost lines are counted, and SIGTERM ends the server, which says nothing any
more to a reader that does not read.
"""
import argparse, fcntl, os, re, signal, subprocess, sys, tempfile, time

from http2 import OPEN, call
from served import Server

F_SETPIPE_SZ = 1031
HANG = 60  # seconds, after which an end is no end
PARTS = 6


def dropped(server):
    found = re.findall(r'ballast_log_lines_dropped_total\{log="(\w+)"\} (\d+)', server.get("/metrics")[1])
    return {log: int(count) for log, count in found}


def run(server, seconds):
    faults = []
    trainer = server.train(100000)
    try:
        before = server.await_step(1, 3 * HANG)
        for part in range(PARTS):
            until = time.time() + seconds / PARTS
            while time.time() < until:
                for _ in range(110):  # the audit has a hundred such lines a second
                    call(server.address, OPEN, b"nobody's", b"")
                time.sleep(0.5)
            now, code = server.await_step(before + 1, HANG), server.get("/readyz")[0]
            print(f"after {(part + 1) * seconds / PARTS:.0f} s: step {now}, /readyz {code}, lost lines {dropped(server)}", flush=True)
            if now <= before:
                faults.append(f"no step in {HANG} s: {now} after {before}")
            if code != 200:
                faults.append(f"/readyz says {code}")
            before = now
        lost = dropped(server)
        # In less time than this the audit's lines fit into its queue.
        for log in ["program"] + (["audit"] if seconds >= 55 else []):
            if lost.get(log, 0) == 0:
                faults.append(f"no lost line of {log} was counted: {lost}")
        if trainer.poll() is not None:
            faults.append("the trainer ended: " + open(f"{server.dir}/trainer.err").read()[-500:])
    finally:
        trainer.kill()
        trainer.wait()
    began = time.time()
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(HANG)
        print(f"SIGTERM: rc {code} after {time.time() - began:.1f} s")
        if code != 0:
            faults.append(f"SIGTERM ended the server with {code}")
    except subprocess.TimeoutExpired:
        faults.append(f"SIGTERM did not end the server within {HANG} s")
    return faults


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("--seconds", type=float, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-reader-") as directory:
        reader, writer = os.pipe()  # nobody reads
        fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
        server = Server(arguments.bin, directory, ["--log_level", "trace"], stderr=writer,
                        environment={"GRPC_VERBOSITY": "debug", "GRPC_TRACE": "http,api"})
        try:
            faults = run(server, arguments.seconds)
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()
            os.close(reader)
            os.close(writer)
    for fault in faults:
        print("FAULT", fault)
    sys.exit(1 if faults else 0)


main()
