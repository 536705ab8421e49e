"""LoRA on a frozen base of which the servers keep working copies alone, in the dtype of gathers or in 8 bits, on two ranks and on one."""
import json
import os
import re
import subprocess

import pytest
import torch
from test_shard import run

from ballast import programs

FROZEN = ('working', 'q8')
KILLED = [(frozen, world) for frozen in FROZEN for world in (1, 2)]
if os.environ.get('TEST_ROUNDS') != 'full':  # each kind, and each number of ranks
    KILLED = [('working', 1), ('q8', 2)]
BLOCK = 256


def largest(values):
    """Of each element's block, as the servers cut a tensor."""
    padded = torch.nn.functional.pad(values.flatten().float().abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return padded.amax(1).repeat_interleave(BLOCK)[:values.numel()].view(values.shape)


@pytest.fixture(scope='module', params=[1, 2], ids=['alone', 'pair'])
def done(request, tmp_path_factory):
    scripts = ['wide', 'narrow', 'loaded', 'only_trained', 'refused']
    return run(scripts, tmp_path_factory.mktemp('frozen'), world=request.param, script='frozen_main.py')


@pytest.mark.parametrize('script', ['wide', 'narrow'])
def test_losses_have_the_bits_of_fsdp2_with_the_same_base(script, done):
    for results, _ in done[script]:
        losses, parameters = results['plain']
        for frozen in ('working', 'state'):
            ours, values = results[frozen]
            assert torch.equal(ours, losses), frozen
            for name, value in values.items():
                is_rounded = '.base.' in name and (script, frozen) == ('narrow', 'working')
                assert torch.equal(value, parameters[name].bfloat16().float() if is_rounded else parameters[name]), (frozen, name)
        assert torch.equal(results['q8'][0], results['quantized'][0])
        assert not torch.equal(results['q8'][0], losses)
        trained = [name for name in parameters if '.base.' not in name]
        assert all(torch.equal(results['q8'][1][name], results['quantized'][1][name]) for name in trained)


def test_an_element_in_8_bits_is_off_by_a_254th_of_its_block(done):
    for script in ('wide', 'narrow'):
        for results, began in done[script]:
            for name, value in results['q8'][1].items():
                if '.base.' in name:
                    off = (value - began[name]).abs()
                    assert (off <= largest(began[name]) / 254 * (1 + 1e-4)).all() and off.any(), name


def test_states_go_into_other_jobs(done):
    for (later, values), (follows, follows_values), has, base, came in done['loaded']:
        assert torch.equal(later, follows)
        assert all(torch.equal(values[name], value) for name, value in follows_values.items())
        assert has and not any('.base.' in name for name in has)
        for name, value in base.items():
            assert ((came[name] - value).abs() <= largest(value) / 254 * (1 + 1e-4)).all(), name


SAYS = {'unfrozen': "parameter 'blocks.1.base.weight' wants a gradient, but was frozen when the job was made",
        'moments': "the state has moments of parameter 'blocks.0.base.bias' after 2 steps, but the job was made with it frozen",
        'inf': "element 172 of tensor 'blocks.0.base.weight' is inf", 'nan': "element 172 of tensor 'blocks.0.base.weight' is nan",
        'large': "element 172 of tensor 'blocks.0.base.weight' is 3.4e+38; initial values and edits must be finite",
        'written': "parameter 'blocks.0.base.weight' was written to within gathered(), but that was a copy",
        'longer': "parameter 'blocks.2.base.weight' lives only on the servers, by shard(), but job 'longer' was made without it",
        'argument': "shard(frozen='int4'): expected 'working', 'q8' or 'state'"}


def test_bad_uses_are_named(done):
    for said in done['refused']:
        assert said.keys() == SAYS.keys()
        for use, text in SAYS.items():
            assert text in said[use], (use, said[use])


def test_an_optimizer_without_the_base_is_refused_and_its_advice_works(done):
    for said, one_at_a_time, (added, anew) in done['only_trained']:
        assert "'blocks.0.base.weight' lives only on the servers, by shard(), but is in no group of the optimizer. Give " in said
        assert 'all of model.named_parameters(), not only those that want gradients, or add the rest by add_param_group()' in said
        assert 'close() that optimizer before another is made' in one_at_a_time
        assert torch.equal(added, anew)


class Server:
    """A ballastd that is killed, and started again on its directory."""

    def __init__(self, folder):
        self._folder = folder
        self.start()

    def start(self):
        self._process = subprocess.Popen(
            [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen', '127.0.0.1:0',
             '--data_directory', str(self._folder), '--budget.dram', '128MiB', '--budget.nvme', '8GiB', '--log_level', 'warn'],
            stdout=subprocess.PIPE, text=True)
        self.address = re.search(r'listen=(\S+)', self._process.stdout.readline())[1]

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def ctl(self, *arguments):
        ctl = programs.path('ballastctl')
        return subprocess.run([ctl, *arguments], capture_output=True, text=True)

    def tiers(self, job):
        told = json.loads(self.ctl('status', '--json', '--servers', self.address).stdout)
        [status] = [each for server in told['servers'] for each in server['status']['jobs'] if each['name'] == job]
        return status['tiers']


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / 'server')
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize('frozen', FROZEN)
def test_the_base_takes_its_working_copy_alone(frozen, server, tmp_path):
    parameters, = run([f'kept_{frozen}'], tmp_path, world=1, script='frozen_main.py', BALLAST_SERVERS=server.address)[f'kept_{frozen}']

    def padded(size):
        return -(-size // 4096) * 4096

    # A chunk for each block's base, one for what is trained in it, and one for the head.
    trained = base = count = 0
    for unit in (parameters[:3], parameters[3:6], parameters[6:]):
        n = sum(-(-torch.Size(shape).numel() // BLOCK) * BLOCK for shape, wants in unit if wants)
        trained += 3 * padded(4 * n) + 4096
        for shape, _ in (each for each in unit if not each[1]):
            n = torch.Size(shape).numel()
            base += padded(2 * n if frozen == 'working' else n + n // BLOCK * 4) + 4096
            count += n
    assert count == 2 << 20
    assert sum(int(tier.get('state_bytes', 0)) for tier in server.tiers(f'kept_{frozen}')) == trained + base
    assert base <= (2.004 if frozen == 'working' else 1.02) * count


@pytest.mark.parametrize(('frozen', 'world'), KILLED)
def test_a_killed_server_comes_back_with_the_same_bits(frozen, world, server, tmp_path):
    """Killed where values of the base are in the log alone, and where they have been flushed and the log has been cut."""
    script = f'part_{frozen}'

    def more(name, steps, first):
        (tmp_path / name).mkdir()
        return run([script], tmp_path / name, world=world, script='frozen_main.py', BALLAST_SERVERS=server.address, STEPS=str(steps),
                   FIRST=str(first))[script]
    parts, first = [], 0
    for steps in (1, 24, 2):
        parts.append(more(str(first), steps, first))
        first += steps
        server.kill()
        verified = server.ctl('verify', '--data-directory', str(tmp_path / 'server'))
        assert verified.returncode == 0, verified.stdout
        server.start()
    assert server.ctl('drop', '--job', script, '--servers', server.address).returncode == 0
    unbroken = more('unbroken', first, 0)
    for rank in range(world):
        assert torch.equal(torch.cat([part[rank][0] for part in parts]), unbroken[rank][0])
        values = unbroken[rank][1]
        assert all(torch.equal(parts[-1][rank][1][name], value) for name, value in values.items())
