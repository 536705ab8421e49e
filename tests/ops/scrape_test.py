"""The scrape configuration of deploy/prometheus/README.md, by a real Prometheus, on a server whose HTTP port speaks TLS."""
import json
import pathlib
import re
import urllib.request

import chart_test
import ops


def test_by_tls():
    ops.need(ops.BIN / 'ballastd', 'prometheus', 'openssl')
    folder = pathlib.Path.cwd()
    for name, alternative in [('server', 'DNS:localhost,IP:127.0.0.1'), ('scrape', 'URI:spiffe://t/prometheus')]:
        chart_test.issue(folder, 'ca', name, alternative)
    ca = folder / 'ca' / 'ca.crt'
    server = ops.start(ops.BIN / 'ballastd', '--listen', '127.0.0.1:7070', '--metrics_listen', '127.0.0.1:9070', '--data_directory', 'data',
                       '--budget.dram', '64MiB', '--tls.certificate', folder / 'server' / 'tls.crt', '--tls.key',
                       folder / 'server' / 'tls.key', '--tls.client_ca', ca, '--metrics_tls', 'true', log='log')
    ops.wait_for(lambda: 'ballastd ready' in open('log').read(), 'ballastd ready')
    text = re.search(r'```yaml\n(scrape_configs:.*?)```', (ops.DEPLOY / 'prometheus' / 'README.md').read_text(), re.DOTALL)[1]
    for shown, here in [('servers-ca.crt', ca), ('prometheus.crt', folder / 'scrape' / 'tls.crt'),
                        ('prometheus.key', folder / 'scrape' / 'tls.key'), ("'node-1:9070', 'node-2:9070'", "'127.0.0.1:9070'")]:
        assert shown in text, (shown, text)
        text = text.replace(shown, str(here))
    pathlib.Path('prometheus.yml').write_text('global: {scrape_interval: 1s}\n' + text)
    ops.start('prometheus', '--config.file=prometheus.yml', '--storage.tsdb.path=tsdb', '--web.listen-address=127.0.0.1:9090',
              log='prometheus.log')

    def answer(query):
        with urllib.request.urlopen(f'http://127.0.0.1:9090/api/v1/query?query={query}', timeout=30) as got:
            return [float(sample['value'][1]) for sample in json.load(got)['data']['result']]
    ops.wait_for(lambda: answer('up{job="ballast"}') == [1], 'scraped by TLS')
    assert answer('ballast_tls_not_after_timestamp_seconds{what="client_ca"}')[0] > 1e9
    server.terminate()
    ops.ended(server, 'log')
