#!/usr/bin/env python3
"""What strangers, and callers with few rights, may cost a server while a job trains on it.

    door_test.py BIN [--rounds full|ci]

`full`: 5,000 idle connections, 2,000 half-open streams, 2,000 reflection streams, 200 Opens of 16 MB and as many of 8M
empty elements, from nobody and from an identity with few rights. `ci`: a twentieth. Loopback only. After each flood:
memory and threads of the server, the next client, /readyz; at the end the steps' times, which are printed and never
judged.
"""
import argparse, hashlib, json, os, resource, socket, struct, subprocess, sys, tempfile, threading, time, urllib.request

MEMORY_MAX = 128 << 20
THREADS_MAX = 64  # beside those of before
MODEL = ["--layers", "2", "--width", "128", "--heads", "2", "--context", "32", "--batch", "1", "--micro-batches", "2",
         "--chunk-elements", "65536"]


def field(name, value):
    """A header, without HPACK's tables and Huffman codes."""
    return b"\x00" + bytes([len(name)]) + name + b"\x7f" + varint(len(value) - 127) + value \
        if len(value) >= 127 else b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def varint(n):
    out = b""
    while n >= 128:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def headers(path, token):
    block = field(b":method", b"POST") + field(b":scheme", b"http") + field(b":path", path) + \
        field(b":authority", b"localhost") + field(b"content-type", b"application/grpc") + field(b"te", b"trailers")
    return block + (field(b"authorization", b"Bearer " + token) if token else b"")


class Http2:
    """A connection of HTTP/2 that sends what it is told to, and reads only to be allowed to send more."""

    def __init__(self, address):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self.window, self.streams, self.initial, self.next, self.ended = 65535, {}, 65535, 1, set()
        self.unread = b""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(4, 0, 0, b""))

    @staticmethod
    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def open(self, path, token):
        stream, self.next = self.next, self.next + 2
        self.streams[stream] = self.initial
        self.socket.sendall(self.frame(1, 4, stream, headers(path, token)))
        return stream

    def send(self, stream, data, end):
        """True once all is sent; False if the server ended the stream before."""
        at = 0
        while at < len(data):
            if stream in self.ended:
                return False
            room = min(self.window, self.streams[stream], 16384, len(data) - at)
            if room <= 0:
                self.read()
                continue
            self.socket.sendall(self.frame(0, 1 if end and at + room == len(data) else 0, stream, data[at:at + room]))
            self.window -= room
            self.streams[stream] -= room
            at += room
        return True

    def read(self):
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.unread += data
        while len(self.unread) >= 9:
            length = int.from_bytes(self.unread[:3], "big")
            if len(self.unread) < 9 + length:
                return
            kind, flags = self.unread[3], self.unread[4]
            stream = int.from_bytes(self.unread[5:9], "big") & 0x7fffffff
            self.take(kind, flags, stream, self.unread[9:9 + length])
            self.unread = self.unread[9 + length:]

    def take(self, kind, flags, stream, payload):
        if kind == 8:
            grant = int.from_bytes(payload, "big")
            if stream == 0:
                self.window += grant
            elif stream in self.streams:
                self.streams[stream] += grant
        elif kind == 4 and not flags & 1:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at:at + 6])
                if name == 4:
                    for one in self.streams:
                        self.streams[one] += value - self.initial
                    self.initial = value
            self.socket.sendall(self.frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:
            self.socket.sendall(self.frame(6, 1, 0, payload))
        elif kind == 3 or (kind in (0, 1) and flags & 1):
            self.ended.add(stream)


def call(address, path, token, message, patience=30):
    """One call; whatever the server says is fine, as long as it says so."""
    link = Http2(address)
    link.socket.settimeout(patience)
    try:
        stream = link.open(path, token)
        link.send(stream, struct.pack(">BI", 0, len(message)) + message, True)
        while stream not in link.ended:
            link.read()
        return True
    except (ConnectionError, socket.timeout, BrokenPipeError):
        return False
    finally:
        link.socket.close()


def delimited(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


OPEN = b"/ballast.v1.StateService/Open"


class Server:
    def __init__(self, binaries, directory):
        self.bin, self.dir = binaries, directory
        rights, tokens = "rights:\n", "tokens:\n"
        for name, grant in (("trainer", "jobs: '*', can: [train, status, drop]"), ("few", "jobs: 'x-*', can: [train]")):
            secret = (name + "-secret-of-some-length").encode()
            open(f"{directory}/{name}", "wb").write(secret)
            tokens += f"- {{identity: {name}, sha256: {hashlib.sha256(secret).hexdigest()}}}\n"
            rights += f"- {{identity: {name}, {grant}}}\n"
        open(f"{directory}/tokens.yaml", "w").write(tokens)
        open(f"{directory}/rights.yaml", "w").write(rights)
        self.process = subprocess.Popen(
            [f"{binaries}/ballastd", "--listen", "127.0.0.1:0", "--metrics_listen", "127.0.0.1:0", "--data_directory",
             f"{directory}/data", "--budget.dram", "256MiB", "--budget.nvme", "512MiB", "--compute_threads", "2",
             "--tokens", f"{directory}/tokens.yaml", "--rights", f"{directory}/rights.yaml", *EXTRA],
            stdout=subprocess.PIPE, stderr=open(f"{directory}/err", "w"), text=True)
        line = self.process.stdout.readline()
        assert line.startswith("ballastd ready"), line
        words = dict(word.split("=", 1) for word in line.split()[2:])
        self.address, self.http = words["listen"], words["metrics"]

    def status(self, name):
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith(name + ":"):
                return int(line.split()[1])

    def memory(self):
        return self.status("VmRSS") << 10

    def threads(self):
        return self.status("Threads")

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def train(self, steps):
        return subprocess.Popen(
            [f"{self.bin}/train_bytes_lm", "--servers", self.address, "--steps", "100000", "--stop-at", str(steps),
             *MODEL, "--job", "trained", "--token-file", f"{self.dir}/trainer", "--timeout", "60"],
            stdout=subprocess.DEVNULL, stderr=open(f"{self.dir}/trainer.err", "w"))

    def client_connects(self):
        return subprocess.run([f"{self.bin}/ballastctl", "status", "--servers", self.address, "--token-file",
                               f"{self.dir}/trainer", "--timeout", "10"], capture_output=True, text=True)


def idle(server, token, count):
    """Some silent, some that have shaken hands."""
    host, port = server.address.rsplit(":", 1)
    held = []
    for i in range(count):
        try:
            held.append(Http2(server.address).socket if i % 2 else socket.create_connection((host, int(port)), 30))
        except OSError:
            pass
    return held


def half_open(server, token, count, path=OPEN):
    """Headers of calls, and the first bytes of a message that never comes."""
    held = []
    for i in range(0, count, 50):
        link = Http2(server.address)
        held.append(link.socket)
        try:
            for _ in range(min(50, count - i)):
                link.socket.sendall(link.frame(0, 0, link.open(path, token), struct.pack(">BI", 0, 1000) + b"x"))
        except OSError:
            pass
    return held


def reflection(server, token, count):
    return half_open(server, token, count, b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


def opens(server, token, count, message, at_a_time=16):
    turns = iter(range(count))
    lock, said = threading.Lock(), [0]

    def run():
        while True:
            with lock:
                if next(turns, None) is None:
                    return
            told = call(server.address, OPEN, token, message)
            with lock:
                said[0] += told
    workers = [threading.Thread(target=run) for _ in range(at_a_time)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return []


def large_opens(server, token, count):
    one_range = delimited(2, b"\x08\x01\x10\x01\x18\x01\x20\x02")
    tiling = one_range * ((16 << 20) // len(one_range) - 100)
    spec = delimited(5, delimited(1, b"x-1"))
    return opens(server, token, count, spec + delimited(4, tiling[:(16 << 20) // len(one_range) * len(one_range) - 1000]))


def empty_elements(server, token, count):
    spec = delimited(5, delimited(1, b"x-1"))
    return opens(server, token, count, spec + delimited(4, b"\x12\x00" * (8 << 20))[:16 << 20])


FLOODS = [(idle, 5000), (half_open, 2000), (reflection, 2000), (large_opens, 200), (empty_elements, 200)]


def watch(server, ended, found):
    """Memory and threads at their highest, and each answer of /readyz that is no 200."""
    while not ended.wait(0.05):
        try:
            found["memory"] = max(found["memory"], server.memory())
            found["threads"] = max(found["threads"], server.threads())
            if time.time() - found["asked"] > 0.5:
                found["asked"] = time.time()
                code, text = server.get("/readyz")
                if code != 200:
                    found["unready"].append(text)
        except Exception as error:  # told, and judged by its test
            found["unready"].append(str(error))


def run(server, scale):
    faults = []
    for token in (b"", b"few-secret-of-some-length"):
        for flood, count in FLOODS:
            before = server.memory()
            found = {"memory": 0, "threads": 0, "unready": [], "asked": 0}
            ended = threading.Event()
            watcher = threading.Thread(target=watch, args=(server, ended, found))
            watcher.start()
            held = flood(server, token, max(10, count // scale))
            time.sleep(1)
            client = server.client_connects()
            ended.set()
            watcher.join()
            for one in held:
                one.close()
            name = f"{flood.__name__}, {'few rights' if token else 'nobody'}, {max(10, count // scale)}"
            print(f"{name}: memory +{(found['memory'] - FIRST['memory']) >> 20} MiB at most "
                  f"({before >> 20} before, {server.memory() >> 20} after), threads {found['threads']} "
                  f"(first {FIRST['threads']}), client rc {client.returncode}, unready {found['unready'][:2]}", flush=True)
            if found["memory"] - FIRST["memory"] > MEMORY_MAX:
                faults.append(f"{name}: memory grew by {found['memory'] - FIRST['memory']} bytes")
            if found["threads"] > FIRST["threads"] + THREADS_MAX:
                faults.append(f"{name}: {found['threads']} threads, {FIRST['threads']} before")
            if client.returncode != 0:
                faults.append(f"{name}: the next client: {client.stdout}{client.stderr}")
            if found["unready"]:
                faults.append(f"{name}: /readyz: {found['unready'][:3]}")
            if server.process.poll() is not None:
                return faults + [f"{name}: the server ended, {server.process.returncode}"]
    return faults


FIRST = {}
EXTRA = []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("--rounds", default="ci", choices=["full", "ci"])
    parser.add_argument("--floods", default="", help="names, separated by commas; all by default")
    parser.add_argument("--server-flags", default="")
    arguments = parser.parse_args()
    EXTRA.extend(arguments.server_flags.split())
    if arguments.floods:
        FLOODS[:] = [flood for flood in FLOODS if flood[0].__name__ in arguments.floods.split(",")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="ballast-door-") as directory:
        server = Server(arguments.bin, directory)
        trainer = server.train(100000)
        try:
            time.sleep(8)
            FIRST.update(memory=server.memory(), threads=server.threads())
            faults = run(server, 1 if arguments.rounds == "full" else 20)
            if trainer.poll() is not None:
                faults.append("the trainer ended: " + open(f"{directory}/trainer.err").read()[-500:])
            if server.process.poll() is None:
                steps = json.loads(server.get("/steps.json?last=256")[1])["jobs"][0]["steps"]
                decided = [float(step["decided_seconds"]) for step in steps if float(step.get("decided_seconds", 0)) > 0]
                times = sorted(after - before for before, after in zip(decided, decided[1:]))
                if times:
                    print(f"of the last {len(times)} steps: median {times[len(times) // 2]:.3f} s, longest {times[-1]:.3f} s")
            print(open(f"{directory}/err").read()[-600:] if faults else "", flush=True)
        finally:
            for process in (trainer, server.process):
                if process.poll() is None:
                    process.kill()
                process.wait()
    for fault in faults:
        print("FAULT", fault)
    sys.exit(1 if faults else 0)


main()
