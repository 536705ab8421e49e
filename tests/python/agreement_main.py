"""One rank of test_agreement.py: agreement_main.py FOLDER, with torch's variables. Runs every case, and writes what each was told, and
after how many seconds, to FOLDER/agreement-RANK.pt."""
import contextlib
import copy
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
from scripts import batches, loss_of, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ballast
import ballast.torch as bt
from ballast.torch.ranks import groups

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def make(parameters, **more):
    """Of a job by the case's name."""
    name = sys._getframe(1).f_code.co_name
    return bt.AdamW(parameters, **{'lr': 1e-2, 'dram': '64MiB', 'threads': 1, 'name': name, 'step_timeout': 60.0, **more})


def model_of(seed=3):
    torch.manual_seed(seed)
    return mlp()


def backward(model, seed=7):
    model.zero_grad()
    loss_of(model, next(batches(1, seed))).backward()


def own_backward(model):
    backward(model, seed=dist.get_rank())


def told(act):
    try:
        act()
    except ballast.Error as error:
        return str(error)
    return 'accepted'


def parameters_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- values and gradients

@case
def values():
    model = model_of(seed=dist.get_rank())
    optimizer = make(model.named_parameters())
    first = told(optimizer.resume)
    for parameter in model.parameters():  # what it advises
        dist.broadcast(parameter.data, 0)
    return first, told(optimizer.resume)


@case
def gradients():
    model = model_of()
    optimizer = make(model.named_parameters())
    own_backward(model)
    first = told(optimizer.step)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return first, told(optimizer.step), parameters_of(model)


@case
def gradients_of_a_later_step():
    """Of a large tensor alone: in nobody's turn, in its own, and with debug. Of all tensors, in nobody's turn."""
    results = []
    for debug in (False, True):
        model = model_of()
        optimizer = make(model.named_parameters(), debug=debug, name=f'later_{debug}')
        backward(model)
        optimizer.step()
        turns = {member.name: member.turn % 64 for member in optimizer.job.members}
        nobodys = next(step for step in range(64) if step not in turns.values())
        for steps in (nobodys,) if debug else (nobodys, 64 + turns['0.weight']):
            backward(model)
            model[0].weight.grad.mul_(1 + dist.get_rank())
            optimizer.job.progress.steps = steps
            results.append(told(optimizer.step))
        if not debug:
            own_backward(model)
            optimizer.job.progress.steps = nobodys
            results.append(told(optimizer.step))
        optimizer.close()
    return results


@case
def gradients_that_round_otherwise():
    model = model_of()
    optimizer = make(model.named_parameters())
    results = []
    for factor in (1 + 1e-6, 1.2):
        backward(model)
        for member in optimizer.job.members:  # as at a first step
            member.agreed = False
        if dist.get_rank() == 1:
            model[3].weight.grad.mul_(factor)
        results.append(told(optimizer.step))
    return results


@case
def ignored_by_ddp():
    model = model_of()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['3.bias'])
    wrapped = DistributedDataParallel(model)
    optimizer = make(wrapped.named_parameters())
    own_backward(wrapped)
    return told(optimizer.step)


@case
def edits():
    model = model_of()
    optimizer = make(model.named_parameters())
    results = []
    for factor in (0.5, 1.0 + dist.get_rank()):
        backward(model)
        optimizer.step()
        backward(model)
        with torch.no_grad():
            model[2].weight.mul_(factor)
        results.append(told(optimizer.step))
    return results


@case
def other_values_before_a_load():
    """A load takes masters from parameters that were edited."""
    model = model_of()
    optimizer = make(DistributedDataParallel(model).module.named_parameters())
    backward(model)
    optimizer.step()
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())
    return told(lambda: optimizer.load_state_dict(optimizer.full_state_dict()))


@case
def late_parameters():
    model = model_of()
    late = nn.Parameter(torch.full((4,), float(dist.get_rank())))
    optimizer = make(model.named_parameters())
    backward(model)
    optimizer.step()
    optimizer.add_param_group({'params': [('late', late)]})
    backward(model)
    late.grad = torch.ones(4)
    first = told(optimizer.step)
    late.data.zero_()
    return first, told(optimizer.step)


@case
def a_resumed_job():
    """Parameters come from it; gradients are compared."""
    folder = f'{sys.argv[1]}/state'
    arguments = {'directory': folder, 'nvme': '1GiB'}
    model = model_of()
    optimizer = make(model.named_parameters(), **arguments)
    backward(model)
    optimizer.step()
    optimizer.close()
    other = model_of(seed=10 + dist.get_rank())
    optimizer = make(other.named_parameters(), resume='must', **arguments)
    results = [told(optimizer.resume), torch.equal(parameters_of(other), parameters_of(model))]
    own_backward(other)
    return *results, told(optimizer.step)


# --- what is refused by name

@case
def fsdp1_flat():
    model = FullyShardedDataParallel(model_of(), device_id=torch.device('cpu'))
    own_backward(model)
    return told(make(model.named_parameters()).step)


@case
def fsdp1_original_parameters():
    model = FullyShardedDataParallel(model_of(), device_id=torch.device('cpu'), use_orig_params=True)
    own_backward(model)
    return told(make(model.named_parameters()).step)


@case
def megatron():
    model = model_of()
    model[0].weight.tensor_model_parallel = True
    return told(make(model.named_parameters()).resume)


@case
def fsdp2_beside_a_scalar():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.net = nn.Parameter(torch.tensor(1.0)), model_of()
    model = Scaled()
    fully_shard(model, ignored_params={model.scale})
    model.scale.grad = torch.tensor(float(dist.get_rank()))  # which nobody reduces
    return told(make(model.named_parameters()).step)


@case
def a_mesh_smaller_than_the_world():
    model = model_of()
    fully_shard(model, mesh=init_device_mesh('cpu', (2, 1), mesh_dim_names=('replicas', 'rows'))['rows'])
    own_backward(model)
    return told(make(model.named_parameters()).step)


# --- ranks that mean something else

@case
def stages_that_number_their_layers_anew():
    torch.manual_seed(3 + dist.get_rank())
    stage = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    return told(make(stage.named_parameters()).resume)


@case
def stages_with_one_seed():
    """Which begin alike."""
    torch.manual_seed(3)
    stage = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    optimizer = make(stage.named_parameters())
    own_backward(stage)
    return told(optimizer.step)


@case
def many_parameters_that_differ():
    """The longest message, too."""
    lengths, real = [], groups.Group._exchange

    def watched(group, what, timeout, option, mine):
        lengths.append(len(mine))
        return real(group, what, timeout, option, mine)
    names = [hashlib.sha256(f'{i}'.encode()).hexdigest() for i in range(4000)]
    optimizer = make([(name, nn.Parameter(torch.zeros(1 + i // 3999 * dist.get_rank()))) for i, name in enumerate(names)])
    groups.Group._exchange = watched
    try:
        return told(optimizer.resume), max(lengths)
    finally:
        groups.Group._exchange = real


@case
def frozen_on_one_rank():
    model = model_of()
    model[3].bias.requires_grad_(dist.get_rank() == 1)
    return told(make(model.named_parameters()).resume)


@case
def another_shape():
    model = nn.Linear(4, 4 + dist.get_rank())
    return told(make(model.named_parameters()).resume)


@case
def another_name():
    return told(make(model_of().named_parameters(), name=f'job{dist.get_rank()}').resume)


@case
def servers_on_one_rank():
    more = {'servers': '127.0.0.1:1', 'dram': None, 'threads': None} if dist.get_rank() == 1 else {}
    return told(make(model_of().named_parameters(), **more).resume)


@case
def an_error_on_one_rank():
    model = model_of()
    if dist.get_rank() == 1:
        model[3].bias = nn.Parameter(model[3].bias.detach().double())
    return told(make(model.named_parameters()).resume)


@case
def other_data_on_one_rank():
    model = model_of()
    optimizer = make(model.named_parameters())
    backward(model)
    optimizer.step()
    backward(model)
    if dist.get_rank() == 1:
        model[3].bias.data = torch.zeros(5)
    return told(optimizer.step)


@case
def unknown_and_frozen():
    """A job that has tensors which are frozen here, and not those that are new: found at once."""
    arguments = {'directory': f'{sys.argv[1]}/grown', 'nvme': '1GiB'}
    model = model_of()
    optimizer = make(model.named_parameters(), **arguments)
    backward(model)
    optimizer.step()
    optimizer.close()
    model = model_of()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = make([*model.named_parameters(), ('more.a', nn.Parameter(torch.ones(3))), ('more.b', nn.Parameter(torch.ones(3)))],
                     resume='must', **arguments)
    opens = []
    real = ballast._native.Session.open
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, ballast._native.Session, 'open', real)
        ballast._native.Session.open = staticmethod(lambda *of: opens.append(1) or real(*of))
        steps = optimizer.resume().step
    return steps, len(opens), len(optimizer.job.members)


# --- a rank that does not come

@case
def a_rank_that_does_not_come():
    seconds, store = {'step_timeout': 2.0, 'open_timeout': 1.0}, dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(['given_up'])
    said = told(make(model_of().named_parameters(), **seconds).resume)
    store.set('given_up', b'')
    return said


# --- placements of gradients

def sharded_embedding():
    torch.manual_seed(3)
    embedding = nn.Embedding(10, 4)
    whole = copy.deepcopy(embedding)
    parallelize_module(embedding, init_device_mesh('cpu', (2,)), RowwiseParallel(input_layouts=Replicate()))
    return embedding, whole


@case
def a_gradient_that_is_replicated():
    """A row-parallel embedding has one, of full size; and one that is partial."""
    embedding, whole = sharded_embedding()
    optimizer, other = make(embedding.named_parameters()), torch.optim.AdamW(whole.parameters(), lr=1e-2)
    tokens = torch.tensor([1, 2, 2, 7, 9])
    results = []
    for i in range(4):
        for module in (embedding, whole):
            module.zero_grad()
            out = module(tokens)
            (out.full_tensor() if isinstance(out, DTensor) else out).square().sum().backward()
        if i % 2:
            mesh = embedding.weight.device_mesh
            half = embedding.weight.grad.full_tensor() / 2
            embedding.weight.grad = DTensor.from_local(half, mesh, [torch.distributed.tensor.Partial()])
        results.append(str(embedding.weight.grad.placements))
        optimizer.step()
        other.step()
    return results, embedding.weight.full_tensor().detach() - whole.weight.detach()


@case
def a_gradient_of_another_kind():
    embedding, whole = sharded_embedding()
    embedding.weight.grad = torch.ones(10, 4)
    whole.weight.grad = distribute_tensor(torch.ones(10, 4), embedding.weight.device_mesh, [Shard(0)])
    return told(make(embedding.named_parameters(), name='plain_on_dtensor').step), told(make(whole.named_parameters()).step)


def run_cases(cases, name):
    """As the main program of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    results = {}
    for each, run in cases.items():
        if len(sys.argv) > 2 and each not in sys.argv[2:]:
            continue
        began = time.monotonic()
        results[each] = run(), time.monotonic() - began
        print(f'{each}: {results[each]}', flush=True)
        dist.barrier()
    torch.save(results, f'{sys.argv[1]}/{name}-{os.environ["RANK"]}.pt')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    run_cases(CASES, 'agreement')
