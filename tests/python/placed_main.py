"""One rank of test_placed.py: placed_main.py CASE[,CASE...] FOLDER, with torch's variables. Trains each case's model by torch.optim and
by ours, and writes the losses and this rank's parameters of both to FOLDER/CASE-RANK.pt."""
import contextlib
import functools
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import ballast.torch as bt
from ballast import Error
from ballast.torch.tensors.remote import remote_of

STEPS = int(os.environ.get('PLACED_STEPS', '30'))
WIDTH, HIDDEN, UNEVEN = 8, 12, 14
CASES = {}
ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}


def case(function):
    """function(take, wrap): take(model) is called last, wrap(model, mesh) where fully_shard is not needed otherwise."""
    CASES[function.__name__] = function
    return function


def alone_as_it_is(model, mesh=None):
    return model


def wrapped(model, mesh):
    """Over a mesh of one rank, say."""
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Block(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def stack(blocks=2, hidden=HIDDEN):
    torch.manual_seed(3)
    return nn.Sequential(*(Block(hidden) for _ in range(blocks)))


def batch(step, part):
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(4, 8, WIDTH, generator=generator)


def loss_of(out):
    return out.to_local().square().mean() if isinstance(out, DTensor) else out.square().mean()


@functools.cache  # nobody ends a mesh's process groups, and each of gloo's has a thread that wakes a hundred times a second
def mesh_of(*sizes, names):
    return init_device_mesh('cpu', sizes, mesh_dim_names=names)


def parallel(model, mesh):
    for block in model:
        parallelize_module(block, mesh, {'up': ColwiseParallel(), 'down': RowwiseParallel()})
    return model


def plainly(model, part, take):
    """A loop over whole batches; `part` numbers those of this rank."""
    model = take(model)

    def step(i):
        loss = loss_of(model(batch(i, part)))
        loss.backward()
        return loss.item()
    return model, step


@case
def fsdp2(take, wrap):
    model = stack()
    for block in model:
        fully_shard(block)
    return plainly(fully_shard(model), dist.get_rank(), take)


@case
def uneven(take, wrap):
    model = stack(hidden=7)
    for block in model:
        fully_shard(block)
    return plainly(fully_shard(model), dist.get_rank(), take)


@case
def hsdp(take, wrap):
    mesh = mesh_of(2, 2, names=('replicas', 'shards'))
    model = stack(hidden=7)
    for block in model:
        fully_shard(block, mesh=mesh)
    return plainly(fully_shard(model, mesh=mesh), dist.get_rank(), take)


@case
def last_dimension(take, wrap):
    model = fully_shard(stack(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    return plainly(model, dist.get_rank(), take)


@case
def tensor_parallel(take, wrap):
    """Norms are plain tensors beside DTensors."""
    mesh = mesh_of(1, 4, names=('dp', 'tp'))
    return plainly(wrap(parallel(stack(), mesh['tp']), mesh['dp']), 0, take)


@case
def tensor_by_data_parallel(take, wrap):
    """Replicas on other meshes; gradients are averaged by hand."""
    mesh = mesh_of(2, 2, names=('dp', 'tp'))
    model = parallel(stack(), mesh['tp'])
    model, forward = plainly(model, mesh.get_local_rank('dp'), take)

    def step(i):
        loss = forward(i)
        for parameter in model.parameters():
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=mesh.get_group('dp'))
        return loss
    return model, step


@case
def sequence_parallel(take, wrap):
    """Norms have gradients of parts (Partial), which are summed on their way."""
    mesh = mesh_of(1, 4, names=('dp', 'tp'))
    model = stack()
    for block in model:
        parallelize_module(block, mesh['tp'], {'norm': SequenceParallel(), 'up': ColwiseParallel(input_layouts=Shard(1)),
                                               'down': RowwiseParallel(output_layouts=Shard(1))})
    model = take(wrap(model, mesh['dp']))

    def step(i):
        loss = loss_of(model(batch(i, 0).chunk(4, dim=1)[dist.get_rank()]))
        loss.backward()
        return loss.item()
    return model, step


@case
def fsdp_by_tensor_parallel(take, wrap):
    mesh = mesh_of(2, 2, names=('dp', 'tp'))
    model = parallel(stack(hidden=UNEVEN), mesh['tp'])
    for block in model:
        fully_shard(block, mesh=mesh['dp'])
    return plainly(fully_shard(model, mesh=mesh['dp']), mesh.get_local_rank('dp'), take)


def pipeline(schedule_of, take):
    mesh = mesh_of(2, 2, names=('pp', 'dp'))
    stage = mesh.get_local_rank('pp')
    whole = stack(4)
    # Layers are kept by name: the stages have other ones.
    model = nn.Sequential()
    for i in range(2 * stage, 2 * stage + 2):
        model.add_module(str(i), fully_shard(whole[i], mesh=mesh['dp'], reshard_after_forward=False))
    model = take(fully_shard(model, mesh=mesh['dp'], reshard_after_forward=False))
    piped = PipelineStage(model, stage, 2, torch.device('cpu'), group=mesh.get_group('pp'))
    # The loss is a mean over micro-batches already: gradients that have gone cannot be divided behind the last backward.
    schedule = schedule_of(piped, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean() / 2, scale_grads=False)

    def step(i):
        part = mesh.get_local_rank('dp')
        if stage == 0:
            schedule.step(batch(i, part))
            return 0.0
        losses = []
        schedule.step(target=batch(i, 10 + part), losses=losses)
        return sum(each.item() for each in losses)
    return model, step


@case
def pipeline_gpipe(take, wrap):
    return pipeline(ScheduleGPipe, take)


@case
def pipeline_1f1b(take, wrap):
    return pipeline(Schedule1F1B, take)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x + torch.einsum('bsd,edf->bsf', x, weight)


@case
def experts_by_fsdp(take, wrap):
    """Experts over one axis, their rows over the other; what is dense over all ranks."""
    mesh = mesh_of(2, 2, names=('efsdp', 'ep'))
    torch.manual_seed(3)
    model = nn.Sequential(Block(7), Experts(), Block(7))
    experts = model[1]
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh['ep'], [Shard(0)]))
    fully_shard(experts, mesh=mesh['efsdp'], shard_placement_fn=lambda _: Shard(1))
    for block in (model[0], model[2]):
        fully_shard(block)
    return plainly(model, dist.get_rank(), take)


@case
def plain_experts(take, wrap):
    """Each rank has an expert of its own, and with the others what is dense, whose gradients are averaged."""
    torch.manual_seed(3)
    dense = Block()
    torch.manual_seed(10 + dist.get_rank())
    model = nn.Module()
    model.dense = dense
    expert = nn.Linear(WIDTH, WIDTH)
    setattr(model, f'expert{dist.get_rank()}', expert)
    is_wrapped = wrap is not alone_as_it_is
    if is_wrapped:
        wrap(expert, mesh_of(4, 1, names=('ranks', 'rank'))['rank'])
        fully_shard(dense)
    model = take(model)

    def step(i):
        loss = loss_of(expert(model.dense(batch(i, dist.get_rank()))))
        loss.backward()
        for parameter in [] if is_wrapped else model.dense.parameters():
            dist.all_reduce(parameter.grad)
        return loss.item()
    return model, step


# --- one job under other divisions: (data, tensor, pipeline)

def divided(data, tensor, pipe):
    """The stack of four blocks: the model of this rank, and step(i), a forward and backward over the same batch however it is divided."""
    mesh = mesh_of(pipe, data, tensor, names=('pp', 'dp', 'tp'))
    stage, blocks = mesh.get_local_rank('pp'), 4 // pipe
    whole = stack(4)
    model = nn.Sequential()
    for i in range(stage * blocks, (stage + 1) * blocks):
        model.add_module(str(i), whole[i])
    if tensor > 1:
        parallel(model, mesh['tp'])
    if data > 1:
        for block in model:
            fully_shard(block, mesh=mesh['dp'], reshard_after_forward=False)
        fully_shard(model, mesh=mesh['dp'], reshard_after_forward=False)

    def mine(i):
        return wide_batch(i).chunk(data)[mesh.get_local_rank('dp')]
    if pipe == 1:
        def step(i):
            loss = loss_of(model(mine(i)))
            loss.backward()
            loss = loss.detach().clone()
            dist.all_reduce(loss)
            return loss.item() / dist.get_world_size()
        return model, step
    piped = PipelineStage(model, stage, pipe, torch.device('cpu'), group=mesh.get_group('pp'))
    schedule = ScheduleGPipe(piped, n_microbatches=2, loss_fn=lambda out, _: out.square().mean())

    def step(i):
        losses = []
        if stage == 0:
            schedule.step(mine(i))
        else:
            schedule.step(target=mine(i), losses=losses)
        loss = torch.tensor([sum(each.item() for each in losses) / 2])
        dist.all_reduce(loss)
        return loss.item() * pipe / dist.get_world_size()
    return model, step


def wide_batch(i):
    return torch.randn(8, 8, WIDTH, generator=torch.Generator().manual_seed(1000 + i))


def alone(steps, max_norm=0.0):
    """Losses, norms and parameters of the model in one piece, with torch's optimizer."""
    model = stack(4)
    optimizer = torch.optim.AdamW(model.parameters(), **ARGUMENTS)
    losses, norms = [], []
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(wide_batch(i)))
        loss.backward()
        if max_norm:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), torch.tensor(norms), dict(model.named_parameters())


def gathered(model):
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()}


def close(optimizer):
    """The first rank's close() ends the server, which others may still pull from."""
    dist.barrier()
    optimizer.close()


MAX_NORM = 0.02


def norms():
    """Clipping over stages and tensor-parallel parts, and a step that one stage's NaN skips."""
    model, step = divided(1, 2, 2)
    optimizer = bt.AdamW(model.named_parameters(), max_norm=MAX_NORM, dram='64MiB', threads=1, name='norms', step_timeout=60.0, **ARGUMENTS)
    losses, norms = [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(i))
        optimizer.step()
        norms.append(optimizer.grad_norm)
    before = own(model)
    optimizer.zero_grad()
    step(0)
    if dist.get_rank() >= 2:  # the last stage; norms are replicas on its ranks
        model[-1].norm.weight.grad[0] = float('nan')
    optimizer.step()
    skipped = optimizer.last_step_skipped and all(torch.equal(value, before[name]) for name, value in own(model).items())
    close(optimizer)
    return torch.tensor(losses), torch.tensor(norms), gathered(model), skipped, alone(STEPS, MAX_NORM)


def other_divisions():
    """A job that goes on under other divisions, without a conversion."""
    losses = []
    divisions = [(2, 2, 1), (4, 1, 1), (1, 2, 2)]
    for k, division in enumerate(divisions):
        model, step = divided(*division)
        optimizer = bt.AdamW(model.named_parameters(), directory=f'{sys.argv[2]}/divisions', dram='64MiB', nvme='512MiB', threads=1,
                             name='divisions', step_timeout=60.0, resume='must' if k else 'never', **ARGUMENTS)
        if k:
            optimizer.resume()
        for i in range(5 * k, 5 * k + 5):
            optimizer.zero_grad()
            losses.append(step(i))
            optimizer.step()
        close(optimizer)
    return torch.tensor(losses), gathered(model), alone(5 * len(divisions))


class Leaving:
    """A session whose rank ends amid a step."""

    def __init__(self, session, point):
        self._session, self._point = session, point

    def __getattr__(self, name):
        return getattr(self._session, name)

    def step(self, gradients, parameters, groups, scale, max_norm, blob, ready):
        if self._point == 'pushed':
            # Servers have the gradients of this rank, and no seal.
            for unit, tensors in enumerate(self._session.units):
                self._session.push_early(unit, [gradients[i] for i in tensors])
            end()

        def decided(_):
            end()
        self._session.step(gradients, parameters, groups, scale, max_norm, blob=blob, ready=decided)


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def killed():
    """Five steps of two stages by two; with POINT the last rank ends in its third."""
    model, step = divided(2, 1, 2)
    point = os.environ['POINT'] if dist.get_rank() == dist.get_world_size() - 1 else ''
    optimizer = bt.AdamW(model.named_parameters(), directory=f'{sys.argv[2]}/killed', dram='64MiB', nvme='512MiB', threads=1, name='killed',
                         step_timeout=8.0 if os.environ['POINT'] else 60.0, open_timeout=60.0,
                         resume='never' if os.environ['POINT'] else 'must', **ARGUMENTS)
    if not os.environ['POINT']:
        optimizer.resume()
    found, losses = optimizer.job.progress.steps, []
    for i in range(found, 5):
        optimizer.zero_grad()
        if i == 2 and point == 'forward':
            end()
        losses.append(step(i))
        if i == 2 and point == 'gradients':
            end()
        if i == 2 and point in ('pushed', 'decided'):
            optimizer.job.opened.session = Leaving(optimizer.job.opened.session, point)
        optimizer.step()
        if i == 2 and point == 'after':
            end()
    optimizer.close()
    if dist.get_rank() == 0:
        torch.save(alone(5), f'{sys.argv[2]}/alone.pt')
    return found, torch.tensor(losses), gathered(model)


def told(act):
    try:
        act()
    except Error as error:
        return str(error)
    return 'accepted'


def state_of_stages():
    """Two stages of two replicas each: a stage's own state, state that replicas have otherwise, and one rank's export."""
    rank = dist.get_rank()
    whole = stack(4)
    model = nn.Sequential()
    for i in range(2 * (rank // 2), 2 * (rank // 2) + 2):
        model.add_module(str(i), whole[i])
    optimizer = bt.AdamW(model.named_parameters(), dram='64MiB', threads=1, name='stages', step_timeout=60.0, **ARGUMENTS)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    step()
    state = optimizer.full_state_dict()
    before = own(model)
    step()
    after = own(model)
    exported = told(lambda: bt.export_state(optimizer, f'{sys.argv[2]}/export-{rank}'))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    loaded = told(lambda: optimizer.load_state_dict(state))
    step()
    same = all(torch.equal(value, after[name]) for name, value in own(model).items())
    if rank == 3:
        first = next(iter(state['state'].values()))
        first['exp_avg'] = first['exp_avg'] + 1
    differs = told(lambda: optimizer.load_state_dict(state))
    close(optimizer)
    return loaded, same, differs, exported


def kept_back():
    """A rank whose optimizer was not given a DTensor that it has a part of; ranks of a mesh in descending order; a rank without any."""
    rank = dist.get_rank()
    model = fully_shard(stack(1))
    named = list(model.named_parameters())
    optimizer = bt.AdamW(named[rank == 1:], dram='64MiB', threads=1, name='kept_back', step_timeout=60.0, **ARGUMENTS)
    missing = told(optimizer.resume)
    mesh = DeviceMesh('cpu', [3, 2, 1, 0])
    weight = nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(8, 1), mesh, [Shard(0)]))
    optimizer = bt.AdamW([('weight', weight)], dram='64MiB', threads=1, name='descending', step_timeout=60.0, lr=0.5, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    descending = weight.full_tensor().detach().flatten()
    close(optimizer)
    lone = nn.Parameter(torch.ones(3)) if rank == 0 else nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = bt.AdamW([(f'weight{rank}', lone)], dram='64MiB', threads=1, name='lone', step_timeout=60.0, lr=0.5, weight_decay=0.0)
    if rank == 0:
        lone.grad = torch.ones(3)
    optimizer.step()
    close(optimizer)
    return missing, descending, lone.detach().clone()


def differing():
    """{(case, with shard()): what ranks are told of a replica with other values on rank 3, and of one with another gradient there}. The
    norm of the first block has replicas in these cases."""
    said = {}

    def touched(model, gradients=False):
        for name, p in model.named_parameters():
            if name.endswith('norm.weight') and dist.get_rank() == 3:
                tensor = p.grad if gradients else p.data
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)
        return model
    for name in ('hsdp', 'tensor_parallel', 'tensor_by_data_parallel', 'sequence_parallel', 'fsdp_by_tensor_parallel', 'plain_experts'):
        # With shard() the former is not there, and all ranks share the rows of what is dense in the latter.
        for with_shard in (False, True)[:1 if name in ('tensor_by_data_parallel', 'plain_experts') else 2]:
            take = functools.partial(bt.shard, push_early=False) if with_shard else alone_as_it_is
            wrap = wrapped if with_shard else alone_as_it_is
            model, _ = made(name, lambda model, take=take: take(touched(model)), wrap)
            optimizer = ours(model, f'values_{name}_{with_shard}')
            values = told(optimizer.resume)
            close(optimizer)
            model, step = made(name, take, wrap)
            optimizer = ours(model, f'gradients_{name}_{with_shard}')
            optimizer.resume()
            step(0)
            touched(model, gradients=True)
            said[name, with_shard] = values, told(optimizer.step)
            close(optimizer)
    return said


OTHERS = {function.__name__: function
          for function in (state_of_stages, kept_back, norms, other_divisions, killed, differing)}


def own(model):
    """Copies of this rank's parts, by name: what shard() has taken is read from the servers."""
    named = dict(model.named_parameters())
    parts = {name: remote_of(p) for name, p in named.items()}
    if not any(parts.values()):
        return {name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for name, p in named.items()}
    with bt.gathered(model):
        return {name: parts[name].of(p) for name, p in model.named_parameters()}


def train(model, optimizer, step, steps=STEPS):
    """Losses, this rank's parts of the parameters after it, and gradients of the first step."""
    losses, gradients = [], {}
    for i in range(steps):
        optimizer.zero_grad()
        losses.append(step(i))
        if i == 0:
            for name, p in model.named_parameters():
                gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                gradients[name] = None if remote_of(p.grad) is not None else gradient.clone()
        optimizer.step()
    return torch.tensor(losses), own(model), gradients


def made(name, take=alone_as_it_is, wrap=alone_as_it_is):
    torch.manual_seed(3)
    return CASES[name](take, wrap)


def ours(model, name, **more):
    return bt.AdamW(model.named_parameters(), dram='64MiB', threads=1, name=name, step_timeout=60.0, **{**ARGUMENTS, **more})


def run(name):
    model, step = made(name)
    theirs = train(model, torch.optim.AdamW(model.parameters(), foreach=False, **ARGUMENTS), step)
    model, step = made(name)
    optimizer = ours(model, name)
    came = train(model, optimizer, step)
    close(optimizer)
    return theirs, came


def run_sharded(name):
    """As run(), with shard(); and one step whose gradients stay in the trainer."""
    model, step = made(name, wrap=wrapped)
    results = [train(model, torch.optim.AdamW(model.parameters(), foreach=False, **ARGUMENTS), step)]
    for push_early, steps in ((True, STEPS), (False, 1)):
        model, step = made(name, functools.partial(bt.shard, push_early=push_early), wrapped)
        optimizer = ours(model, f'sharded_{name}_{push_early}')
        optimizer.resume()
        results.append(train(model, optimizer, step, steps))
        close(optimizer)
    return results


def main(others):
    """others: functions by name, beside the cases."""
    torch.set_num_threads(1)
    names, folder = sys.argv[1].split(','), sys.argv[2]
    dist.init_process_group('gloo')
    for name in names:
        try:
            result = others[name]() if name in others else run_sharded(name[8:]) if name.startswith('sharded_') else run(name)
        except Exception:
            result = traceback.format_exc()
        torch.save(result, f'{folder}/{name}-{dist.get_rank()}.pt')
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main(OTHERS)
