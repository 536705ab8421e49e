#!/usr/bin/env python3
"""What strangers, and callers with few rights, may cost a server while a job trains on it.

    door_test.py BIN [--rounds full|ci] [--apart]

`full`: 5,000 idle connections, 2,000 half-open streams, 2,000 reflection streams, 200 Opens of 16 MB, as many of 8M
empty elements, and messages of 16 MB to the health service, 200 whole ones from one address and 40 unfinished ones
from as many, each from nobody and from an identity with few rights. `ci`: a twentieth. Loopback only. Each flood must be
refused where it is meant to come: the reason and the words of each refusal are looked at. After each flood: memory and
threads of the server, the next client, /readyz. In `full` rounds steps take some 0.4 s, and none may take longer than 3
times the median of the same training without a flood, unless that itself has such steps; the toy's steps of `ci` are shorter
than a scheduler's turns, so they are printed alone. `--apart` gives the server a core of its own, and the trainer another,
which this driver uses while it is free.
"""
import argparse, collections, os, resource, socket, struct, sys, tempfile, threading, time

from http2 import OPEN, SAID, Http2, call, delimited, learn, refusal, varint
from served import JUDGED_MODEL, MODEL, Server

MEMORY_MAX = 128 << 20
THREADS_MAX = 64  # beside those of before
STEP_MAX = 3  # times the median of steps without a flood
STEPS_MIN = 12  # of which the longest is looked for


def nothing(server, token, count):
    """What steps take anyhow."""
    server.await_step(server.step() + count, 120)
    return [], []


def idle(server, token, count):
    """Some silent, some that have shaken hands."""
    host, port = server.address.rsplit(":", 1)
    held = []
    for i in range(count):
        try:
            held.append(Http2(server.address).socket if i % 2 else socket.create_connection((host, int(port)), 30))
        except OSError:
            pass
    return held, []


def half_open(server, token, count, path=OPEN, patience=12):
    """Headers of calls, and the first bytes of a message that never comes."""
    links = []
    for i in range(0, count, 50):
        link = Http2(server.address)
        links.append(link)
        try:
            for _ in range(min(50, count - i)):
                link.socket.sendall(link.frame(0, 0, link.open(path, token), struct.pack(">BI", 0, 1000) + b"x"))
        except OSError:
            pass
    # Each gives way to the next, and the last are late after 10 s; strangers are not read at all.
    time.sleep(patience if token else 1)
    until = time.time() + 60  # only a hang takes as long
    while True:
        for link in links:
            link.look()
        if any(link.ended for link in links) or time.time() > until:
            break
    return [link.socket for link in links], [refusal(text) for link in links for text in link.ended.values()]


def reflection(server, token, count):
    return half_open(server, token, count, b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", 1)


def opens(server, token, count, message, at_a_time=16, path=OPEN):
    turns = iter(range(count))
    lock, said = threading.Lock(), []

    def run():
        while True:
            with lock:
                if next(turns, None) is None:
                    return
            told = call(server.address, path, token, message)
            with lock:
                said.append(told)
    workers = [threading.Thread(target=run) for _ in range(at_a_time)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [], said


def opened(element, size):
    """An Open of job x-1 with as many of an element of its tiling as fit."""
    tiling = element * ((size - 1000) // len(element))
    return delimited(5, delimited(1, b"x-1")) + delimited(4, tiling)


def large_opens(server, token, count):
    """Parsed, each takes five times its bytes: the most that a message may."""
    return opens(server, token, count, opened(delimited(2, b"".join(
        varint(number << 3) + varint(1 << 30) for number in range(1, 5))), 16 << 20))


def empty_elements(server, token, count):
    return opens(server, token, count, opened(delimited(2, b""), 16 << 20))


def large_health(server, token, count):
    """Of the one service that asks nobody who calls."""
    return opens(server, token, count, b"\0" * (16 << 20), path=CHECK)


def probe(server):
    """None, or what is wrong with the answer that a kubelet gets within its second."""
    link = Http2(server.address)
    link.socket.settimeout(1)
    try:
        stream = link.open(CHECK, b"")
        link.send(stream, struct.pack(">BI", 0, 0), True)
        while stream not in link.ended:
            link.read()
        return None if link.answer[5:] == b"\x08\x01" else ("PROBE", str(refusal(link.ended[stream])))
    except (ConnectionError, socket.timeout) as error:
        return ("PROBE", str(error))
    finally:
        link.socket.close()


def unfinished_health(server, token, count):
    """Messages of health that lack their last byte, from many addresses, beside a probe's calls."""
    said, links, ended = [], [], threading.Event()

    def run(i):
        try:
            link = Http2(server.address, f"127.0.1.{1 + i % 200}")
            links.append(link.socket)
            stream = link.open(CHECK, token)
            link.send(stream, struct.pack(">BI", 0, 16 << 20) + bytes((16 << 20) - 1), False)
            while stream not in link.ended:
                link.read()
            said.append(refusal(link.ended[stream]))
        except (ConnectionError, socket.timeout) as error:
            said.append(("none", str(error)))

    def ask():
        """A kubelet takes a pod out after three failures in a row."""
        failed = 0
        while not ended.wait(0.2):
            wrong = probe(server)
            failed = failed + 1 if wrong is not None else 0
            if failed == 3:
                said.append(wrong)
    workers = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    prober = threading.Thread(target=ask)
    for thread in [prober, *workers]:
        thread.start()
    for worker in workers:
        worker.join()
    ended.set()
    prober.join()
    return links, said


CHECK = b"/grpc.health.v1.Health/Check"
# What an identity with few rights is told: one of these (reason, words), and each of the first ones at least once.
LATE = ("BAD_REQUEST", "expected a whole message within 10s")
SLOW = ("BUSY", "come slowly, and others wait")
BUSY = ("BUSY", "send it again")
HEALTH = ("BAD_REQUEST", "a HealthCheckRequest has at most")
FLOODS = [
    (nothing, 40, [], []),
    (idle, 5000, [], []),
    (half_open, 2000, [SLOW], [LATE]),
    (reflection, 2000, [("BUSY", "callers may ask for reflection at a time")], []),
    (large_opens, 200, [("VERSIONS_DIFFER", "came without spec_digest")], [BUSY]),
    (empty_elements, 200, [("BAD_REQUEST", "has more fields than that")], [BUSY]),
    (large_health, 200, [HEALTH], [BUSY]),
    (unfinished_health, 40, [SLOW], [LATE, BUSY]),
]
OF_HEALTH = (large_health, unfinished_health)
STRANGERS = ("NO_IDENTITY", "")


def judge(told, must, may):
    """What of the refusals is not as it should be."""
    counts = collections.Counter()
    wrong = []
    for reason, text in told:
        kind = next((one for one in must + may if one[0] == reason and one[1] in text), None)
        counts[kind or (reason, "?")] += 1
        if kind is None:
            wrong.append(f"refused with {reason}: {text}")
    wrong = wrong[:2] + [f"nobody was refused with {one}" for one in must if counts[one] == 0]
    return wrong, ", ".join(f"{reason} {count}" for (reason, _), count in counts.items())


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


def quantities(times):
    """Median and longest of steps' times, in seconds."""
    return times[len(times) // 2][0], times[-1][0]


def told_steps(times, control):
    """Words about the steps under a flood. `control`: those of the same training without one, None if there is none to compare."""
    if not times:
        return "no step"
    (median, longest), (usual, most) = quantities(times), quantities(control or times)
    return (f"{len(times)} steps, median {median:.3f} s, longest {longest:.3f} s (the trainer computed {times[len(times) // 2][1]:.3f} and "
            f"{times[-1][1]:.3f} s), {longest / median:.1f} times the median"
            + ("" if control is None else f", {longest / usual:.1f} times that without a flood")
            + ("" if most <= STEP_MAX * usual or control is None else f"; not judged: without any flood {most / usual:.1f} times"))


def wrong_steps(times, control):
    """What of the steps under a flood is not as it should be, where the same training without a flood is."""
    if not times:
        return ["no step ended"]
    (_, longest), (usual, most) = quantities(times), quantities(control)
    if most > STEP_MAX * usual or longest <= STEP_MAX * usual:
        return []
    return [f"a step took {longest:.3f} s, expected at most {STEP_MAX} times the median of those without a flood, {usual:.3f} s"]


def cost(server, flood, token, count, seen):
    """Makes a flood. What it held and was told, and what it cost; `seen`: what was seen meanwhile."""
    ended = threading.Event()
    watcher = threading.Thread(target=watch, args=(server, ended, seen))
    watcher.start()
    worked, began, first = server.processor_seconds(), time.time(), server.step()
    held, told = flood(server, token, count)
    seen.update(worked=server.processor_seconds() - worked, took=time.time() - began)
    # Of a flood that is over in a moment, or stays, too; and the step under way when it ended.
    server.await_step(max(first + STEPS_MIN, server.step() + 2), 120)
    seen["steps"] = server.step_times(began)
    time.sleep(1)
    seen["client"] = server.client_connects()
    ended.set()
    watcher.join()
    for one in held:
        one.close()
    return told


def wrong_cost(server, seen):
    """What of a flood's cost is not as it should be."""
    faults = []
    if seen["memory"] - FIRST["memory"] > MEMORY_MAX:
        faults.append(f"memory grew by {seen['memory'] - FIRST['memory']} bytes")
    if seen["threads"] > FIRST["threads"] + THREADS_MAX:
        faults.append(f"{seen['threads']} threads, {FIRST['threads']} before")
    if seen["client"].returncode != 0:
        faults.append(f"the next client: {seen['client'].stdout}{seen['client'].stderr}")
    if seen["unready"]:
        faults.append(f"/readyz: {seen['unready'][:3]}")
    if server.process.poll() is not None:
        faults.append(f"the server ended, {server.process.returncode}")
    return faults


def run(server, scale, judged):
    faults = []
    for token in (b"", b"few-secret-of-some-length"):
        control = None
        for flood, count, must, may in FLOODS:
            before, seen = server.memory(), {"memory": 0, "threads": 0, "unready": [], "asked": 0}
            count = count if flood is nothing else max(10, count // scale)
            told = cost(server, flood, token, count, seen)
            answered = token or flood in OF_HEALTH
            wrong, counts = judge(told, must if answered or not must else [STRANGERS], may if answered else [])
            name = f"{flood.__name__}, {'few rights' if token else 'nobody'}, {count}"
            print(f"{name}: memory +{(seen['memory'] - FIRST['memory']) >> 20} MiB at most "
                  f"({before >> 20} before, {server.memory() >> 20} after), threads {seen['threads']} "
                  f"(first {FIRST['threads']}), client rc {seen['client'].returncode}, unready {seen['unready'][:2]}; told {counts or 'nothing'}; "
                  f"{seen['took']:.1f} s, of the server's processor {seen['worked']:.2f} s; {told_steps(seen['steps'], control)}", flush=True)
            wrong += wrong_cost(server, seen)
            if control is not None:
                wrong += wrong_steps(seen["steps"], control)
            if judged and flood is nothing:
                control = seen["steps"]
            faults += [f"{name}: {text}" for text in wrong]
            if server.process.poll() is not None:
                return faults
    return faults


FIRST = {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("--rounds", default="ci", choices=["full", "ci"])
    parser.add_argument("--floods", default="", help="names, separated by commas; all by default")
    parser.add_argument("--server-flags", default="")
    parser.add_argument("--apart", action="store_true", help="the server on core 1, the trainer on core 0, which this driver leaves to it")
    arguments = parser.parse_args()
    prefix = []
    if arguments.apart:
        prefix = ["taskset", "-c", "1"]
        os.sched_setaffinity(0, {0})
    if arguments.floods:
        FLOODS[:] = [flood for flood in FLOODS if flood[0] is nothing or flood[0].__name__ in arguments.floods.split(",")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="ballast-door-") as directory:
        server = Server(arguments.bin, directory, ["--reflection", "true", *arguments.server_flags.split()], prefix)
        if arguments.apart:
            server.prefix = ["taskset", "-c", "0"]
        full = arguments.rounds == "full"
        trainer = server.train(100000, JUDGED_MODEL if full else MODEL)
        if arguments.apart:
            os.nice(19)
        try:
            learn(server.address, b"few-secret-of-some-length")
            assert server.await_step(20, 300) >= 20, "the trainer does not train"
            time.sleep(2)
            FIRST.update(memory=server.memory(), threads=server.threads())
            faults = run(server, 1 if full else 20, full)
            if trainer.poll() is not None:
                faults.append("the trainer ended: " + open(f"{directory}/trainer.err").read()[-500:])
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
