"""Each way that an optimizer's state leaves and comes back, by name; and one cell of the table of test_state_ways.py: a state taken from a
source, given to a target that has the same parameters or others, and what came of it compared with torch.optim's."""
import contextlib
import copy
import io
import os
import re
import shutil
import subprocess
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ballast
import ballast.torch as bt
from ballast import programs

ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}
STEPS = 3
ORDERS = ['same order', 'other order', 'fewer here', 'more here']
MOMENTS = ('step', 'exp_avg', 'exp_avg_sq')

# torch.distributed.checkpoint.state_dict's, by way.
DSD = {
    'get_state_dict': {},
    'get_state_dict flat': {'flatten_optimizer_state_dict': True},
    'get_state_dict full': {'full_state_dict': True},
    'get_state_dict cpu': {'cpu_offload': True},
    'get_state_dict full, cpu': {'full_state_dict': True, 'cpu_offload': True},
    'get_state_dict full, cpu, from rank 0': {'full_state_dict': True, 'cpu_offload': True, 'broadcast_from_rank0': True},
    'dcp': {},
    'dcp flat': {'flatten_optimizer_state_dict': True},
}
WAYS = ['resume', 'torch.optim', 'torch.optim named', 'state_dict', 'full_state_dict', *DSD, 'export']


def build(layers):
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))  # of one shape, so that they can be mistaken for each other


def named(model, order):
    """Parameters as an optimizer is given them: of the other order, layers are the other way round."""
    found = list(model.named_parameters())
    if order == 'other order':
        found = [pair for i in reversed(range(0, len(found), 2)) for pair in found[i:i + 2]]
    return found[:4] if order == 'fewer here' else found


def step(model, optimizer, i):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(i))).square().mean().backward()
    optimizer.step()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor).detach().clone()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def ours(path):
    """Whether a warning that names this file is one of the package or of these cells; any folder above may be called `ballast`."""
    return path.startswith((os.path.dirname(ballast.__file__) + os.sep, __file__))


class Table:
    """The cells of one wrap (nn.Module -> nn.Module) and one durability."""

    def __init__(self, wrap, durability, servers, folder, label):
        self._wrap, self._folder, self._label = wrap, folder, label
        self._keep = {'servers': servers, 'durability': durability, 'checkpoints': 50, 'chunk_elements': 1 << 16}
        self._durable = durability == 'step'
        self._model, self._twin = wrap(build(3)), wrap(build(3))
        optimizer = self._ours(named(self._model, 'same order'), 'source')
        self._theirs = torch.optim.AdamW(self._twin.parameters(), **ARGUMENTS)
        self._named = torch.optim.AdamW(self._twin.named_parameters(), **ARGUMENTS)
        for i in range(STEPS):
            step(self._model, optimizer, i)
            step(self._twin, self._theirs, i)
        self._named.load_state_dict(self._theirs.state_dict())
        if 'param_names' in self._named.param_groups[0]:
            for group in self._named.param_groups:  # which the load took away
                group['param_names'] = [name for name, _ in self._twin.named_parameters()]
        self._saved = {way: self._take(way, optimizer) for way in WAYS}
        self._values = {name: whole(p) for name, p in self._model.named_parameters()}
        self._moments = {name: optimizer.job.read_state(p, whole=True) for name, p in self._model.named_parameters()}
        optimizer.close()
        self._check_source()
        step(self._twin, self._theirs, STEPS)
        self._next = {name: whole(p) for name, p in self._twin.named_parameters()}

    def _ours(self, parameters, name, **more):
        return bt.AdamW(parameters, name=f'{self._label}-{name}', **ARGUMENTS, **self._keep, **more)

    def _check_source(self):
        """What all cells rely on: the source's state is as torch's."""
        for name, p in self._twin.named_parameters():
            for key in MOMENTS:
                torch.testing.assert_close(self._moments[name][key], whole(self._theirs.state[p][key]), rtol=1e-5, atol=1e-7)

    def _path(self, way):
        return os.path.join(self._folder, f'{self._label}-{way}'.replace(' ', '_').replace(',', ''))

    def _take(self, way, optimizer):
        if way == 'torch.optim':
            return copy.deepcopy(self._theirs.state_dict())
        if way == 'torch.optim named':
            return copy.deepcopy(self._named.state_dict())
        if way == 'state_dict':
            return through_a_file(optimizer.state_dict())
        if way == 'full_state_dict':
            return through_a_file(optimizer.full_state_dict())
        if way in DSD:
            state = get_optimizer_state_dict(self._model, optimizer, options=StateDictOptions(**DSD[way]))
            if way.endswith('full, cpu') and dist.is_initialized():
                states = [state]  # rank 0 alone has it: the others read its file
                dist.broadcast_object_list(states)
                state = states[0]
            if not way.startswith('dcp'):
                return through_a_file(state)
            dcp.save({'optimizer': state}, checkpoint_id=self._path(way))
        if way == 'export' and (not dist.is_initialized() or dist.get_rank() == 0):
            bt.export_state(optimizer, self._path(way))
        if dist.is_initialized():
            dist.barrier()
        return None

    def _give(self, way, model, optimizer):
        saved = copy.deepcopy(self._saved[way])
        if way in DSD:
            options = StateDictOptions(**DSD[way])
            if way.startswith('dcp'):
                saved = {'optimizer': get_optimizer_state_dict(model, optimizer, options=options)}
                dcp.load(saved, checkpoint_id=self._path(way))
                saved = saved['optimizer']
            set_optimizer_state_dict(model, optimizer, saved, options=options)
        elif way == 'export':
            bt.import_state(optimizer, self._path(way))
        elif way == 'resume':
            optimizer.resume()
        else:
            optimizer.load_state_dict(saved)

    def cell(self, way, order):
        """'equal', or what was said: ('raised' or 'warned', text)."""
        model = self._wrap(build(4 if order == 'more here' else 3))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in self._values:
                    mine = self._values[name]
                    p.copy_(distributed_like(mine, p))
        # States that name a job need it. Others go into a new one; a durable one is large, so it is shared.
        names_a_job = way == 'resume' or (self._durable and way in ('state_dict', *DSD))
        name = 'source' if names_a_job else 'target' if self._durable else f'{WAYS.index(way)}-{ORDERS.index(order)}'
        optimizer = self._ours(named(model, order), name,
                               resume='must' if way == 'resume' else 'auto' if name == 'target' else 'never')
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            try:
                self._give(way, model, optimizer)
                optimizer.resume()
            except (Exception, CheckpointException) as error:  # pylint: disable=broad-except
                optimizer.close()
                return 'raised', f'{type(error).__name__}: {error}'
        said = [str(each.message) for each in said if ours(each.filename)]
        wrong = self._differences(way, order, model, optimizer)
        optimizer.close()
        return ('differs', wrong) if wrong else ('warned', '; '.join(said)) if said else 'equal'

    def _differences(self, way, order, model, optimizer):
        """From the source's state, and from torch's next step."""
        mine = dict(named(model, order))
        place = dict(zip(mine, self._moments)) if way == 'torch.optim' else {name: name for name in mine}  # theirs goes by place
        for name, p in mine.items():
            if name not in self._moments:
                continue  # a later one, which begins anew
            entry, expected = optimizer.state[p], self._moments[place[name]]
            for key in MOMENTS:
                near = 1e-5 if way.startswith('torch') else 0
                if not torch.allclose(whole(entry[key]), expected[key], rtol=near, atol=near / 100):
                    return f'{key} of {name}'
        if way == 'resume' or 'here' in order or (way == 'torch.optim' and order == 'other order'):
            return ''  # a step would change the source, or is torch's own of moments in wrong places
        step(model, optimizer, STEPS)
        for name, p in mine.items():
            if not torch.allclose(whole(p), self._next[name], rtol=1e-4, atol=1e-5):
                return f'the next step of {name}'
        return ''


def distributed_like(value, parameter):
    if not hasattr(parameter, 'full_tensor'):
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def all_cells(label, wrap, servers, folder, ways=None):
    found = {}
    for durability in ('step', 'none'):
        table = Table(wrap, durability, servers, folder, f'{label}-{durability}')
        for way in ways or WAYS:
            for order in ORDERS:
                if 'rank 0' in way and (label == 'one' or (durability, order) == ('none', 'more here')):
                    continue  # nobody to broadcast to; torch's rank 0 refuses by name, and torch's others wait for it for ever
                found[label, durability, way, order] = table.cell(way, order)
    return found


@contextlib.contextmanager
def server(folder):
    """Its address. What it keeps goes with it: a small job's gradient log alone takes 200 MiB of disk."""
    process = subprocess.Popen(
        [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen', '127.0.0.1:0',
         '--data_directory', str(folder), '--budget.dram', '128MiB', '--budget.nvme', '8GiB', '--log_level', 'warn'],
        stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r'listen=(\S+)', process.stdout.readline())[1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder)
