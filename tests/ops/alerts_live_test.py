"""Alerts by their faults: state servers in training, the rules with their times divided by 60, a real Alertmanager, a webhook.

Each alert must arrive firing after its fault and resolved after the fault has ended. Of section "alerts" these are tested by
promtool alone (alerts_test.py), for the reason that BY_PROMTOOL gives.
"""

import os
import pathlib
import re
import select
import shutil
import signal
import socket
import threading
import time

import faults
import ops
import watched
import yaml

BY_PROMTOOL = {
    'BallastUneven': 'needs an hour of real time, and servers that were added to a job',
    'BallastVersionSkew': 'needs two versions of Ballast',
    'BallastCopiesMissing': 'needs etcd and a job with copies (tests/e2e/members_test loses servers of one)',
    'BallastReplicasDiffer': 'needs etcd, a job with copies and damaged memory (tests/services/differing_copies_test damages a copy)',
    'BallastChunksDamaged': 'needs etcd, a job with copies and a disk that rots (tests/services/members_damage_test damages one)',
    'BallastFillStuck': 'needs etcd and a job with copies whose servers may not copy',
    'BallastScrubDamage': 'needs a disk that rots in training (tests/services/scrub_test damages one)',
    'BallastLogFull': 'the log of a job is reserved so large that a slow disk holds steps up elsewhere first (test_disks: no push waited)',
}  # fmt: skip


class Watch:
    """Monitoring of `servers`, which knows what has fired since a fault."""

    def __init__(self, servers, faster=watched.FASTER):
        self.monitoring = watched.Monitoring(servers, watched.fast_rules(faster))
        self.value, self.hook = self.monitoring.value, self.monitoring.hook

    def version(self, job, *trainers):
        watched.check_alive(*trainers)
        version = self.value(f'min(ballast_job_committed_version{{training_job="{job}"}})')
        return -1 if version is None else version

    def trains(self, job, *trainers, steps=3):
        goal = self.version(job) + steps
        ops.wait_for(lambda: self.version(job, *trainers) >= goal, f'step {goal} of {job}')

    def fires(self, *alerts, since, severity=None, seconds=150):
        for alert in alerts:
            event = ops.wait_for(lambda alert=alert: self.hook.seen(alert, 'firing', severity, since), f'{alert} fires', seconds)[0]
            assert 'error expanding' not in str(event[3]), event
            print(f'{alert} fired after {event[0] - since:.1f} s: {event[3]["summary"]} {event[3]["description"]}')

    def resolves(self, *alerts, since, seconds=150):
        for alert in alerts:
            event = ops.wait_for(lambda alert=alert: self.hook.seen(alert, 'resolved', None, since), f'{alert} is resolved', seconds)[0]
            print(f'{alert} was resolved after {event[0] - since:.1f} s')

    def silent(self, *alerts):
        fired = [event for alert in alerts for event in self.hook.seen(alert)]
        assert not fired, fired


def test_servers():
    """kill -9; a long recovery; a server on an old copy of its directory; a stopped trainer."""
    ops.need(ops.BIN / 'train_bytes_lm')
    disk = faults.SlowDisk()
    servers = [watched.Server(0).start(), watched.Server(1).start(*disk.into)]
    watch = Watch(servers)
    trainers = [watched.trainer(servers, 'demo', rank=rank, ranks=2) for rank in range(2)]
    ops.wait_for(lambda: watch.version('demo', *trainers) >= 3, 'training')

    began = time.monotonic()
    servers[1].kill()
    shutil.copytree(servers[1].folder, 'old')
    watch.fires('BallastServerDown', since=began)
    servers[1].start()
    watch.resolves('BallastServerDown', since=began)
    watch.trains('demo', *trainers, steps=30)

    began = time.monotonic()
    trainers[1].send_signal(signal.SIGSTOP)
    watch.fires('BallastTrainingStalled', since=began)
    trainers[1].send_signal(signal.SIGCONT)
    watch.resolves('BallastTrainingStalled', since=began)
    watch.trains('demo', *trainers)

    watched.end(*trainers)
    began = time.monotonic()
    servers[1].kill()
    newest, servers[1].arguments = servers[1].arguments, ['old' if word == servers[1].folder else word for word in servers[1].arguments]
    disk.limit(bytes_per_second=1 << 20)
    servers[1].start(*disk.into, wait=False)
    watch.fires('BallastServerRecovering', since=began)
    disk.limit()
    servers[1].wait()
    watch.resolves('BallastServerRecovering', since=began)
    watch.fires('BallastVersionsApart', since=began)
    servers[1].kill()
    servers[1].arguments = newest
    servers[1].start()
    watch.resolves('BallastVersionsApart', since=began)


def test_jobs():
    """Damage; a lost state; gradients that are not finite; a rank with a slow uplink."""
    ops.need(ops.BIN / 'train_bytes_lm')
    # Two servers that jobs do not share: one is damaged, one goes on.
    servers = [watched.Server(0).start(), watched.Server(1, budget='--budget.dram 24MiB --budget.nvme 256MiB --staging 4MiB').start()]
    watch = Watch(servers)
    uplink = faults.SlowUplink(servers[1:])
    lag = [watched.trainer(to, 'lag', rank=rank, ranks=2) for rank, to in enumerate((servers[1:], uplink.addresses))]
    demo = watched.trainer(servers[:1], 'demo')
    ops.wait_for(lambda: watch.version('demo', demo) >= 30 and watch.version('lag', *lag) >= 3, 'training')
    watch.silent('BallastStraggler', 'BallastSkippedSteps')

    began_lag = time.monotonic()
    uplink.bytes_per_second = 1 << 20
    nan = watched.trainer(servers[1:], 'nan', '--lr', '1e30', '--warmup', '0', '--durability', 'none')
    watch.fires('BallastSkippedSteps', since=began_lag)
    watched.end(nan)

    # The damage that is repaired, then damage that is not.
    watched.end(demo)
    began = time.monotonic()
    servers[0].kill()
    assert faults.damage_copies(servers[0].folder / 'log-demo') > 0
    servers[0].start()
    watch.fires('BallastDataRepaired', since=began)
    demo = watched.trainer(servers[:1], 'demo')
    watch.trains('demo', demo)
    end = time.monotonic() + 120
    while watch.value('ballast_job_failed{training_job="demo"}') != 1:  # a version that no step reads again is damaged in vain
        assert time.monotonic() < end, f'damage was not found: {pathlib.Path("demo0.log").read_text()[-500:]}'
        faults.damage_all(servers[0].folder / 'nvme.tier')
        time.sleep(0.5)
    watch.fires('BallastJobFailed', since=began)
    watched.end(demo)
    ops.run(ops.BIN / 'ballastctl', 'drop', '--job', 'demo', '--servers', servers[0].listen)
    watch.resolves('BallastJobFailed', since=began)
    watch.fires('BallastStraggler', since=began_lag)
    uplink.bytes_per_second = 0
    watch.resolves('BallastStraggler', 'BallastSkippedSteps', since=began_lag)
    watched.end(*lag)

    began = time.monotonic()
    servers[1].kill()
    servers[1].start()
    watch.fires('BallastStateLost', since=began)
    ops.run(ops.BIN / 'ballastctl', 'drop', '--job', 'nan', '--servers', servers[1].listen)
    watch.resolves('BallastStateLost', 'BallastDataRepaired', since=began)


def test_disks():
    """A slow disk; a disk that fills; a trainer that is started again and again while the disk is full."""
    ops.need(ops.BIN / 'train_bytes_lm')
    disk, small = faults.SlowDisk(), faults.Disk('small', 200)
    servers = [watched.Server(0).start(*disk.into), watched.Server(1, small.folder / 'data').start()]
    watch = Watch(servers)
    trainer = watched.trainer(servers[:1], 'demo')
    ops.wait_for(lambda: watch.version('demo', trainer) >= 30, 'training')
    watch.silent('BallastDiskSlow', 'BallastSlowerThanPlanned', 'BallastDiskFull', 'BallastErrors', 'BallastBusy')

    began = time.monotonic()
    disk.limit(operations_per_second=40)
    small.fill(free=0.1)
    refused, end = [], began + 150
    while not (watch.hook.seen('BallastErrors') and watch.hook.seen('BallastDiskFull')):
        assert time.monotonic() < end, watch.hook.events
        small.fill(free=max(0, 0.1 - 0.01 * (time.monotonic() - began)))
        refused.append(watched.trainer(servers[1:], f'late{len(refused)}'))
        time.sleep(1)
    watch.fires('BallastDiskFull', 'BallastErrors', 'BallastDiskSlow', 'BallastSlowerThanPlanned', since=began)
    small.empty()
    watched.end(*refused)
    disk.limit()
    watch.resolves('BallastDiskFull', 'BallastErrors', 'BallastDiskSlow', 'BallastSlowerThanPlanned', since=began)
    watch.silent('BallastLogFull')


def test_machine():
    """A kernel that refuses io_uring, as container engines do, and a small limit of locked memory; clients whose deadlines pass."""
    ops.need(ops.BIN / 'train_bytes_lm', 'curl', 'setpriv')
    servers = [watched.Server(0).start(*faults.LITTLE_MEMLOCK, preexec_fn=faults.without_io_uring)]
    began = time.monotonic()
    watch = Watch(servers)
    trainer = watched.trainer(servers, 'demo')  # memory is taken, and locked, for jobs
    watch.trains('demo', trainer)
    watch.fires('BallastIoFallback', 'BallastMemoryNotLocked', since=began)
    watch.silent('BallastBusy')

    # Pulls of a version that is far away, with a deadline of 0.2 s: reason BUSY.
    end = time.monotonic() + 150
    while not watch.hook.seen('BallastBusy'):
        assert time.monotonic() < end, watch.hook.events
        faults.pull(servers[0].listen, 'demo', 1 << 40)
    watch.fires('BallastBusy', since=began)

    servers[0].kill()
    servers[0].start()
    watch.trains('demo', trainer)
    watch.resolves('BallastIoFallback', 'BallastMemoryNotLocked', 'BallastBusy', since=began)
    watched.end(trainer)


def test_tls():
    """A certificate that ends soon, then a key of another certificate."""
    ops.need('openssl')
    faults.certificate('tls', days=1)
    server = watched.Server(0, more=['--tls.certificate', 'tls/tls.crt', '--tls.key', 'tls/tls.key']).start()
    began = time.monotonic()
    watch = Watch([server], faster=180)  # these alerts look at half an hour: 10 scrapes
    watch.fires('BallastCertificateExpires', since=began, severity='critical')
    watch.fires('BallastCertificateExpires', since=began, severity='warning')
    faults.certificate('tls', days=365)
    watch.resolves('BallastCertificateExpires', since=began)
    watch.silent('BallastTlsReloadFailed')
    faults.certificate('tls', days=365, pair=False)
    watch.fires('BallastTlsReloadFailed', since=began)
    faults.certificate('tls', days=365)
    watch.resolves('BallastTlsReloadFailed', since=began)


def test_limits():
    """Connections near their limit; nobody reads the log."""
    ops.need(ops.BIN / 'train_bytes_lm')
    os.mkfifo('stderr')
    reader = os.open('stderr', os.O_RDWR | os.O_NONBLOCK)  # reads nothing at first
    server = watched.Server(0, more=['--connections', '40', '--log_level', 'trace'])
    server.start('sh', '-c', 'exec "$@" 2> stderr', 'sh', env={**os.environ, 'GRPC_VERBOSITY': 'debug', 'GRPC_TRACE': 'http,api'})
    watch = Watch([server])
    demo = watched.trainer([server], 'demo')
    began = time.monotonic()
    watch.fires('BallastLogLinesDropped', since=began)
    watch.trains('demo', demo)
    watch.silent('BallastLimitNear')
    reading = threading.Thread(target=drain, args=(reader,), daemon=True)
    reading.start()
    watch.resolves('BallastLogLinesDropped', since=began)

    host, port = server.listen.split(':')
    held = [socket.create_connection((host, int(port))) for _ in range(33)]
    watch.fires('BallastLimitNear', since=began)
    watch.trains('demo', demo)
    for connection in held:
        connection.close()
    watch.resolves('BallastLimitNear', since=began)


def drain(pipe):
    """Reads whatever comes, until the test's process ends."""
    while True:
        select.select([pipe], [], [])
        os.read(pipe, 1 << 20)


def test_complete():
    """Every alert is fired by a fault here, or is in BY_PROMTOOL with its reason."""
    text = pathlib.Path(__file__).read_text()
    fired = set(re.findall(r"'(Ballast\w+)'", ' '.join(re.findall(r'watch\.fires\(.*', text))))
    resolved = set(re.findall(r"'(Ballast\w+)'", ' '.join(re.findall(r'watch\.resolves\(.*', text))))
    groups = yaml.safe_load((watched.PROMETHEUS / 'ballast.rules.yml').read_text())['groups']
    alerts = {rule['alert'] for group in groups for rule in group['rules']}
    assert fired == resolved, fired ^ resolved
    assert fired | BY_PROMTOOL.keys() == alerts, (fired | BY_PROMTOOL.keys()) ^ alerts
    assert not fired & BY_PROMTOOL.keys()
