"""deploy/examples: torchrun on one host is run; manifests are valid; SLURM has a file of its own."""
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess

import ops
import yaml
from chart_test import KUBERNETES, lost

EXAMPLES = ops.DEPLOY / 'examples'


def torchrun(data, *, wait=True):
    """The example's command line; returns its output, or the process with output in DATA.out."""
    python = ops.ROOT / 'build' / 'venv' / 'bin'
    module = ops.ROOT / 'build' / 'ops-release' / 'python'
    ops.need(python / 'torchrun', module / 'ballast')
    environment = dict(os.environ, PATH=f'{python}:{ops.BIN}:{os.environ["PATH"]}', PYTHONPATH=str(module),
                       STATE_DRAM='64MiB', STATE_NVME='512MiB', OMP_NUM_THREADS='1')
    command = [EXAMPLES / 'torchrun.sh', data, '2', EXAMPLES / 'train.py', '40']
    if wait:
        return ops.run(*command, env=environment)
    return ops.start(*command, log=f'{data}.out', env=environment, start_new_session=True)


def test_torchrun():
    """Killed in mid-run, server, trainers and all; the same command line again ends with the bits of an undisturbed run."""
    wanted = re.search(r'parameters (\w+)', torchrun('undisturbed')).group(1)
    run = torchrun('killed', wait=False)
    ops.wait_for(lambda: 'step 10:' in pathlib.Path('killed.out').read_text(), 'step 10')
    everybody = subprocess.run(['pgrep', '-g', str(run.pid)], capture_output=True, text=True).stdout.split()
    assert len(everybody) >= 3, everybody
    os.killpg(run.pid, signal.SIGKILL)
    for pid in subprocess.run(['pgrep', '-f', 'train.py 40'], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)  # ranks, in sessions of their own; processes of this test's namespace alone are seen
    run.wait()
    # A killed server is in its data directory until the kernel has taken its memory back.
    ops.wait_for(lambda: not subprocess.run(['pgrep', '-x', 'ballastd'], capture_output=True).stdout, 'the server has ended')
    assert 'done after' not in pathlib.Path('killed.out').read_text()
    said = torchrun('killed')
    assert 'step 10:' not in said, 'the run began anew'
    assert re.search(r'parameters (\w+)', said).group(1) == wanted, said


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def pods(value):
    """Every pod template within a manifest, as a Pod."""
    if isinstance(value, dict):
        if 'containers' in value:
            yield {'apiVersion': 'v1', 'kind': 'Pod', 'metadata': {'name': 'a'}, 'spec': value}
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


def test_manifests():
    """JobSet, TrainJob and runtime by the models of their CRDs, which lose a field they do not know; each pod by Kubernetes' schemas."""
    import kubernetes_validate
    from kubeflow_trainer_api import models
    known = {'JobSet': models.JobsetV1alpha2JobSet, 'TrainJob': models.TrainerV1alpha1TrainJob,
             'TrainingRuntime': models.TrainerV1alpha1TrainingRuntime}
    checked = set()
    for document in documents('jobset.yaml') + documents('trainjob.yaml'):
        model = known[document['kind']]

        def kept(sent, model=model):
            return json.loads(json.dumps(model.from_dict(sent).to_dict(), default=str))
        assert not list(lost(document, kept(document))), list(lost(document, kept(document)))
        assert list(lost(wrong := dict(document, spec=dict(document['spec'], trainr=1)), kept(wrong))), 'a misspelt field passed'
        checked.add(document['kind'])
    assert checked == set(known), checked
    found = 0
    for name in ('jobset.yaml', 'trainjob.yaml', 'leaderworkerset.yaml'):
        for pod in pods(documents(name)):
            pod['spec'].setdefault('restartPolicy', 'Always')
            assert pod['spec']['enableServiceLinks'] is False, 'a Service named ballast would set BALLAST_PORT'
            for version in KUBERNETES:
                kubernetes_validate.validate(pod, version, strict=True)
            found += 1
    assert found == 4, found


def test_trainers_pass_the_network_policy():
    """The trainers of each example carry the label that the chart's NetworkPolicy asks for, and take the servers from the chart's map."""
    label = yaml.safe_load((ops.DEPLOY / 'chart' / 'ballast' / 'values.yaml').read_text())['networkPolicy']['trainers']
    for name in ('jobset.yaml', 'trainjob.yaml'):
        text = (EXAMPLES / name).read_text()
        assert all(f'{key}: "{value}"' in text for key, value in label.items()), name
        assert 'configMapRef: {name: ballast-servers}' in text, name


def test_sky():
    """SkyPilot's own reader of task files, offline."""
    if importlib.util.find_spec('sky') is None:
        raise ops.Skip('no SkyPilot in build/ops/venv (0.4 GB, so not installed by default); pip install skypilot')
    os.environ['HOME'] = os.getcwd()
    import sky
    task = sky.Task.from_yaml(str(EXAMPLES / 'sky.yaml'))
    assert task.num_nodes == 2
    wrong = (EXAMPLES / 'sky.yaml').read_text().replace('num_nodes', 'num_node')
    pathlib.Path('wrong.yaml').write_text(wrong)
    try:
        sky.Task.from_yaml('wrong.yaml')
    except Exception as error:  # noqa: BLE001
        assert 'num_node' in str(error), error
        return
    raise AssertionError('a misspelt field passed')


def test_shell_of_examples_parses():
    scripts = [(EXAMPLES / name).read_text() for name in ('slurm.sbatch', 'slurm_spare.sbatch', 'torchrun.sh')]
    sky = yaml.safe_load((EXAMPLES / 'sky.yaml').read_text())
    for text in [*scripts, sky['setup'], sky['run']]:
        ops.run('bash', '-n', '-c', text)
