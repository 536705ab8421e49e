"""deploy/examples/slurm.sbatch on a SLURM of one node, and slurm_spare.sbatch on one of three, which are one machine.

The first is submitted, cancelled amid the run, and submitted again; the second loses a server. Both end with the same bits.
"""
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess

import ops

SBATCH = ops.DEPLOY / 'examples' / 'slurm.sbatch'
SPARE = ops.DEPLOY / 'examples' / 'slurm_spare.sbatch'
CONFIGURATION = '''
ClusterName=one
SlurmctldHost=node1(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir=/run/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
KillWait=5
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
'''


def cluster(count=1):
    """Starts munge, the controller and the nodes; returns the environment of SLURM's commands."""
    ops.need('munged', 'slurmctld', 'slurmd', 'sbatch', ops.BIN / 'train_bytes_lm')
    folder = pathlib.Path('slurm').absolute()
    (folder / 'controller').mkdir(parents=True)
    names = [f'node{number}' for number in range(1, count + 1)]
    nodes = '\n'.join(f'NodeName={name} NodeAddr=127.0.0.1 Port={17000 + i} CPUs={os.cpu_count()} State=UNKNOWN'
                      for i, name in enumerate(names))
    for name in names:
        os.mkdir(f'/run/{name}')  # paths of sockets are short
    (folder / 'slurm.conf').write_text(CONFIGURATION.format(folder=folder, nodes=nodes))
    pathlib.Path('/etc/hosts').write_text(f'127.0.0.1 localhost {" ".join(names)}\n')  # of this test alone
    (folder / 'cgroup.conf').write_text('CgroupPlugin=cgroup/v1\n')
    key = folder / 'munge.key'
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    os.mkdir('/run/munge', 0o755)
    environment = {**os.environ, 'SLURM_CONF': str(folder / 'slurm.conf'), 'USER': 'root', 'PATH': f'{ops.BIN}:{os.environ["PATH"]}'}
    ops.start('munged', '--foreground', '--force', f'--key-file={key}', f'--log-file={folder}/munged.log', '--pid-file=/run/munge/pid',
              f'--seed-file={folder}/seed', log='munged.out')
    ops.wait_for(lambda: ops.run('munge', '-n', '-s', 'x'), 'munged answers')
    ops.start('slurmctld', '-D', log='slurmctld.out', env=environment)
    for name in names:
        ops.start('slurmd', '-D', '-N', name, log='slurmd.out', env=environment)
    ops.wait_for(lambda: ops.run('sinfo', '-h', '-N', '-o', '%T', env=environment).split() == ['idle'] * count, 'the nodes are idle')
    return environment


def submit(environment, *extra, script=SBATCH, options=()):
    """`extra`: options of sbatch; `options`: of each trainer."""
    trainer = ' '.join(str(word) for word in ops.trainer('$BALLAST_SERVERS', '--job', 'slurm', '--world-size', '$WORLD_SIZE',
                                                         '--rank', '$RANK', '--rendezvous', os.path.abspath('meet'),
                                                         '--dump-master', os.path.abspath('got'), *options))
    text = ops.run('sbatch', '--parsable', '--output', 'job-%j.log', *extra, script, 'bash', '-c', f'exec {trainer}', env=environment)
    return text.strip().splitlines()[-1]


def state(environment, job):
    return re.search(r'JobState=(\w+)', ops.run('scontrol', 'show', 'job', job, env=environment)).group(1)


def log(job):
    path = pathlib.Path(f'job-{job}.log')
    return path.read_text(errors='replace') if path.exists() else ''


def over(environment, job):
    busy = ('PENDING', 'RUNNING', 'COMPLETING')
    try:
        return ops.wait_for(lambda: (now := state(environment, job)) not in busy and now, f'job {job} is over', 200)
    except AssertionError:
        print(log(job), ops.run('squeue', '--steps', env=environment), ops.run('ps', 'f', '-e'))
        raise


def test_cancelled_and_submitted_again():
    environment = dict(cluster(), STATE_DISK=os.path.abspath('disk'), STATE_DRAM='64MiB', STATE_NVME='512MiB')
    first = submit(environment)
    address = f'127.0.0.1:{20000 + int(first) % 10000}'
    try:
        ops.wait_for(lambda: ops.committed(address) >= 8, 'step 8')
    except AssertionError:
        print(log(first))
        raise
    ops.run('scancel', first, env=environment)
    assert over(environment, first) == 'CANCELLED', log(first)
    assert not pathlib.Path('got').exists()
    ops.wait_for(lambda: not ballastds(), 'the servers have ended')

    second = submit(environment)
    assert over(environment, second) == 'COMPLETED', log(second)
    assert 'recovered' in log(second), log(second)
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    ops.wait_for(lambda: not ballastds(), 'the servers have ended')


def test_failed_trainer_ends_the_job():
    """The job fails with its trainers, and no server outlives it."""
    environment = dict(cluster(), STATE_DISK=os.path.abspath('disk'), STATE_DRAM='64MiB', STATE_NVME='512MiB')
    job = ops.run('sbatch', '--parsable', '--output', 'job-%j.log', SBATCH, 'false', env=environment).strip()
    assert over(environment, job) == 'FAILED', log(job)
    ops.wait_for(lambda: not ballastds(), 'the servers have ended')


def test_spare_takes_the_place_of_a_lost_server():
    """A node's server and trainer are killed, and its state removed: trainers start again beside the spare, which copies what was lost."""
    ops.need('etcd')
    environment = dict(cluster(3), STATE_DISK=os.path.abspath('disk'), STATE_DRAM='64MiB', STATE_NVME='512MiB')
    job = submit(environment, '--ntasks-per-node', '1', '--job-name', 'slurm', script=SPARE,
                 options=('--replicas', '2', '--failover-after', '1'))
    port = 20000 + int(job) % 100 * 100
    registry = f'etcd://node1:{port}/ballast-slurm'
    try:
        ops.wait_for(lambda: ops.committed(f'127.0.0.1:{port + 2},127.0.0.1:{port + 3}') >= 4, 'step 4')
        ops.wait_for(lambda: len(ballastds()) == 3, 'the spare runs')
        before = ops.run(ops.BIN / 'ballastctl', 'members', '--job', 'slurm', '--servers', registry)
        assert 'node1' in before and 'node2' in before and 'node3' not in before, before
        lost = [pid for pid in [*ballastds(), *ops.run('pgrep', 'train_bytes_lm').split()]
                if b'SLURMD_NODENAME=node2' in pathlib.Path(f'/proc/{pid}/environ').read_bytes()]
        assert len(lost) == 2, lost
        for pid in lost:
            os.kill(int(pid), signal.SIGKILL)
        shutil.rmtree('disk/ballast-slurm/node2')
        assert over(environment, job) == 'COMPLETED', log(job)
    except AssertionError:
        print(log(job))
        raise
    said = log(job)
    assert 'trainers on node1,node2\n' in said and 'trainers on node1,node3\n' in said, said
    assert "goes on without 'node2'" in said and re.search(r"server 'node3' joins and copies \d+ of 1024 shards", said), said
    assert ': Killed' not in said.split('trainers on node1,node3\n')[1], f'the other servers are told to end, and do: {said}'
    ops.reference('wanted')
    ops.same_bits('got', 'wanted')
    ops.wait_for(lambda: not ballastds(), 'the servers have ended')


def ballastds():
    return subprocess.run(['pgrep', '-x', 'ballastd'], capture_output=True, text=True).stdout.split()
