"""State servers in training, a Prometheus that scrapes them, an Alertmanager, and a webhook that keeps what arrives."""

import http.server
import json
import os
import pathlib
import re
import signal
import threading
import time

import board_answers
import ops

GRAFANA = ops.DEPLOY / 'grafana'
PROMETHEUS = ops.DEPLOY / 'prometheus'

# A model of 0.8 million parameters that trains until it is told to end.
MODEL = ['--steps', '1000000', '--layers', '4', '--width', '128', '--batch', '1', '--context', '64', '--micro-batches', '2',
         '--chunk-elements', '65536', '--resume', 'auto']  # fmt: skip
BUDGET = '--budget.dram 14MiB --budget.nvme 256MiB --staging 4MiB'
# What `ballastctl iotune` measures on a machine of two cores.
PROFILE = {
    'threads': 2, 'dram_read_1_thread_bytes_per_s': 7e9, 'dram_read_all_threads_bytes_per_s': 8e9, 'dram_copy_1_thread_bytes_per_s': 6e9,
    'dram_copy_all_threads_bytes_per_s': 1e10, 'digest_1_thread_bytes_per_s': 1e10, 'digest_all_threads_bytes_per_s': 1.2e10,
    'disk_read_bytes_per_s': 2e9, 'disk_read_depth': 4, 'disk_write_bytes_per_s': 2e9, 'disk_write_depth': 8, 'disk_mixed_bytes_per_s': 2e9,
    'disk_mixed_depth': 8, 'disk_direct': 1, 'disk_append_p50_us': 4000, 'disk_append_p99_us': 12000, 'gpu_in_bytes_per_s': 0,
    'gpu_out_bytes_per_s': 0,
    **{f'update_{moments}_{threads}_elements_per_s': 4e8
       for moments in ('f32', 'bf16', 'i8', 'f8') for threads in ('1_thread', 'all_threads')},
}  # fmt: skip

# Alerts wait for minutes and hours: the rules of a live test wait for a sixtieth.
FASTER = 60


def fast_rules(faster=FASTER):
    """Text of the rules with each `for`, range and offset divided by `faster`."""
    seconds = {'s': 1, 'm': 60, 'h': 3600}

    def divide(found):
        return f'{found[1]}{max(1, int(found[2]) * seconds[found[3]] // faster)}s'

    text = (PROMETHEUS / 'ballast.rules.yml').read_text()
    text = re.sub(r'(for: |\[|offset )(\d+)([smh])\b', divide, text)
    return text.replace('4 * 3600', f'4 * {3600 // faster}')


class Server:
    """A ballastd at addresses of its own: the test has a network namespace for itself."""

    def __init__(self, number, folder=None, budget=BUDGET, more=()):
        """`more`: arguments of ballastd."""
        self.number = number
        self.folder = pathlib.Path(folder or f'server{number}')
        self.folder.mkdir(exist_ok=True)
        profile = pathlib.Path('profile.yaml')
        profile.write_text(''.join(f'{key}: {int(value)}\n' for key, value in PROFILE.items()))
        self.listen, self.metrics = f'127.0.0.1:{7070 + number}', f'127.0.0.1:{9070 + number}'
        self.arguments = [*budget.split(), '--listen', self.listen, '--metrics_listen', self.metrics, '--data_directory', self.folder,
                          '--server_id', f'server{number}', '--machine_profile', profile, *more]  # fmt: skip
        self.log = f'server{number}.log'
        self.process = None

    def start(self, *into, wait=True, **options):
        """`into`: words before the command. `options`: of subprocess.Popen."""
        self.process = ops.start(*into, ops.BIN / 'ballastd', *self.arguments, log=self.log, **options)
        if wait:
            self.wait()
        return self

    def wait(self):
        ops.wait_for(lambda: ops.http(f'http://{self.metrics}/readyz')[0] == 200, f'server {self.number} is ready')

    def kill(self):
        ops.kill(self.process)

    def families(self):
        """Names of the families that the server exports."""
        status, text = ops.http(f'http://{self.metrics}/metrics')
        assert status == 200, (status, text)
        return set(re.findall(r'^# TYPE (\w+)', text, re.MULTILINE))


def trainer(servers, job, *extra, rank=0, ranks=1):
    """A rank in the background, on a job that goes on until the rank ends."""
    addresses = ','.join(server if isinstance(server, str) else server.listen for server in servers)
    return ops.start(ops.BIN / 'train_bytes_lm', *MODEL, '--servers', addresses, '--job', job, '--world-size', ranks, '--rank', rank,
                     '--rendezvous', f'rendezvous-{job}', *extra, log=f'{job}{rank}.log')  # fmt: skip


def check_alive(*trainers):
    """Trainers go on until somebody ends them; otherwise nothing that the test waits for will come."""
    for process in trainers:
        if process.poll() is not None:
            name = ''.join(process.args[process.args.index(option) + 1] for option in ('--job', '--rank'))
            raise SystemExit(f'a trainer ended with {process.returncode}: {pathlib.Path(f"{name}.log").read_text()[-600:]}')


def end(*processes):
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            ops.kill(process)


class Webhook:
    """Receives what Alertmanager sends: `events` is [(time, 'firing' or 'resolved', labels, annotations)]."""

    def __init__(self, port):
        self.events = events = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                for alert in json.loads(self.rfile.read(int(self.headers['content-length'])))['alerts']:
                    events.append((time.monotonic(), alert['status'], alert['labels'], alert['annotations']))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        server = http.server.ThreadingHTTPServer(('127.0.0.1', port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def seen(self, alert, status='firing', severity=None, since=0):
        """The events of an alert, from `since` on."""
        return [event for event in self.events if event[0] >= since and event[1] == status and event[2]['alertname'] == alert
                and severity in (None, event[2]['severity'])]  # fmt: skip


class Monitoring:
    """A Prometheus that scrapes `servers` each second; with `rules` (text) also an Alertmanager and `hook`."""

    URL = 'http://127.0.0.1:9090'

    def __init__(self, servers, rules=None):
        ops.need('prometheus')
        configuration = {
            'global': {'scrape_interval': '1s', 'evaluation_interval': '1s'},
            'scrape_configs': [{'job_name': 'ballast', 'static_configs': [{'targets': [server.metrics for server in servers]}]}],
        }
        if rules:
            self._alerting(rules, configuration)
        # JSON is YAML.
        pathlib.Path('prometheus.yml').write_text(json.dumps(configuration))
        self.process = ops.start('prometheus', '--config.file=prometheus.yml', '--storage.tsdb.path=tsdb',
                                 '--web.listen-address=127.0.0.1:9090', '--log.level=warn', log='prometheus.log')  # fmt: skip
        self.prometheus = board_answers.Prometheus(self.URL)
        ops.wait_for(lambda: ops.http(f'{self.URL}/-/ready')[0] == 200, 'Prometheus is ready')

    def _alerting(self, rules, configuration):
        ops.need('prometheus-alertmanager')
        self.hook = Webhook(9099)
        pathlib.Path('rules.yml').write_text(rules)
        configuration['rule_files'] = ['rules.yml']
        configuration['alerting'] = {'alertmanagers': [{'static_configs': [{'targets': ['127.0.0.1:9093']}]}]}
        pathlib.Path('alertmanager.yml').write_text(json.dumps({
            # Every alert by itself and at once, so that the test sees each.
            'route': {'receiver': 'hook', 'group_by': ['...'], 'group_wait': '0s', 'group_interval': '1s', 'repeat_interval': '1h'},
            'receivers': [{'name': 'hook', 'webhook_configs': [{'url': 'http://127.0.0.1:9099/', 'send_resolved': True}]}],
        }))  # fmt: skip
        ops.start('prometheus-alertmanager', '--config.file=alertmanager.yml', '--storage.path=alertmanager', '--cluster.listen-address=',
                  '--web.listen-address=127.0.0.1:9093', log='alertmanager.log', env=dict(os.environ))  # fmt: skip
        ops.wait_for(lambda: ops.http('http://127.0.0.1:9093/-/ready')[0] == 200, 'Alertmanager is ready')

    def value(self, query):
        """The value of a query with a single series, or None without a series."""
        result = self.prometheus.get('query', query=query)['result']
        return float(result[0]['value'][1]) if result else None
