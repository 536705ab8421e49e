"""A server that comes back with a large log, on a disk that is slow: what its port answers meanwhile."""

import json
import pathlib
import re
import socket
import threading
import time

import faults
import ops
import watched

# 126 million parameters, whose gradients take 253 MB of the log in each step: a step is quick, since it reads few bytes of text.
MODEL = '--layers 40 --width 512 --batch 1 --context 8 --micro-batches 1 --chunk-elements 1048576'.split()
# All states live in memory, and the log holds 16 steps: in its first half few chunks are written to the disk, so most must be replayed.
STEPS = 9
BUDGET = '--budget.dram 4GiB --budget.nvme 16GiB --log_steps 16'
REPLAYED_BYTES_MIN = 1.9e9
PARAMETERS = 127e6
STATE_BYTES = PARAMETERS * 12
# State, working copies, and the slices of the step that is read next; the log's records take no more of it than a batch has.
RESIDENT_BYTES_MAX = 1.1 * PARAMETERS * 16 + (256 << 20)
DISK_BYTES_PER_SECOND = 300 << 20
IDLE = 300
PATHS = ('livez', 'readyz', 'metrics', 'status.json')


class Scraper:
    """Asks the paths of a server's port one after the other until it ends: `answers` is [(time, path, seconds, status, text)], from the
    first one on that the port gives."""

    def __init__(self, server):
        self.url, self.answers, self.ended = f'http://{server.metrics}/', [], threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while not self.ended.is_set():
            for path in PATHS:
                began = time.monotonic()
                status, text = ops.http(self.url + path)
                if status == 0 and not self.answers:
                    break  # nobody listens yet
                self.answers.append((began, path, time.monotonic() - began, status, text))
            self.ended.wait(0.05 if self.answers else 0.005)

    def end(self):
        self.ended.set()
        self.thread.join()

    def of(self, path):
        return [answer for answer in self.answers if answer[1] == path]


def idle_connections(server, count):
    """Connections that send nothing, or half a request. The port gives the oldest up for newer ones."""
    host, port = server.metrics.split(':')
    connections = [socket.create_connection((host, int(port)), timeout=5) for _ in range(count)]
    for connection in connections[::2]:
        connection.sendall(b'GET /metrics HTTP/1.1\r\nHost: loc')
    return connections


def progress(text):
    """(done, total) of the recovery, from the text of any path that tells them."""
    done = re.search(r'recovery_done_bytes":"?(\d+)|recovery_bytes\{kind="done"\} (\S+)', text)
    total = re.search(r'recovery_total_bytes":"?(\d+)|recovery_bytes\{kind="total"\} (\S+)', text)
    return tuple(int(float(found[1] or found[2])) for found in (done, total))


def test_large_log():
    """2 GB of log are replayed after a kill -9: the process lives, is not ready, says how far it is, and answers every scrape, whoever
    else holds connections."""
    ops.need(ops.BIN / 'train_bytes_lm')
    disk = faults.SlowDisk()
    server = watched.Server(0, budget=BUDGET).start()
    began = time.monotonic()
    ops.run(ops.BIN / 'train_bytes_lm', *MODEL, '--steps', STEPS, '--servers', server.listen, '--job', 'large', '--resume', 'auto')
    print(f'{STEPS} steps in {time.monotonic() - began:.1f} s')
    server.kill()

    disk.limit(bytes_per_second=DISK_BYTES_PER_SECOND)
    began = time.monotonic()
    scraper = Scraper(server)  # before the recovery, whose beginning it is to see
    server.start(*disk.into, wait=False)
    ops.wait_for(lambda: scraper.answers, 'the port answers')
    connections = idle_connections(server, IDLE)
    while ops.http(f'http://{server.metrics}/readyz')[0] != 200:
        assert server.process.poll() is None, pathlib.Path(server.log).read_text()[-2000:]
        assert time.monotonic() - began < 300, f'not ready: {scraper.answers[-4:]}'
        time.sleep(0.2)
    ready = time.monotonic()
    resident = int(re.search(r'VmHWM:\s+(\d+) kB', pathlib.Path(f'/proc/{server.process.pid}/status').read_text())[1]) << 10
    print(f'resident at most {resident / 1e9:.2f} GB, {resident / PARAMETERS:.1f} bytes a parameter')
    assert STATE_BYTES < resident < RESIDENT_BYTES_MAX
    ops.wait_for(lambda: any(answer[3] == 200 for answer in scraper.of('readyz')), 'the scraper has seen that it is ready')
    scraper.end()
    for connection in connections:
        connection.close()
    print(pathlib.Path(server.log).read_text()[-600:])

    for path in PATHS:
        seconds = sorted(answer[2] for answer in scraper.of(path))
        print(f'/{path}: {len(seconds)} answers, median {1e3 * seconds[len(seconds) // 2]:.1f} ms, longest {1e3 * seconds[-1]:.1f} ms')
        assert len(seconds) > 20, 'the recovery was too quick to be looked at'
    missed = [answer[:4] for answer in scraper.answers if answer[3] == 0]
    assert not missed, missed
    assert all(answer[3] == 200 for path in ('livez', 'metrics', 'status.json') for answer in scraper.of(path))
    ready_answers = scraper.of('readyz')
    states = [(status, json.loads(text)['state']) for _, _, _, status, text in ready_answers]
    turned = states.index((200, 'ready'))
    assert set(states[:turned]) == {(503, 'recovering')} and set(states[turned:]) == {(200, 'ready')}, states

    seen = [(at - began, *progress(text)) for at, path, _, _, text in scraper.answers if path != 'livez' and at < ready]
    total = seen[-1][2]
    some = ', '.join(f'{at:.1f} s {done >> 20} MiB' for at, done, _ in seen[:: max(1, len(seen) // 30)])
    print(f'ready after {ready - began:.1f} s: {some}')
    assert all(earlier[1] <= later[1] for earlier, later in zip(seen, seen[1:], strict=False)), 'done shrinks'
    assert all(done <= all_ for _, done, all_ in seen), 'more done than there is'
    assert seen[0][1] < total / 20, seen[0]
    assert seen[-1][1] > 0.95 * total, seen[-1]
    log_bytes = (server.folder / 'log-large').stat().st_size
    print(f'total {total / 1e9:.2f} GB, the log has {log_bytes / 1e9:.2f} GB')
    replayed = int(re.search(r'recovered step .* (\d+) MiB of slices replayed', pathlib.Path(server.log).read_text())[1]) << 20
    assert REPLAYED_BYTES_MIN < replayed < total < log_bytes + STATE_BYTES, replayed
    # No long while without progress: what is done from the last look before each fifth of the time to the first behind it.
    for fifth in range(5):
        before = max((done for at, done, _ in seen if 5 * at <= fifth * seen[-1][0]), default=0)
        after = min(done for at, done, _ in seen if 5 * at >= (fifth + 1) * seen[-1][0])
        assert after - before > total / 40, (fifth, before, after)
