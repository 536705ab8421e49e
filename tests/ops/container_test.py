"""The image of deploy/image run by podman, and the chart's own pod played by podman: no Kubernetes is needed for either."""
import json
import pathlib
import re

import chart_test
import containers
import ops
import yaml

ARCHIVE = ops.CACHE / 'image' / 'ballast.oci.tar'
PROFILE = ops.DEPLOY / 'seccomp' / 'ballast.json'
ENGINES_DEFAULT = pathlib.Path('/usr/share/containers/seccomp.json')
SERVERS = '127.0.0.1:7070'


def engine(**options):
    ops.need(ARCHIVE, ops.BIN / 'train_bytes_lm')
    podman = containers.Podman(**options)
    podman('load', '--quiet', '--input', ARCHIVE)
    return podman, podman('images', '--format', '{{.Repository}}:{{.Tag}}').split()[0]


def answers():
    return ops.http('http://127.0.0.1:9070/readyz')[0] == 200


def backend():
    """'io_uring', or 'threads' with the reason, as `ballastctl status` says."""
    text = ops.run(ops.BIN / 'ballastctl', 'status', '--servers', SERVERS)
    line = next(line for line in text.splitlines() if line.strip().startswith(SERVERS))
    return line.split('0.1.0', 1)[1].strip()


def test_containerfile():
    hadolint = ops.CACHE / 'venv' / 'bin' / 'hadolint'
    ops.need(hadolint)
    ops.run(hadolint, ops.DEPLOY / 'image' / 'Containerfile')


def test_image():
    """The archive says who runs what; the image holds the programs, their libraries and the licences, and no shell."""
    ops.need('skopeo', ARCHIVE)
    configuration = json.loads(ops.run('skopeo', 'inspect', '--config', f'oci-archive:{ARCHIVE}'))['config']
    assert configuration['User'] == '65532:65532' and configuration['Entrypoint'] == ['/usr/bin/ballastd'], configuration
    assert '/var/lib/ballast' in configuration['Volumes'], configuration
    podman, image = engine()
    podman('create', '--name', 'look', image)
    podman('cp', 'look:/', 'files')
    files = {str(path.relative_to('files')) for path in pathlib.Path('files').rglob('*')}
    assert {'usr/bin/ballastd', 'usr/bin/ballastctl', 'usr/share/doc/ballast/LICENSE', 'usr/share/doc/libgrpc29/copyright'} <= files
    assert not [name for name in files if re.search(r'(^|/)(sh|bash|busybox|apt|python3?)$', name)], files
    assert 'Usage' in podman('run', '--rm', '--entrypoint', '/usr/bin/ballastctl', image, '--help')


def test_profile():
    """Our profile is the engine's default for a container without capabilities, and io_uring."""
    ops.need(ENGINES_DEFAULT)
    assert PROFILE.read_text() == ops.run(ops.DEPLOY / 'seccomp' / 'generate.py', ENGINES_DEFAULT), 'run deploy/seccomp/generate.py'
    ours, default = json.loads(PROFILE.read_text()), json.loads(ENGINES_DEFAULT.read_text())

    def allowed(profile):
        return {name for rule in profile['syscalls'] if rule['action'] == 'SCMP_ACT_ALLOW' for name in rule['names']}
    assert allowed(ours) - allowed(default) == {'io_uring_setup', 'io_uring_enter', 'io_uring_register'}
    privileged = {name for rule in default['syscalls'] if (rule.get('includes') or {}).get('caps') for name in rule['names']}
    privileged -= {'socket', 'setns'}  # of these, some forms are allowed to everybody
    assert {'bpf', 'init_module', 'settimeofday'} <= privileged and not privileged & allowed(ours), privileged & allowed(ours)
    assert ours['defaultAction'] == default['defaultAction'] == 'SCMP_ACT_ERRNO'


def runs_and_trains(podman, image, *options):
    """Trains to the same bits in a hardened container; returns (backend, /proc/PID/status of the server)."""
    pathlib.Path('state').mkdir()
    ops.run('chown', '65532:65532', 'state')
    podman('run', '--detach', '--name', 'server', '--network', 'host', '--read-only', '--cap-drop', 'all',
           '--security-opt', 'no-new-privileges', '--volume', f'{pathlib.Path("state").absolute()}:/var/lib/ballast',
           '--env', 'BALLAST_BUDGET_DRAM=64MiB',
           '--env', 'BALLAST_BUDGET_NVME=512MiB', *options, image)
    try:
        ops.wait_for(answers, 'the server answers')
    except AssertionError:
        print(podman('logs', 'server'))
        raise
    pid = podman('inspect', '--format', '{{.State.Pid}}', 'server').strip()
    held, how = pathlib.Path(f'/proc/{pid}/status').read_text(), backend()
    ops.run(*ops.trainer(SERVERS, '--job', 'container', '--dump-master', 'got'))
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    podman('stop', '--time', '20', 'server')
    assert podman('inspect', '--format', '{{.State.ExitCode}}', 'server').strip() == '0', podman('logs', 'server')
    for line in ('Uid:\t65532\t65532', 'CapEff:\t0000000000000000', 'CapBnd:\t0000000000000000', 'NoNewPrivs:\t1', 'Seccomp:\t2'):
        assert line in held, (line, held)
    return how


def test_default_profile():
    """Engines forbid io_uring: the server says so and goes on with threads."""
    how = runs_and_trains(*engine())
    print(how)
    assert how.startswith('threads'), how


def test_our_profile():
    how = runs_and_trains(*engine(), '--security-opt', f'seccomp={PROFILE}')
    assert how == 'io_uring', how


def test_little_locked_memory():
    """64 KiB of locked memory, a container's usual limit: io_uring works all the same."""
    podman, image = engine(ulimits=['memlock=65536:65536'])
    how = runs_and_trains(podman, image, '--security-opt', f'seccomp={PROFILE}')
    assert how.startswith('io_uring'), how


def test_memory_limit():
    """A limit below the budget: the doctor and the server name both, and the server does not start, so that the kernel kills nobody in
    the middle of training. A limit above the budget, without room for overload, is told, and a job trains."""
    podman, image = engine()
    little = ['--memory', '48m', '--env', 'BALLAST_BUDGET_DRAM=64MiB', '--env', 'BALLAST_BUDGET_NVME=512MiB']
    says = r'48\.0 MiB by \S+/memory\.\S+'
    doctor = podman('run', '--rm', *little, '--env', 'BALLAST_DATA_DIRECTORY=/var/lib/ballast', '--entrypoint', '/usr/bin/ballastctl',
                    image, 'doctor', fails=True)
    assert re.search(f'bad +memory limit +{says}', doctor), doctor
    podman('run', '--detach', '--name', 'little', *little, image)
    ops.wait_for(lambda: 'exited' in podman('inspect', '--format', '{{.State.Status}}', 'little'), 'the server has refused')
    said = podman('logs', 'little')
    assert podman('inspect', '--format', '{{.State.ExitCode}} {{.State.OOMKilled}}', 'little').split() == ['2', 'false'], said
    assert re.search(f'memory limit {says}, wanted 64\\.0 MiB \\(budget.dram\\)', said) and 'raise the limit' in said, said

    runs_and_trains(podman, image, '--memory', '512m')
    said = podman('logs', 'server')
    assert re.search(r'\[warning\] memory limit 512\.0 MiB by \S+, wanted 64\.0 MiB \(budget\.dram\) and 1\.38 GiB', said), said
    assert podman('inspect', '--format', '{{.State.OOMKilled}}', 'server').strip() == 'false'


def chart_pod(image, **values):
    """Writes pod.yaml: the Pod that the chart's StatefulSet makes first. Returns the paths of its probes."""
    repository, tag = image.rsplit(':', 1)
    documents = chart_test.render(chart_test.merged(
        {'image': {'repository': repository, 'tag': tag, 'pullPolicy': 'Never'}, 'budget': {'dram': '64MiB', 'nvme': '512MiB'},
         'resources': {'cpu': 1, 'memoryOverhead': '512MiB'}}, values))
    stateful = chart_test.of_kind(documents, 'StatefulSet')[0]
    template = stateful['spec']['template']
    pod = {'apiVersion': 'v1', 'kind': 'Pod', 'metadata': dict(template['metadata'], name=stateful['metadata']['name'] + '-0'),
           'spec': template['spec']}
    for claim in stateful['spec']['volumeClaimTemplates']:
        name = claim['metadata']['name']
        pod['spec'].setdefault('volumes', []).append({'name': name, 'persistentVolumeClaim': {'claimName': f'{name}-ballast-0'}})
    # podman maps no ports of a pod in the host's network, which here is the test's own.
    pod['spec']['hostNetwork'] = True
    del pod['spec']['containers'][0]['ports']
    # Podman 4.3 reads the annotation that came before the field seccompProfile.
    profile = pod['spec']['securityContext']['seccompProfile']
    if profile['type'] == 'Localhost':
        pod['metadata']['annotations']['seccomp.security.alpha.kubernetes.io/pod'] = f'localhost/{profile["localhostProfile"]}'
    # podman would turn probes into calls of curl within the image: the test asks what a kubelet asks.
    probes = {kind: pod['spec']['containers'][0].pop(kind + 'Probe')['httpGet']['path'] for kind in ('startup', 'liveness', 'readiness')}
    pathlib.Path('pod.yaml').write_text(yaml.safe_dump(pod))
    return probes


def plays(podman, *options):
    podman('kube', 'play', *options, 'pod.yaml')
    ops.wait_for(answers, "the pod's server answers")


def pod_trains(podman, image, options=(), **values):
    """Trains against the chart's pod, kills the server in mid-run, plays the pod again; returns the backend."""
    chart_pod(image, **values)
    plays(podman, *options)
    how = backend()
    identity = ops.run(ops.BIN / 'ballastctl', 'status', '--servers', SERVERS)
    assert 'ballast-0' in identity, identity  # from metadata.name
    trainer = ops.start(*ops.trainer(SERVERS, '--job', 'pod', '--dump-master', 'got'), log='trainer.log')
    ops.wait_for(lambda: ops.committed(SERVERS) >= 8, 'step 8')
    podman('kill', '--signal', 'KILL', 'ballast-0-ballastd')
    podman('kube', 'down', 'pod.yaml')  # the claim's volume stays
    plays(podman, *options)
    ops.ended(trainer, 'trainer.log')
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    assert 'recovered' in podman('logs', 'ballast-0-ballastd')
    podman('pod', 'stop', '--time', '20', 'ballast-0')
    return how


def test_pod():
    how = pod_trains(*engine())
    assert how.startswith('threads'), how


def test_pod_with_our_profile():
    options = ['--seccomp-profile-root', PROFILE.parent]
    how = pod_trains(*engine(ulimits=['memlock=65536:65536']), options, seccompProfile=PROFILE.name)
    assert how.startswith('io_uring'), how


def test_pod_answers_probes():
    podman, image = engine()
    probes = chart_pod(image)
    plays(podman)  # ready: the path of the startup probe has answered with 200
    got = {kind: ops.http(f'http://127.0.0.1:9070{path}')[0] for kind, path in probes.items()}
    assert set(got.values()) == {200}, got
