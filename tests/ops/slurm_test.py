"""deploy/examples/slurm.sbatch on a SLURM of one node: submitted, cancelled amid the run, submitted again, with the same bits."""
import os
import pathlib
import re
import secrets
import subprocess

import ops

SBATCH = ops.DEPLOY / 'examples' / 'slurm.sbatch'
CONFIGURATION = '''
ClusterName=one
SlurmctldHost=node1(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
KillWait=5
ReturnToService=2
NodeName=node1 NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
'''


def cluster():
    """Starts munge, the controller and the node; returns the environment of SLURM's commands."""
    ops.need('munged', 'slurmctld', 'slurmd', 'sbatch', ops.BIN / 'train_bytes_lm')
    folder = pathlib.Path('slurm').absolute()
    (folder / 'controller').mkdir(parents=True)
    (folder / 'node').mkdir()
    (folder / 'slurm.conf').write_text(CONFIGURATION.format(folder=folder, cpus=os.cpu_count()))
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
    ops.start('slurmd', '-D', '-N', 'node1', log='slurmd.out', env=environment)
    ops.wait_for(lambda: 'idle' in ops.run('sinfo', '-h', '-o', '%T', env=environment), 'the node is idle')
    return environment


def submit(environment, *extra):
    trainer = ' '.join(str(word) for word in ops.trainer('$BALLAST_SERVERS', '--job', 'slurm', '--world-size', '$WORLD_SIZE',
                                                         '--rank', '$RANK', '--rendezvous', os.path.abspath('meet'),
                                                         '--dump-master', os.path.abspath('got')))
    text = ops.run('sbatch', '--parsable', '--output', 'job-%j.log', *extra, SBATCH, 'bash', '-c', f'exec {trainer}', env=environment)
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


def ballastds():
    return subprocess.run(['pgrep', '-x', 'ballastd'], capture_output=True, text=True).stdout.split()
