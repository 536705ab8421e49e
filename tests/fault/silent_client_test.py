#!/usr/bin/env python3
"""A client whose host is gone without a word: it answers no ping, and the server ends its connection. One that answers stays.

    silent_client_test.py BIN [--rounds full|ci]

The server pings each minute and waits a minute for the answer, so `ci` skips.
"""
import argparse, socket, sys, tempfile, threading, time

from http2 import Http2, learn
from served import Server

TOKEN = b"trainer-secret-of-some-length"
PATIENCE = 600  # seconds; two minutes are meant


class Silent(Http2):
    def take(self, kind, flags, stream, payload):
        if kind != 6:
            super().take(kind, flags, stream, payload)


def admitted(kind, server):
    """A connection that has made a call."""
    link = kind(server.address)
    stream = link.open(b"/ballast.v1.StateService/Identify", TOKEN)
    link.send(stream, b"\0\0\0\0\0", True)
    while stream not in link.ended:
        link.read()
    assert link.answer, "the server answered no Identify"
    return link


def lasted(link, ended):
    """For how long the connection was open; None if it still is when `ended`."""
    began = time.time()
    link.socket.settimeout(1)
    while not ended.is_set():
        try:
            link.read()
        except socket.timeout:
            continue
        except (ConnectionError, OSError):
            return time.time() - began
    return None


def main():
    options = argparse.ArgumentParser()
    options.add_argument("bin")
    options.add_argument("--rounds", choices=("full", "ci"), default="full")
    arguments = options.parse_args()
    if arguments.rounds == "ci":
        print("skipped: it takes minutes")
        return 77
    with tempfile.TemporaryDirectory(prefix="ballast-silent-") as directory:
        server = Server(arguments.bin, directory)
        try:
            learn(server.address, TOKEN)
            silent, speaking, ended = admitted(Silent, server), admitted(Http2, server), threading.Event()
            found = []
            listener = threading.Thread(target=lambda: found.append(lasted(speaking, ended)), daemon=True)
            listener.start()
            late = threading.Timer(PATIENCE, ended.set)
            late.daemon = True
            late.start()
            seconds = lasted(silent, ended)
            late.cancel()
            ended.set()
            listener.join()
        finally:
            server.process.kill()
            server.process.wait()
    print(f"the silent client was connected for {seconds} s, the other one for {found[0] or 'longer'}")
    assert seconds is not None, f"a client that answers no ping is still connected after {PATIENCE} s"
    assert found[0] is None, "a client that answers pings was let go"
    return 0


sys.exit(main())
