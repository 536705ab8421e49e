"""The Helm chart: what it renders is valid for every Kubernetes it claims, refuses what it cannot honour, and is hardened."""
import http.server
import itertools
import json
import re
import shutil
import socket
import ssl
import threading

import ops
import yaml

CHART = ops.DEPLOY / 'chart' / 'ballast'
KUBERNETES = [f'1.{minor}' for minor in range(28, 38)]
BASE = {'image': {'repository': 'registry.example/ballast'}}
# One dimension each; the matrix is their product.
MATRIX = [
    [{}, {'servers': 1, 'budget': {'dram': '512MiB', 'nvme': '4GiB'}, 'storage': {'size': '5GiB'}}],
    [{}, {'seccompProfile': 'ballast.json'}],
    [{}, {'metrics': {'podMonitor': True, 'rules': True, 'dashboards': True, 'labels': {'release': 'prometheus'}},
          'networkPolicy': {'enabled': False}}],
    [{}, {'config': {'staging': '128MiB', 'read_threads': 2, 'log_level': 'debug', 'import_rate': '1GiB'}, 'nodeSelector': {'disk': 'nvme'},
          'tolerations': [{'key': 'state', 'operator': 'Exists', 'effect': 'NoSchedule'}], 'priorityClassName': 'high',
          'image': {'repository': 'r', 'tag': 'x', 'pullSecrets': ['s']}, 'networkPolicy': {'scrapers': {'app': 'prometheus'}}}],
    [{}, {'tls': {'secret': 'servers', 'clientCaSecret': 'clients', 'serverCaSecret': 'servers', 'http': True},
          'access': {'rightsConfigMap': 'rights', 'tokensSecret': 'tokens', 'importTokenSecret': 'import'},
          'metrics': {'tlsSecret': 'scrape'},
          'discovery': {'etcd': ['etcd-0:2379', 'etcd-1:2379'], 'prefix': 'a/b', 'caSecret': 'etcd', 'certificateSecret': 'etcd',
                        'user': 'ballast', 'passwordSecret': 'etcd-user'}}],
]
SECURE = MATRIX[-1][1]
ETCD = {'discovery': {'etcd': ['etcd:2379']}}


def merged(*parts):
    result = {}
    for part in parts:
        for key, value in part.items():
            result[key] = merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
    return result


def render(values, chart=CHART, release='ballast', fails=False, extra=()):
    with open('values.yaml', 'w') as file:
        yaml.safe_dump(values, file)
    text = ops.run(ops.HELM, 'template', release, chart, '--namespace', 'train', '-f', 'values.yaml', *extra, fails=fails)
    # helm says on the same pipe that it follows the links to boards and alerts.
    text = ''.join(line for line in text.splitlines(keepends=True) if 'found symbolic link' not in line)
    return text if fails else [document for document in yaml.safe_load_all(text) if document]


def matrix():
    return [merged(BASE, *choice) for choice in itertools.product(*MATRIX)]


def of_kind(documents, kind):
    return [document for document in documents if document['kind'] == kind]


def test_lint():
    ops.need(ops.HELM)
    for values in matrix():
        with open('values.yaml', 'w') as file:
            yaml.safe_dump(values, file)
        ops.run(ops.HELM, 'lint', '--strict', CHART, '-f', 'values.yaml')


def test_valid_for_every_kubernetes():
    ops.need(ops.HELM)
    import kubernetes_validate
    checked = set()  # most documents are the same for many values
    for values in matrix():
        for document in render(values):
            if 'monitoring.coreos.com' in document['apiVersion']:
                continue  # test_monitoring
            text = json.dumps(document)
            for version in KUBERNETES if text not in checked else ():
                kubernetes_validate.validate(document, version, strict=True)
            checked.add(text)
    print(len(checked), 'documents checked')
    # The check finds what it is for: a field that no Kubernetes has.
    wrong = of_kind(render(BASE), 'StatefulSet')[0]
    wrong['spec']['template']['spec']['containers'][0]['livenessProb'] = {}
    try:
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)
    except kubernetes_validate.ValidationError:
        return
    raise AssertionError('a misspelt field passed')


def test_refuses():
    """Each value that cannot be honoured is refused, and the message names it."""
    ops.need(ops.HELM)
    wrong = [
        ({'image': {'repository': ''}}, 'repository'),
        ({'budget': {'dram': '64G'}}, 'dram'),
        ({'budget': {'dram': 0}}, 'dram'),
        ({'budget': {'hbm': '1GiB'}}, 'hbm'),
        ({'budgets': {}}, 'budgets'),
        ({'servers': 0}, 'servers'),
        ({'servers': 1.5}, 'servers'),
        ({'config': {'listen': '0.0.0.0:1'}}, 'listen'),
        ({'config': {'log_level': 'loud'}}, 'log_level'),
        ({'resources': {'cpu': '500m'}}, 'cpu'),
        ({'storage': {'class': ''}}, 'class'),
        ({'storage': {'size': '1TiB'}}, 'at least budget.nvme'),
        ({'seccompProfile': '/etc/ballast.json'}, 'seccompProfile'),
        ({'networkPolicy': {'trainers': {'a': 1}}}, 'trainers'),
        ({'tls': {'clientCaSecret': 'a'}}, 'need tls.secret'),
        ({'tls': {'http': True}}, 'need tls.secret'),
        ({'tls': {'serverCaSecret': 'a'}}, 'need tls.secret'),
        ({'access': {'importTokenSecret': 'a'}}, 'in the clear'),
        ({'config': {'import_rate': '1G'}}, 'import_rate'),
        ({'copies': 0}, 'copies'),
        ({'copies': 5}, 'copies'),
        ({'copies': 2}, 'discovery.etcd is empty'),
        ({'copies': 4, **ETCD}, 'at most servers (3)'),
        ({'copies': 2, 'tls': {'secret': 'a'}, **ETCD}, 'need tls.serverCaSecret'),
        ({'copies': 2, 'tls': {'secret': 'a', 'serverCaSecret': 'b'}, 'access': {'tokensSecret': 'c'}, **ETCD}, 'access.importTokenSecret'),
        ({'tls': {'secret': 'A b'}}, 'secret'),
        ({'tls': {'key': 'a'}}, 'key'),
        ({'access': {'tokensSecret': 'a'}}, 'in the clear'),
        ({'tls': {'secret': 'a'}, 'access': {'rightsConfigMap': 'a'}}, 'by which callers have an identity'),
        ({'discovery': {'caSecret': 'a'}}, 'discovery.etcd is empty'),
        ({'discovery': {'etcd': ['etcd']}}, 'etcd'),
        ({'discovery': {'etcd': ['etcd:1'], 'prefix': '/a'}}, 'prefix'),
        ({'discovery': {'etcd': ['etcd:1'], 'user': 'a', 'passwordSecret': 'a'}}, 'need discovery.caSecret'),
        ({'discovery': {'etcd': ['etcd:1'], 'caSecret': 'a', 'user': 'a'}}, 'belong together'),
        ({'discovery': {'etcd': ['etcd:1'], 'caSecret': 'a', 'user': 'a&b', 'passwordSecret': 'a'}}, 'user'),
        ({'tls': {'secret': 'a', 'http': True}, 'metrics': {'podMonitor': True}}, 'metrics.tlsSecret is empty'),
    ]
    for values, named in wrong:
        message = render(merged(BASE, values), fails=True)
        assert named in message, (values, message)
    assert '58 letters' in render(BASE, release='a' * 53, fails=True)


def test_invariants():
    ops.need(ops.HELM)
    for values in matrix():
        documents = render(values)
        names = [(document['kind'], document['metadata']['name']) for document in documents]
        assert len(set(names)) == len(names), names
        assert 'Secret' not in dict(names) and 'ServiceAccount' not in dict(names), names
        stateful = of_kind(documents, 'StatefulSet')[0]['spec']
        pod, container = stateful['template']['spec'], stateful['template']['spec']['containers'][0]
        labels = stateful['template']['metadata']['labels'].items()
        for selector in [stateful['selector'], of_kind(documents, 'PodDisruptionBudget')[0]['spec']['selector'],
                         pod['topologySpreadConstraints'][0]['labelSelector']]:
            assert selector['matchLabels'].items() <= labels, selector
        service = of_kind(documents, 'Service')[0]
        assert service['metadata']['name'] == stateful['serviceName'] and service['spec']['selector'].items() <= labels
        assert service['spec']['clusterIP'] == 'None' and service['spec']['publishNotReadyAddresses']
        assert stateful['podManagementPolicy'] == 'Parallel'
        assert set(stateful['persistentVolumeClaimRetentionPolicy'].values()) == {'Retain'}
        environment = {entry['name']: entry for entry in container['env']}
        assert environment['BALLAST_SERVER_ID']['valueFrom']['fieldRef']['fieldPath'] == 'metadata.name'
        assert pod['enableServiceLinks'] is False and pod['automountServiceAccountToken'] is False
        assert container['resources']['requests'] == container['resources']['limits']
        security = container['securityContext']
        assert security['readOnlyRootFilesystem'] and not security['allowPrivilegeEscalation']
        assert security['capabilities'] == {'drop': ['ALL']}
        assert pod['securityContext']['runAsNonRoot'] and pod['securityContext']['runAsUser'] == 65532
        probes = {kind: container[kind + 'Probe']['httpGet'] for kind in ('startup', 'liveness', 'readiness')}
        assert all(probe['port'] == 'http' for probe in probes.values())
        assert [probes[kind]['path'] for kind in probes] == ['/readyz', '/livez', '/readyz']
        by_tls = 'tls' in values
        assert {probe['scheme'] for probe in probes.values()} == {'HTTPS' if by_tls else 'HTTP'}
        assert service['spec']['ports'][0]['appProtocol'] == ('https' if by_tls else 'kubernetes.io/h2c')
        # Each file that ballastd is told of lies in a mounted folder.
        mounts = {mount['mountPath']: mount for mount in container['volumeMounts']}
        assert {volume['name'] for volume in pod.get('volumes', [])} == {mount['name'] for mount in mounts.values()} - {'state'}
        for name, entry in environment.items():
            for path in re.findall(r'/etc/ballast/[^&"]+', entry.get('value', '')):
                mount = mounts[path.rpartition('/')[0]]
                assert mount['readOnly'] and 'subPath' not in mount, (name, mount)
        startup = container['startupProbe']
        assert startup['periodSeconds'] * startup['failureThreshold'] == 3600
        assert stateful['volumeClaimTemplates'][0]['spec']['accessModes'] == ['ReadWriteOncePod']
        addresses = [document['data']['BALLAST_SERVERS'] for document in of_kind(documents, 'ConfigMap')
                     if document['metadata']['name'] == 'ballast-servers'][0].split(',')
        assert addresses == [f'ballast-{i}.ballast.train.svc:7070' for i in range(stateful['replicas'])]
    # Memory: the budget and the overhead, whatever the units.
    for dram, mebibytes in [('512MiB', 4608), ('1GiB', 5120), ('2TiB', 2101248), ('1KiB', 4097)]:
        container = of_kind(render(merged(BASE, {'budget': {'dram': dram}})), 'StatefulSet')[0]['spec']['template']['spec']['containers'][0]
        assert container['resources']['limits']['memory'] == f'{mebibytes}Mi', (dram, container['resources'])


def test_every_configured_key_is_known_to_ballastd():
    """Environment of the rendered pod, given to the real ballastd, which refuses keys and values that it does not know."""
    ops.need(ops.HELM, ops.BIN / 'ballastd')
    values = merged(BASE, {'budget': {'dram': '64MiB', 'nvme': '256MiB'}, 'resources': {'cpu': 1},
                           'config': {'staging': '8MiB', 'read_threads': 2, 'log_level': 'debug', 'import_rate': '1GiB'}})
    container = of_kind(render(values), 'StatefulSet')[0]['spec']['template']['spec']['containers'][0]
    environment = {entry['name']: entry.get('value', 'ballast-0') for entry in container['env']}
    command = [ops.BIN / 'ballastd', *container['args'][:-1], 'data']
    # Kubernetes sets such a variable where a Service is called ballast, and ballastd passes it over.
    server = ops.start(*command, log='log', env={**environment, 'BALLAST_PORT': 'tcp://10.0.0.1:7070'})
    ops.wait_for(lambda: 'ballastd ready' in open('log').read(), 'ballastd ready')
    server.terminate()
    ops.ended(server, 'log')
    refused = ops.run(*command, fails=True, env={**environment, 'BALLAST_PROT': '1'})
    assert 'BALLAST_PROT' in refused, refused


def issue(folder, ca, name, alternative):
    """folder/name/{tls.crt,tls.key} by the CA folder/ca/{ca.crt,ca.key}, made where it is not there yet."""
    new = ['openssl', 'req', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes']
    for directory in (folder / ca, folder / name):
        directory.mkdir(parents=True, exist_ok=True)
    if not (folder / ca / 'ca.crt').exists():
        ops.run(*new, '-x509', '-keyout', folder / ca / 'ca.key', '-out', folder / ca / 'ca.crt', '-days', '2', '-subj', f'/CN={ca}')
    ops.run(*new, '-keyout', folder / name / 'tls.key', '-out', 'csr', '-subj', f'/CN={name}')
    with open('ext', 'w') as file:
        file.write(f'subjectAltName={alternative}\nextendedKeyUsage=serverAuth,clientAuth\n')
    ops.run('openssl', 'x509', '-req', '-in', 'csr', '-CA', folder / ca / 'ca.crt', '-CAkey', folder / ca / 'ca.key', '-CAcreateserial',
            '-days', '2', '-extfile', 'ext', '-out', folder / name / 'tls.crt')


def test_tls_of_the_rendered_pod():
    """Files where the pod has them, the pod's environment, its probes and the PodMonitor's certificate: the real ballastd answers."""
    ops.need(ops.HELM, ops.BIN / 'ballastd', 'openssl')
    values = merged(BASE, SECURE, {'budget': {'dram': '64MiB', 'nvme': '256MiB'}, 'resources': {'cpu': 1}, 'metrics': {'podMonitor': True}})
    documents = render(values)
    pod = of_kind(documents, 'StatefulSet')[0]['spec']['template']['spec']
    container, folder = pod['containers'][0], ops.pathlib.Path('etc').resolve()
    monitor = of_kind(documents, 'PodMonitor')[0]['spec']['podMetricsEndpoints'][0]
    name = monitor['tlsConfig']['serverName']
    issue(folder, 'client-ca', 'tls', 'DNS:*.ballast.train.svc,DNS:localhost,IP:127.0.0.1')
    issue(folder, 'client-ca', 'scrape', 'URI:spiffe://t/prometheus')
    for path, text in [('rights/rights.yaml', 'rights: []\n'), ('tokens/tokens.yaml', 'tokens: []\n'), ('import-token/token', 'x'),
                       ('server-ca/ca.crt', (folder / 'client-ca' / 'ca.crt').read_text())]:
        (folder / path).parent.mkdir()
        (folder / path).write_text(text)
    environment = {entry['name']: entry.get('value', 'ballast-0').replace('/etc/ballast', str(folder))
                   .replace('$(BALLAST_SERVER_ID)', 'ballast-0') for entry in container['env']}
    server = ops.start(ops.BIN / 'ballastd', *container['args'][:-1], 'data', log='log', env=environment)
    ops.wait_for(lambda: 'ballastd ready' in open('log').read(), 'ballastd ready')

    def get(path, context):
        with socket.create_connection(('127.0.0.1', 9070), 60) as plain, context.wrap_socket(plain, server_hostname=name) as connection:
            connection.sendall(f'GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n'.encode())
            answer = b''
            while piece := connection.recv(65536):
                answer += piece
            return int(answer.split()[1]), answer.decode()
    kubelet = ssl._create_unverified_context()
    for probe in ('startup', 'liveness', 'readiness'):
        assert get(container[f'{probe}Probe']['httpGet']['path'], kubelet)[0] == 200
    prometheus = ssl.create_default_context(cafile=folder / 'client-ca' / 'ca.crt')
    assert get(monitor['path'], prometheus)[0] == 403
    prometheus.load_cert_chain(folder / 'scrape' / 'tls.crt', folder / 'scrape' / 'tls.key')
    assert get(monitor['path'], prometheus)[0] == 200
    assert 'etcd-ca/ca.crt' in open('log').read(), 'etcd is not here, nor its files: a warning, and the server serves'
    server.terminate()
    ops.ended(server, 'log')


def lost(sent, kept, path=''):
    """Fields of `sent` that a model of the CRD did not keep."""
    if isinstance(sent, dict):
        for key, value in sent.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f'{path}.{key}'
            else:
                yield from lost(value, kept[key], f'{path}.{key}')
    elif isinstance(sent, list):
        for index, value in enumerate(sent):
            yield from lost(value, kept[index] if index < len(kept or []) else None, f'{path}[{index}]')


def test_monitoring():
    """Monitors, rules and dashboards: valid CRDs, contents as in the files, nothing where there are no files."""
    ops.need(ops.HELM)
    from cloudcoil.models.prometheus_operator import v1
    chart = shutil.copytree(CHART, 'chart', ignore=shutil.ignore_patterns('files'))
    values = merged(BASE, MATRIX[2][1])
    assert not of_kind(render(values, chart), 'PrometheusRule')
    alert = {'alert': 'BallastServerDown', 'expr': 'up{job="ballast"} == 0', 'for': '1m', 'labels': {'severity': 'critical'},
             'annotations': {'summary': '{{ $labels.instance }} is down'}}
    files = {'boards/one_two.json': '{"title": "{{ $labels.tier }} \\"quoted\\"", "panels": []}',
             'ballast.rules.yml': yaml.safe_dump({'groups': [{'name': 'ballast', 'rules': [alert]}]})}
    for name, text in files.items():
        (ops.pathlib.Path(chart) / 'files' / name).parent.mkdir(parents=True, exist_ok=True)
        (ops.pathlib.Path(chart) / 'files' / name).write_text(text)
    documents = render(values, chart)
    board = [document for document in of_kind(documents, 'ConfigMap') if 'board' in document['metadata']['name']][0]
    assert board['metadata']['labels']['grafana_dashboard'] == '1' and board['metadata']['name'] == 'ballast-board-one-two'
    assert board['data'] == {'one_two.json': files['boards/one_two.json']}
    rule, monitor = of_kind(documents, 'PrometheusRule')[0], of_kind(documents, 'PodMonitor')[0]
    assert rule['spec'] == yaml.safe_load(files['ballast.rules.yml'])
    assert rule['metadata']['labels']['release'] == monitor['metadata']['labels']['release'] == 'prometheus'
    pod = of_kind(documents, 'StatefulSet')[0]['spec']['template']
    assert monitor['spec']['selector']['matchLabels'].items() <= pod['metadata']['labels'].items()
    assert monitor['spec']['podMetricsEndpoints'][0]['port'] in [port['name'] for port in pod['spec']['containers'][0]['ports']]
    # The chart of the tree carries its boards and alerts.
    real = render(values)
    boards = [document for document in of_kind(real, 'ConfigMap') if 'board' in document['metadata']['name']]
    assert len(boards) == len(list((ops.DEPLOY / 'grafana' / 'boards').glob('*.json'))) > 0
    assert of_kind(real, 'PrometheusRule')[0]['spec'] == yaml.safe_load((ops.DEPLOY / 'prometheus' / 'ballast.rules.yml').read_text())
    by_tls = of_kind(render(merged(values, SECURE)), 'PodMonitor')[0]
    assert by_tls['spec']['podMetricsEndpoints'][0]['tlsConfig']['keySecret'] == {'name': 'scrape', 'key': 'tls.key'}
    for model, document in [(v1.PrometheusRule, of_kind(real, 'PrometheusRule')[0]), (v1.PrometheusRule, rule), (v1.PodMonitor, monitor),
                            (v1.PodMonitor, by_tls)]:
        def kept(sent, model=model):
            return json.loads(model.model_validate(sent).model_dump_json(by_alias=True, exclude_none=True))
        assert not list(lost(document, kept(document))), list(lost(document, kept(document)))
        wrong = dict(document, spec=dict(document['spec'], podMetricEndpoints=1))
        assert list(lost(wrong, kept(wrong))), 'a misspelt field passed'


def test_copies():
    """Trainers find servers of jobs with copies in etcd; servers reach each other; as many may be away as leave a copy."""
    ops.need(ops.HELM)
    for copies, away in [(1, 1), (2, 1), (3, 2)]:
        documents = render(merged(BASE, ETCD, {'copies': copies}))
        assert of_kind(documents, 'PodDisruptionBudget')[0]['spec']['maxUnavailable'] == away
        found = [document['data']['BALLAST_SERVERS'] for document in of_kind(documents, 'ConfigMap')]
        assert found == (['etcd://etcd:2379/train/ballast?servers=3'] if copies > 1 else
                         [','.join(f'ballast-{i}.ballast.train.svc:7070' for i in range(3))])
        pod = of_kind(documents, 'StatefulSet')[0]['spec']['template']['metadata']['labels']
        grpc = next(rule for rule in of_kind(documents, 'NetworkPolicy')[0]['spec']['ingress'] if rule['ports'] == [{'port': 'grpc'}])
        let_in = [peer['podSelector']['matchLabels'] for peer in grpc['from']]
        assert let_in[0] == {'ballast.io/client': 'true'} and let_in[1] and let_in[1].items() <= pod.items(), let_in


class Cluster(http.server.ThreadingHTTPServer):
    """An API server of a few lines, which knows the resources of the chart, and one running StatefulSet."""

    def __init__(self, stateful):
        owner = {'labels': {'app.kubernetes.io/managed-by': 'Helm'},
                 'annotations': {'meta.helm.sh/release-name': 'ballast', 'meta.helm.sh/release-namespace': 'train'}}
        stateful = merged(stateful, {'metadata': {'namespace': 'train', **owner}})
        kinds = {'v1': ['Service', 'ConfigMap'], 'apps/v1': ['StatefulSet'], 'policy/v1': ['PodDisruptionBudget'], 'batch/v1': ['Job'],
                 'networking.k8s.io/v1': ['NetworkPolicy']}
        groups = [{'name': version[:-3], 'versions': [{'groupVersion': version, 'version': 'v1'}]} for version in kinds if '/' in version]
        answers = {'/version': {'major': '1', 'minor': '33', 'gitVersion': 'v1.33.0'}, '/api': {'kind': 'APIVersions', 'versions': ['v1']},
                   '/apis': {'kind': 'APIGroupList', 'apiVersion': 'v1', 'groups': groups},
                   '/apis/apps/v1/namespaces/train/statefulsets/ballast': stateful}
        for version, names in kinds.items():
            resources = [{'name': name.lower().replace('policy', 'policie') + 's', 'singularName': name.lower(), 'namespaced': True,
                          'kind': name, 'verbs': ['get']} for name in names]
            answers[f'/api{"s" * ("/" in version)}/{version}'] = {'kind': 'APIResourceList', 'groupVersion': version,
                                                                  'resources': resources}

        class Api(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.split('?')[0]
                missing = {'kind': 'Status', 'status': 'Failure', 'reason': 'NotFound', 'code': 404}
                self.send_response(200 if path in answers else 404)
                self.send_header('Content-Type', 'application/json')
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(path, missing)).encode())

            def log_message(self, *arguments):
                pass

        super().__init__(('127.0.0.1', 0), Api)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.extra = ['--dry-run=server', '--kube-apiserver', f'http://127.0.0.1:{self.server_port}', '--disable-openapi-validation']

    def upgrade(self, values, release='ballast', fails=False):
        """What an upgrade to `values` renders; of a release of another name: an installation."""
        return render(merged(BASE, values), release=release, fails=fails, extra=self.extra)


def test_fewer_servers_are_asked_first():
    """An upgrade to fewer servers runs `ballastctl status --unused` with those that would go, before it changes anything."""
    ops.need(ops.HELM)
    import kubernetes_validate
    old = of_kind(render(merged(BASE, {'servers': 5, 'image': {'tag': 'old', 'pullSecrets': ['s']}})), 'StatefulSet')[0]
    cluster = Cluster(old)
    for values in ({'servers': 5}, {'servers': 6}):
        documents = cluster.upgrade(values)
        assert not of_kind(documents, 'Job') and of_kind(documents, 'StatefulSet')[0]['spec']['replicas'] == values['servers']
    assert not of_kind(cluster.upgrade({'servers': 2}, release='ballast-2'), 'Job'), 'a new release is free to choose'
    assert 'expected tls.serverCaSecret' in cluster.upgrade({'servers': 3, 'tls': {'secret': 'a'}}, fails=True)

    for values in ({'servers': 3}, merged({'servers': 3}, SECURE)):
        documents = cluster.upgrade(values)
        hook, = of_kind(documents, 'Job')
        for version in KUBERNETES:
            kubernetes_validate.validate(hook, version, strict=True)
        assert hook['metadata']['annotations']['helm.sh/hook'] == 'pre-upgrade' and hook['spec']['backoffLimit'] == 0
        labels, pod = hook['spec']['template']['metadata']['labels'], hook['spec']['template']['spec']
        assert labels == {'ballast.io/client': 'true'} and pod['restartPolicy'] == 'Never'
        container, = pod['containers']
        assert (container['image'], pod['imagePullSecrets']) == ('registry.example/ballast:old', [{'name': 's'}])
        assert container['command'] == ['/usr/bin/ballastctl'] and container['args'][:2] == ['status', '--unused']
        assert '--servers=ballast-3.ballast.train.svc:7070,ballast-4.ballast.train.svc:7070' in container['args']
        files = re.findall(r'/etc/ballast/\S+', ' '.join(container['args']))
        assert files == ([f'/etc/ballast/{file}' for file in ('server-ca/ca.crt', 'tls/tls.crt', 'tls/tls.key', 'import-token/token')]
                         if 'tls' in values else [])
        mounts = {mount['mountPath']: mount for mount in container.get('volumeMounts', [])}
        assert set(mounts) == {file.rpartition('/')[0] for file in files} and all(mount['readOnly'] for mount in mounts.values())
        assert {volume['name'] for volume in pod.get('volumes', [])} == {mount['name'] for mount in mounts.values()}

    # The command as it is, at two servers of which one gets a job.
    ops.need(ops.BIN / 'ballastd', ops.BIN / 'train_bytes_lm')
    for number in range(2):
        ops.start(ops.BIN / 'ballastd', '--server_id', f'ballast-{3 + number}', '--listen', f'127.0.0.1:{7070 + number}',
                  '--metrics_listen', f'127.0.0.1:{9070 + number}', '--data_directory', f'data{number}', '--budget.dram', '64MiB',
                  '--budget.nvme', '256MiB', log=f'log{number}')
        ops.wait_for(lambda number=number: 'ballastd ready' in open(f'log{number}').read(), 'ballastd ready')
    hook, = of_kind(cluster.upgrade({'servers': 3}), 'Job')
    local = {f'ballast-{3 + number}.ballast.train.svc:7070': f'127.0.0.1:{7070 + number}' for number in range(2)}
    command = [ops.BIN / 'ballastctl', *hook['spec']['template']['spec']['containers'][0]['args']]
    command = [re.sub('|'.join(map(re.escape, local)), lambda found: local[found[0]], str(word)) for word in command]
    assert ops.run(*command) == ''.join(f'{address}: has no job\n' for address in local.values())
    ops.run(*ops.trainer('127.0.0.1:7071', '--stop-at', '2'))
    said = ops.run(*command, fails=True)
    assert re.fullmatch(r"127.0.0.1:7070: has no job\n127.0.0.1:7071: has \d+ chunks of job '.*': `ballastctl drop --job .*`\n", said), said


def test_boards_and_rules():
    """The chart has the boards and rules of deploy/grafana and deploy/prometheus, as they are."""
    ops.need(ops.HELM)
    documents = render(merged(BASE, {'metrics': {'rules': True, 'dashboards': True}}))
    boards = {name: text for document in of_kind(documents, 'ConfigMap') if 'grafana_dashboard' in document['metadata'].get('labels', {})
              for name, text in document['data'].items()}  # fmt: skip
    assert boards == {path.name: path.read_text() for path in (ops.DEPLOY / 'grafana' / 'boards').glob('*.json')}
    rules = [document['spec'] for document in of_kind(documents, 'PrometheusRule')]
    assert rules == [yaml.safe_load((ops.DEPLOY / 'prometheus' / 'ballast.rules.yml').read_text())]
