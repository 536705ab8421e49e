"""One rank of test_dcp.py: dcp_main.py SCRIPT[,SCRIPT...] FOLDER, with torch's variables; writes what each script returns to
FOLDER/SCRIPT-RANK.pt. Optimizer state as DTensors, through torch.distributed.checkpoint."""
import contextlib
import ctypes
import gc
import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from placed_main import ARGUMENTS, alone_as_it_is, divided, made, told, wrapped
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ballast.torch as bt

BEFORE, AFTER = (3, 5) if os.environ.get('TEST_ROUNDS') == 'full' else (2, 2)  # steps before the state is saved, and after
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__] = function
    return function


def ours(model, name, **more):
    return bt.AdamW(model.named_parameters(), name=name, **{'dram': '64MiB', 'threads': 1, 'step_timeout': 60.0, **ARGUMENTS, **more})


def theirs(model, _):
    return torch.optim.AdamW(model.parameters(), foreach=False, **ARGUMENTS)


def closed(optimizer):
    """Not before all ranks are done with the server."""
    dist.barrier()
    if hasattr(optimizer, 'close'):
        optimizer.close()


def losses(optimizer, step, begin, count):
    found = []
    for i in range(begin, begin + count):
        optimizer.zero_grad()
        found.append(step(i))
        optimizer.step()
    return torch.tensor(found, dtype=torch.float64)


def save(model, optimizer, folder, options):
    """Also what was saved."""
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer, options=options)))
    dcp.save(state, checkpoint_id=folder)
    return state


def load(model, optimizer, folder, options):
    state = dict(zip(('model', 'optimizer'), get_state_dict(model, optimizer, options=options)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state['model'], optim_state_dict=state['optimizer'], options=options)


def leaves(tree, path=''):
    """(path, tensor) of a nested state."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f'{path}{key}.')
        elif isinstance(value, torch.Tensor):
            yield f'{path}{key}', value


def shape_of(value):
    placed = (value.device_mesh.mesh.tolist(), value.placements) if isinstance(value, DTensor) else None
    return tuple(value.shape), value.dtype, placed


def local(value):
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def own_moments(model, optimizer):
    """By parameter and key: this rank's memory."""
    return {f'{name}.{key}': local(optimizer.state[p][key]) for name, p in model.named_parameters() if p.numel()
            for key in ('step', 'exp_avg', 'exp_avg_sq')}


def whole_moments(optimizer):
    """By parameter and key, whole, as any one rank reads them."""
    state = optimizer.full_state_dict()
    names = state['param_groups'][0]['param_names']
    return {f'{names[i]}.{key}': value for i, entry in state['state'].items() for key, value in entry.items()}


def part_of(parameter, whole):
    """This rank's part of a whole tensor, by another way than DTensor's own arithmetic."""
    if not isinstance(parameter, DTensor):
        return whole
    from ballast.torch.tensors import placement
    key = placement.key_of('', parameter)
    return whole[tuple(slice(begin, end) for begin, end in placement.box(key, tuple(parameter.shape), dist.get_rank()))]


def parts_of(parameters, whole):
    """This rank's parts of whole moments, by parameter and key."""
    return {key: value if key.endswith('.step') else part_of(parameters[key.rpartition('.')[0]], value) for key, value in whole.items()}


def equal(one, other):
    """What of two dicts of tensors differs: nothing."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [key for key, value in one.items() if not torch.equal(value, other[key])]


def wrapping(name):
    """One wrapping, with shard() where its name says so: what of ours' state is not as torch's in kind, what of its parts is not what the
    servers have, and the losses of the five steps after the checkpoint: ours' and torch's unbroken, ours to ours, ours to torch's, torch's
    to ours."""
    options, folder, is_sharded = FLAT if 'pipeline' in name else NESTED, f'{sys.argv[2]}/{name}', name.startswith('sharded_')

    def built(make, label):
        take = bt.shard if is_sharded and make is ours else alone_as_it_is
        model, step = made(name.removeprefix('sharded_'), take, wrapped if is_sharded else alone_as_it_is)
        optimizer = make(model, f'{name}-{label}'.replace(' ', '-'))
        if is_sharded and make is ours:
            optimizer.resume()  # stages do not begin together
        return model, step, optimizer
    found = {}
    model, step, optimizer = built(theirs, '')
    losses(optimizer, step, 0, BEFORE)
    kinds = {path: shape_of(value) for path, value in leaves(save(model, optimizer, f'{folder}-theirs', options)['optimizer'])}
    found['theirs'] = losses(optimizer, step, BEFORE, AFTER)

    model, step, optimizer = built(ours, 'ours')
    losses(optimizer, step, 0, BEFORE)
    saved = save(model, optimizer, f'{folder}-ours', options)['optimizer']
    found['kinds'] = {path: (shape_of(value), kinds.get(path)) for path, value in leaves(saved) if shape_of(value) != kinds.get(path)}
    parameters, whole = dict(model.named_parameters()), whole_moments(optimizer)
    moments = own_moments(model, optimizer)
    found['parts'] = equal(moments, parts_of(parameters, {key: whole[key] for key in moments}))
    found['ours'] = losses(optimizer, step, BEFORE, AFTER)
    closed(optimizer)

    for label, make, origin in (('ours to ours', ours, 'ours'), ('ours to theirs', theirs, 'ours'), ('theirs to ours', ours, 'theirs')):
        model, step, optimizer = built(make, label)
        load(model, optimizer, f'{folder}-{origin}', options)
        if origin == 'ours':
            found[f'{label}, moments'] = equal(own_moments(model, optimizer), moments)
        found[label] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    return found


@script
def save_divided():
    """Checkpoints of ours and torch's by (dp, tp, pp) = (2, 2, 1), flat and nested; the moments that ours has, and the losses of both."""
    found = {}
    for label, make in (('ours', ours), ('theirs', theirs)):
        model, step = divided(2, 2, 1)
        optimizer = make(model, f'saved-{label}')
        losses(optimizer, step, 0, BEFORE)
        save(model, optimizer, f'{sys.argv[2]}/{label}-flat', FLAT)
        save(model, optimizer, f'{sys.argv[2]}/{label}-nested', NESTED)
        if label == 'ours':
            found['moments'] = whole_moments(optimizer)
        found[label] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    return found


@script
def load_divided():
    """Loads them at the division DIVISION. What of the moments differs, and the losses."""
    division = tuple(map(int, os.environ['DIVISION'].split(',')))
    saved, found = torch.load(f'{sys.argv[2]}/save_divided-0.pt')['moments'], {}
    for form, options in (('flat', FLAT), ('nested', NESTED)):
        if form == 'nested' and division[2] > 1:
            continue  # torch's nested form keeps the groups of one stage alone
        for label, make, origin in (('ours to ours', ours, 'ours'), ('ours to theirs', theirs, 'ours'), ('theirs to ours', ours, 'theirs')):
            model, step = divided(*division)
            optimizer = make(model, f'{label}-{form}'.replace(' ', '-'))
            load(model, optimizer, f'{sys.argv[2]}/{origin}-{form}', options)
            if origin == 'ours':
                mine = own_moments(model, optimizer)
                parameters = dict(model.named_parameters())
                found[label, form, 'moments'] = equal(mine, parts_of(parameters, {key: saved[key] for key in mine}))
            found[label, form] = losses(optimizer, step, BEFORE, AFTER)
            closed(optimizer)
    return found


@script
def shard_divided():
    """A model of shard() at (2, 2, 1): what of its saved values is not the servers', and the losses after its state went into another at
    (4, 1, 1) and into torch's optimizer, torch's into it, and into it in whole tensors."""
    folder, found = sys.argv[2], {}
    model, step = divided(2, 2, 1)
    optimizer = ours(bt.shard(model), 'shard')
    losses(optimizer, step, 0, BEFORE)
    values = save(model, optimizer, f'{folder}/shard', NESTED)['model']
    with bt.gathered(model):
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    found['values'] = [name for name, p in model.named_parameters() if not torch.equal(local(values[name]), part_of(p, whole[name]))]
    moments = whole_moments(optimizer)
    found['ours'] = losses(optimizer, step, BEFORE, AFTER)
    closed(optimizer)
    for label, wrap, make, origin, division in (
            ('shard to shard', bt.shard, ours, 'shard', (4, 1, 1)), ('shard to theirs', alone_as_it_is, theirs, 'shard', (2, 2, 1)),
            ('shard to ours', alone_as_it_is, ours, 'shard', (4, 1, 1)), ('theirs to shard', bt.shard, ours, 'theirs-nested', (4, 1, 1))):
        model, step = divided(*division)
        optimizer = make(wrap(model), label.replace(' ', '-'))
        losses(optimizer, step, 20, 1)  # which the load undoes
        load(model, optimizer, f'{folder}/{origin}', NESTED)
        found[label] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    for label, opens in (('whole', True), ('whole before the job', False)):
        model, step = divided(4, 1, 1)
        optimizer = ours(bt.shard(model), label.replace(' ', '-'))
        if opens:
            optimizer.resume()
        model.load_state_dict(whole)
        names = [name for name, _ in model.named_parameters()]
        optimizer.load_state_dict({'state': {i: {key: moments[f'{name}.{key}'] for key in ('step', 'exp_avg', 'exp_avg_sq')}
                                             for i, name in enumerate(names)},
                                   'param_groups': [{**ARGUMENTS, 'params': list(range(len(names))), 'param_names': names}]})
        found[label] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    model, _ = divided(4, 1, 1)
    optimizer = ours(bt.shard(model), 'below')
    below = {name.removeprefix('0.'): value for name, value in whole.items() if name[0] == '0'}
    found['below'] = told(lambda: model[0].load_state_dict(below))
    return found


@script
def durable():
    """A durable job of two stages: kinds of its states, what of its moments another durable job at (4, 1, 1) lacks, and what is said of a
    nested state, which torch saves with the groups of one stage."""
    folder, found = sys.argv[2], {}
    keep = {'durability': 'step', 'directory': f'{folder}/durable', 'nvme': '512MiB'}
    model, step = divided(2, 1, 2)
    optimizer = ours(model, 'durable', **keep)
    losses(optimizer, step, 0, BEFORE)
    found['named'] = sorted({key.rpartition('.')[2] for key, _ in leaves(get_state_dict(model, optimizer, options=FLAT)[1])})
    optimizer.job.states = 'full'
    save(model, optimizer, f'{folder}/durable-flat', FLAT)
    save(model, optimizer, f'{folder}/durable-nested', NESTED)
    moments = [whole_moments(optimizer)] * dist.get_world_size()
    dist.all_gather_object(moments, moments[0])
    moments = {**moments[0], **moments[-1]}
    found['ours'] = losses(optimizer, step, BEFORE, AFTER)
    found['nested'] = told(lambda: load(model, optimizer, f'{folder}/durable-nested', NESTED))
    closed(optimizer)
    model, step = divided(4, 1, 1)
    optimizer = ours(model, 'other', states='full', **keep)
    load(model, optimizer, f'{folder}/durable-flat', FLAT)
    parameters = dict(model.named_parameters())
    found['moments'] = equal(own_moments(model, optimizer), parts_of(parameters, moments))
    found['there'] = losses(optimizer, step, BEFORE, AFTER)
    closed(optimizer)
    return found


def flat_of(optimizer):
    """As torchtitan 0.3 lays out the state of an optimizer with names, without torch's functions."""
    state, flat, names = optimizer.state_dict(), {}, {}
    for group in state['param_groups']:
        names.update(zip(group['params'], group['param_names']))
        flat.update({f'param_groups.{name}.{key}': value for name in group['param_names'] for key, value in group.items()
                     if key not in ('params', 'param_names')})
    flat.update({f'state.{names[i]}.{key}': value for i, entry in state['state'].items() for key, value in entry.items()})
    return flat


def unflat(optimizer, flat):
    """As torchtitan 0.3 gives it back."""
    state, groups = {}, []
    for group in optimizer.param_groups:
        first = group['param_names'][0]
        groups.append({'params': [], **{key: flat[f'param_groups.{first}.{key}'] for key in group if key not in ('params', 'param_names')}})
        for name, parameter in zip(group['param_names'], group['params']):
            i = len(state)
            state[i] = {key: flat[f'state.{name}.{key}'] for key in optimizer.state[parameter]}
            groups[-1]['params'].append(i)
    optimizer.load_state_dict({'state': state, 'param_groups': groups})


@script
def torchtitan():
    """Its layout: ours to torch's and back, by (2, 1, 2) and (4, 1, 1)."""
    folder, found, values = sys.argv[2], {}, {}
    makes = {'ours': ours, 'theirs': lambda model, _: torch.optim.AdamW(model.named_parameters(), foreach=False, **ARGUMENTS)}
    for label, make in makes.items():
        model, step = divided(2, 1, 2)
        optimizer = make(model, f'titan-{label}')
        losses(optimizer, step, 0, BEFORE)
        dcp.save({'model': model.state_dict(), 'optimizer': flat_of(optimizer)}, checkpoint_id=f'{folder}/titan-{label}')
        found[label] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    for label, origin in (('ours', 'theirs'), ('theirs', 'ours'), ('ours', 'ours')):
        model, step = divided(4, 1, 1)
        optimizer = makes[label](model, f'titan-{label}-{origin}')
        if label == 'theirs':
            losses(optimizer, step, 20, 1)  # it has no state before a step
        assert optimizer.state  # as torchtitan asks
        values = {'model': model.state_dict(), 'optimizer': flat_of(optimizer)}
        dcp.load(values, checkpoint_id=f'{folder}/titan-{origin}')
        model.load_state_dict(values['model'])
        unflat(optimizer, values['optimizer'])
        found[f'{origin} to {label}'] = losses(optimizer, step, BEFORE, AFTER)
        closed(optimizer)
    return found


def peak_over(act):
    """Bytes that the process's memory rises by at most."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back
    gc.collect()
    with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
        file.write('5')

    def read(key):
        with open('/proc/self/status', encoding='ascii') as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))
    before = read('VmRSS:')
    kept = act()
    return read('VmHWM:') - before, kept


@script
def streamed():
    """Full states of 8 layers of 8 MiB: the peak of each rank over its memory before, and whether rank 0 has all, and the others nothing;
    then what comes of it in another job, from rank 0 alone."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024, bias=False) if i % 2 else torch.nn.Linear(1024, 2048, bias=False)
                                  for i in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = ours(model, 'streamed', dram='1GiB')
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    sharded = StateDictOptions()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    peaks = {}
    peaks['sharded'], state = peak_over(lambda: get_state_dict(model, optimizer, options=sharded)[1])
    del state
    peaks['full'], state = peak_over(lambda: get_state_dict(model, optimizer, options=full)[1])
    names = [name for name, _ in model.named_parameters()]
    whole = whole_moments(optimizer)
    right = all(torch.equal(state['state'][name][key], whole[f'{name}.{key}']) for name in names for key in ('exp_avg', 'exp_avg_sq')) \
        if dist.get_rank() == 0 else not state
    moments = own_moments(model, optimizer)
    closed(optimizer)
    other = ours(model, 'streamed-other', dram='1GiB')
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, other, state, options=options)
    differs = equal(own_moments(model, other), moments)
    closed(other)
    return {'peaks': peaks, 'right': right, 'differs': differs}


def main():
    torch.set_num_threads(1)
    names, folder = sys.argv[1].split(','), sys.argv[2]
    dist.init_process_group('gloo')
    for name in names:
        try:
            result = SCRIPTS[name]() if name in SCRIPTS else wrapping(name)
        except Exception:
            result = traceback.format_exc()
        torch.save(result, f'{folder}/{name}-{dist.get_rank()}{os.environ.get("SUFFIX", "")}.pt')
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
