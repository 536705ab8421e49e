"""Two state servers in training, a Prometheus that scrapes them, an Alertmanager, and a webhook that writes down what arrives."""

import json
import os
import pathlib
import signal
import sys
import urllib.request

import ops

sys.path.insert(0, str(ops.DEPLOY / 'grafana'))
import answers  # noqa: E402

GRAFANA = ops.DEPLOY / 'grafana'
PROMETHEUS = ops.DEPLOY / 'prometheus'
# A model of 0.8 million parameters that trains until it is told to end.
MODEL = [
    '--steps',
    '1000000',
    '--layers',
    '4',
    '--width',
    '128',
    '--batch',
    '1',
    '--context',
    '64',
    '--micro-batches',
    '2',
    '--chunk-elements',
    '65536',
    '--resume',
    'auto',
]
# A machine as fast as ours: so fast that steps are slower than predicted would be a fault of the machine.
PROFILE = pathlib.Path('profile.yaml')


class Server:
    """A ballastd with addresses of its own; the test's network namespace has no other."""

    def __init__(self, number, folder='servers', budget='--budget.dram=12MiB --budget.nvme=256MiB --staging=4MiB', environment=None):
        self.number, self.environment = number, environment
        self.folder = pathlib.Path(folder) / str(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.listen, self.metrics = f'127.0.0.1:{7070 + number}', f'127.0.0.1:{9070 + number}'
        self.arguments = [
            *budget.split(),
            '--listen',
            self.listen,
            '--metrics_listen',
            self.metrics,
            '--data_directory',
            self.folder,
            '--server_id',
            f'server{number}',
        ]
        self.log = f'server{number}.log'

    def start(self, *into, wait=True, binary=ops.BIN / 'ballastd'):
        """`into`: words before the command."""
        self.process = ops.start(*into, binary, *self.arguments, log=self.log, env=dict(os.environ, **(self.environment or {})))
        if wait:
            ops.wait_for(lambda: ops.http(f'http://{self.metrics}/readyz')[0] == 200, f'server {self.number} is ready')
        return self

    def kill(self):
        ops.kill(self.process)

    def families(self):
        """Names of the families that the server exports."""
        status, text = ops.http(f'http://{self.metrics}/metrics')
        assert status == 200, (status, text)
        return {line.split()[2] for line in text.splitlines() if line.startswith('# TYPE')}


def train(servers, *extra, job='demo', ranks=2):
    """Trainers of a job, in the background."""
    addresses = ','.join(server.listen for server in servers)
    return [
        ops.start(
            ops.BIN / 'train_bytes_lm',
            *MODEL,
            '--servers',
            addresses,
            '--job',
            job,
            '--world-size',
            ranks,
            '--rank',
            rank,
            '--rendezvous',
            f'rendezvous-{job}',
            *extra,
            log=f'{job}{rank}.log',
        )
        for rank in range(ranks)
    ]


def end(processes):
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            ops.kill(process)


class Monitoring:
    """A Prometheus with `rules` (text), an Alertmanager and a webhook; scrapes `servers` each second."""

    URL = 'http://127.0.0.1:9090'

    def __init__(self, servers, rules=None, scrape='1s'):
        ops.need('prometheus')
        configuration = {
            'global': {'scrape_interval': scrape, 'evaluation_interval': '1s'},
            'scrape_configs': [{'job_name': 'ballast', 'static_configs': [{'targets': [server.metrics for server in servers]}]}],
        }
        if rules:
            pathlib.Path('rules.yml').write_text(rules)
            configuration['rule_files'] = ['rules.yml']
        # JSON is YAML.
        pathlib.Path('prometheus.yml').write_text(json.dumps(configuration))
        ops.start(
            'prometheus',
            '--config.file=prometheus.yml',
            '--storage.tsdb.path=tsdb',
            '--web.listen-address=127.0.0.1:9090',
            '--log.level=warn',
            log='prometheus.log',
        )
        self.prometheus = answers.Prometheus(self.URL)
        ops.wait_for(lambda: ops.http(f'{self.URL}/-/ready')[0] == 200, 'Prometheus is ready')
        ops.wait_for(lambda: self.value(f'sum(up)') == len(servers), 'Prometheus scrapes the servers')

    def value(self, query):
        """The value of a query with a single series, or None without a series."""
        result = self.prometheus.get('query', query=query)['result']
        return float(result[0]['value'][1]) if result else None
