"""One rank of test_shard*.py and test_gpu_shard.py: shard_main.py SCRIPT[,SCRIPT...] FOLDER, as rank_main.py.
BALLAST_TEST_DEVICE: cpu or cuda."""
import copy
import ctypes
import functools
import gc
import io
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ballast.torch as bt
from ballast.torch.sharding import pulls, pushes

# Gradients of the keys' bias are nothing but rounding: eps keeps an update of it small.
ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1, 'eps': 1e-4}
VOCABULARY = 17
DEVICE = os.environ.get('BALLAST_TEST_DEVICE', 'cpu')
STEPS = 30 if os.environ.get('TEST_ROUNDS') == 'full' else 5  # of both()
SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.down = nn.Linear(2 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """With a tied head. Rows of most parameters do not divide by two ranks."""

    def __init__(self, width=6, blocks=3, recompute=None, tied=True, rows=VOCABULARY):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute  # None, or use_reentrant
        self.order = None  # of the blocks; None: as they are

    def forward(self, tokens):
        x = self.embed(tokens)
        for i in self.order or range(len(self.blocks)):
            block = self.blocks[i]
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def made(**more):
    torch.manual_seed(3)
    return Net(**more)


def plain(model, **policy):
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    return model


def ours(model, **more):
    """name: the calling script's, unless it is given."""
    arguments = {**ARGUMENTS, 'name': sys._getframe(1).f_code.co_name, 'dram': '128MiB', 'threads': 2}
    return bt.AdamW(model.named_parameters(), **{**arguments, **more})


def theirs(parameters):
    return torch.optim.AdamW(parameters, **ARGUMENTS)


def batches(count):
    """Of this rank."""
    generator = torch.Generator('cpu').manual_seed(5 + dist.get_rank())
    for _ in range(count):
        yield torch.randint(16, (4, 8), generator=generator, device='cpu').to(DEVICE)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients_of(model):
    """None: it went to the servers in backward, or there is none."""
    local = [None if p.grad is None else p.grad.to_local() for p in model.parameters()]
    return [None if each is None or hasattr(each, 'of') else each.clone() for each in local]


def train(model, optimizer, steps=30, micro=1, sync_all=False):
    """Losses, and gradients of the first two steps."""
    losses, gradients = [], []
    for i, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        for k, tokens in enumerate(batch.chunk(micro)):
            model.set_requires_gradient_sync(sync_all or k == micro - 1)
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.detach())
        if i < 2:
            gradients.append(gradients_of(model))
        optimizer.step()
    return torch.stack(losses), gradients


def whole(model):
    """On the host."""
    return [p.detach().full_tensor().float().cpu() for p in model.parameters()]


def whole_of(model):
    with bt.gathered(model):
        values = [p.detach().clone().float() for p in model.parameters()]
    dist.barrier()  # the first rank's close() ends the server
    return values


def both(name, make=made, policy=None, push_early=False, steps=STEPS, backwards=1, extra=None, **more):
    """Plain FSDP2 with torch's optimizer, and shard() with ours: (losses, gradients of two steps, parameters) of each, and stats. extra:
    arguments that shard() alone has."""
    policy = policy or {}
    twin = plain(make(), **policy)
    results = [[*train(twin, theirs([p for p in twin.parameters() if p.requires_grad]), steps, **more), whole(twin)]]
    model = bt.shard(make(), push_early=push_early, backwards=backwards, **policy, **(extra or {}))
    optimizer = ours(model, name=name)
    results.append([*train(model, optimizer, steps, **more), whole_of(model)])
    stats = optimizer.stats()
    optimizer.close()
    return results, stats


@script
def uneven():
    return both('uneven')


@script
def even():
    return both('even', make=lambda: made(width=8, tied=False, rows=16))


@script
def recompute_reentrant():
    return both('recompute_reentrant', make=lambda: made(recompute=True))


@script
def recompute():
    return both('recompute', make=lambda: made(recompute=False))


@script
def accumulation():
    return both('accumulation', micro=2)


@script
def accumulation_synced():
    return both('accumulation_synced', micro=2, sync_all=True)


@script
def no_reshard():
    return both('no_reshard', policy={'reshard_after_forward': False})


@script
def bf16():
    return both('bf16', policy={'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)})


@script
def early():
    return both('early', push_early=True)


@script
def early_accumulation():
    return both('early_accumulation', push_early=True, micro=2)


@script
def early_synced():
    return both('early_synced', push_early=True, micro=2, sync_all=True, backwards=2)


@functools.cache
def hybrid_mesh():
    return init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=('replicate', 'shard'))


@script
def hybrid():
    return both('hybrid', policy={'mesh': hybrid_mesh()}, steps=10)


@script
def hybrid_early():
    return both('hybrid_early', policy={'mesh': hybrid_mesh()}, push_early=True, steps=10)


@script
def frozen():
    def make():
        model = made()
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        model.blocks[2].norm.requires_grad_(False)
        return model
    return both('frozen', make=make, push_early=True)


def on_meta(**more):
    with torch.device('meta'):
        return Net(**more)


def meta_model(name, **more):
    """Sharded, with its optimizer."""
    model = bt.shard(on_meta(**more))
    return model, ours(model, name=name)


@script
def meta():
    """Values that a model from the meta device begins with, and losses."""
    model, optimizer = meta_model('meta')
    optimizer.resume()
    values = dict(zip([name for name, _ in model.named_parameters()], whole_of(model)))
    losses, _ = train(model, optimizer)
    optimizer.close()
    return values, losses


@script
def clipped():
    """max_norm with gradients that went in backward, against torch's clipping."""
    twin, model = plain(made()), bt.shard(made())
    other = theirs(twin.parameters())
    optimizer = ours(model, max_norm=0.05)
    losses, norms = [], []
    for tokens in batches(20):
        for each in (other, optimizer):
            each.zero_grad()
        pair = [loss_of(each, tokens) for each in (twin, model)]
        for loss in pair:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.05).full_tensor()
        other.step()
        optimizer.step()
        losses.append([loss.item() for loss in pair])
        norms.append([norm.item(), optimizer.grad_norm])
    optimizer.close()
    return torch.tensor(losses), torch.tensor(norms)


@script
def discarded():
    """Backward passes whose gradients no step takes, by zero_grad() and by the model's, leave no trace."""
    twin, model = plain(made()), bt.shard(made())
    other, optimizer = theirs(twin.parameters()), ours(model)
    losses = []
    for i, tokens in enumerate(batches(12)):
        pair = []
        for each, its in ((twin, other), (model, optimizer)):
            if i % 3 == 1:
                loss_of(each, tokens.flip(0) // 2).backward()
                (its if i % 2 else each).zero_grad()
            loss = loss_of(each, tokens)
            loss.backward()
            its.step()
            its.zero_grad()
            pair.append(loss.item())
        with torch.no_grad():
            assert abs(loss_of(twin, tokens).item() - loss_of(model, tokens).item()) < 1e-4
        losses.append(pair)
    optimizer.close()
    return torch.tensor(losses)


@script
def skipped():
    """A gradient that is not finite: version after it, whether it was skipped, and parameters before and after."""
    model = bt.shard(made())
    optimizer = ours(model)
    tokens = next(batches(1))
    loss_of(model, tokens).backward()
    optimizer.step()
    before = whole_of(model)
    optimizer.zero_grad()
    (loss_of(model, tokens) * float('nan')).backward()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        optimizer.step()
    after, was_skipped = whole_of(model), optimizer.last_step_skipped
    optimizer.zero_grad()
    loss_of(model, tokens).backward()
    optimizer.step()
    later = whole_of(model)
    optimizer.close()
    return was_skipped, before, after, later


@script
def late_pulls():
    """20 ms for each pull: seconds that gathers waited in each step, gathers in each, late pulls, and the seconds of the 20 ms that gathers
    waited for, whatever else kept them; steps 6 and 7 take blocks in another order."""
    begin, end = pulls.Pulls._begin, pulls._Pull.end
    begun, slept = {}, [0.0]

    def slow_begin(self, unit, job):
        pull = begin(self, unit, job)
        begun[pull.number] = time.monotonic()
        return pull

    def slow_end(self):
        end(self)
        left = max(0.0, begun[self.number] + LATENCY - time.monotonic())
        slept[0] += left
        time.sleep(left)
    pulls.Pulls._begin, pulls._Pull.end = slow_begin, slow_end
    try:
        twin, model = plain(made(blocks=6)), bt.shard(made(blocks=6))
        other, optimizer = theirs(twin.parameters()), ours(model)
        rows, losses = [], []
        for i, tokens in enumerate(batches(9)):
            before, slept_before = optimizer.stats(), slept[0]
            pair = []
            for each, its in ((twin, other), (model, optimizer)):
                if i in (6, 7):
                    each.order = [1, 0, 2, 3, 4, 5]
                else:
                    each.order = None
                its.zero_grad()
                loss = loss_of(each, tokens)
                loss.backward()
                its.step()
                pair.append(loss.item())
            losses.append(pair)
            after = optimizer.stats()
            rows.append([after[key] - before[key] for key in ('unit_pull_wait_seconds', 'unit_pulls', 'unit_pulls_late')] +
                        [slept[0] - slept_before])
        optimizer.close()
        return torch.tensor(rows), torch.tensor(losses)
    finally:
        pulls.Pulls._begin, pulls._Pull.end = begin, end


LATENCY = 0.02


@script
def evaluated():
    """Late pulls of each of five passes without gradients."""
    model = bt.shard(made())
    optimizer = ours(model)
    late = [0]
    with torch.no_grad():
        for tokens in batches(5):
            model(tokens)
            late.append(optimizer.stats()['unit_pulls_late'])
    dist.barrier()
    optimizer.close()
    return [after - before for before, after in zip(late, late[1:])]


@script
def alive():
    """Units whose gradients were alive when another went, and after backward; servers have had a minute to take them."""
    model = bt.shard(made(blocks=5))
    optimizer = ours(model)
    refs, most = [], 0
    send = pushes.Pushes._send

    def left(wanted):
        """Gradients that are alive, once no more than `wanted` are."""
        until = time.monotonic() + 60
        while (alive := sum(not ref.expired() for ref in refs)) > wanted and time.monotonic() < until:
            time.sleep(0.001)
        return alive

    def watched(self, unit, tensors):
        nonlocal most
        of = {StorageWeakRef(self._hooked.members[j].parameter.grad.to_local().untyped_storage()) for j in tensors}
        most = max(most, left(1) + 1)  # beside the one that goes
        refs.extend(of)
        send(self, unit, tensors)
    pushes.Pushes._send = watched
    try:
        for tokens in batches(3):
            loss_of(model, tokens).backward()
            after = left(0)
            real = sum(isinstance(p.grad, torch.Tensor) and not hasattr(p.grad.to_local(), 'of') for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    finally:
        pushes.Pushes._send = send
    optimizer.close()
    return most, after, real


def resident():
    with open('/proc/self/statm', encoding='ascii') as file:
        return int(file.read().split()[1]) * 4096


@script
def memory():
    """Growth of this rank's memory, in MiB: by shard() of 512 MiB of parameters with values, which are freed once the job is open; of as
    much from meta, in a full run, since test_shard_memory.py bounds that, too; on both ranks."""
    grown = []
    for where in ('cpu', 'meta') if os.environ.get('TEST_ROUNDS') == 'full' else ('cpu',):
        with torch.device(where):
            model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))
        before = resident()
        bt.shard(model, units=list(model), prefetch_bytes=1)
        optimizer = bt.SGD(model.named_parameters(), lr=0.1, name=f'memory_{where}', dram='2GiB', threads=2)
        if where == 'cpu':
            before -= 512 << 20
        with torch.no_grad():
            model(torch.zeros(1, 2048))
            model(torch.zeros(1, 2048))
        gc.collect()
        ctypes.CDLL('libc.so.6').malloc_trim(0)
        grown.append((resident() - before) >> 20)
        optimizer.close()
        del model, optimizer
    return grown


@script
def memory_of_a_gpu():
    """The most that training 32 units of 16 MiB took there, in MiB, and the pinned memory that it took of the host."""
    with torch.device('meta'):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))
    bt.shard(model, units=list(model), prefetch_bytes=32 << 20)
    optimizer = bt.SGD(model.named_parameters(), lr=0.1, name='memory_of_a_gpu', dram='2GiB', threads=2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2048)).sum().backward()
        optimizer.step()
    taken = torch.cuda.max_memory_allocated(), torch.cuda.host_memory_stats()['allocated_bytes.peak']
    optimizer.close()
    return [each >> 20 for each in taken]


def told(function):
    try:
        function()
    except Exception as error:
        return str(error)
    return 'nothing'


@script
def refused():
    """What each bad use is told."""
    said = {}
    model = bt.shard(made())
    tokens = next(batches(1))
    said['no optimizer'] = told(lambda: model(tokens))
    said['twice'] = told(lambda: bt.shard(model))
    optimizer = ours(model)
    loss_of(model, tokens).backward()
    p = model.blocks[1].up.weight
    said['read'] = told(lambda: p.sum().item())
    said['address'] = told(lambda: p.to_local().data_ptr())
    said['whole'] = told(lambda: p.full_tensor())
    with torch.no_grad():
        said['write'] = told(lambda: p.mul_(2))
    said['to'] = told(lambda: model.to(torch.bfloat16))
    said['copy'] = told(lambda: copy.deepcopy(model))
    said['save'] = told(lambda: torch.save(model.blocks[1].up.weight, io.BytesIO()))
    said['clip'] = told(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    said['torch'] = told(lambda: torch.optim.AdamW(model.parameters()).step())
    said['second backward'] = told(lambda: loss_of(model, tokens).backward())
    optimizer.zero_grad()
    optimizer.close()
    some = bt.shard(made())
    half = bt.AdamW([(name, q) for name, q in some.named_parameters() if 'blocks.1' not in name], name='half', dram='128MiB', threads=2)
    said['half'] = told(lambda: some(tokens))
    said['two optimizers'] = told(lambda: bt.AdamW(some.named_parameters(), name='second', dram='128MiB', threads=2))
    half.close()
    said['offload'] = told(lambda: bt.shard(made(), offload_policy=CPUOffloadPolicy()))
    offloaded = made()
    fully_shard(offloaded, offload_policy=CPUOffloadPolicy(pin_memory=False))
    said['offload before'] = told(lambda: bt.shard(offloaded))
    said['reshard'] = told(lambda: bt.shard(made(), reshard_after_forward=2))
    said['wrapped'] = told(lambda: bt.shard(plain(made()), reshard_after_forward=False))
    said['units'] = told(lambda: bt.shard(made(), units=[nn.Linear(1, 1)]))
    part = made()
    fully_shard(part.blocks[0])
    said['outside'] = told(lambda: bt.shard(part))
    version, torch.__version__ = torch.__version__, '2.6.0'
    said['version'] = told(lambda: bt.shard(made()))
    torch.__version__ = version
    kept = FSDPModule.__dict__.get('set_custom_all_gather')
    if kept is not None:
        del FSDPModule.set_custom_all_gather
    said['collectives'] = told(lambda: bt.shard(made(), gather='q8'))
    if kept is not None:
        FSDPModule.set_custom_all_gather = kept
    with torch.device('meta'):
        bare = nn.ParameterDict({'lone': nn.Parameter(torch.empty(4, 4))})
        buffered = nn.Sequential(nn.Linear(4, 4))
        buffered.register_buffer('scale', torch.ones(4))
    bt.shard(bare)
    lone = ours(bare, name='lone')
    said['no values'] = told(lone.resume)
    lone.close()
    said['buffer'] = told(lambda: bt.shard(buffered))
    said['nothing sharded'] = told(lambda: bt.gathered(made()).__enter__())
    return said


@script
def after_close():
    """What a second new job of one model is told; and the loss of its forward passes in inference mode, which FSDP2 alone can make."""
    model, twin = bt.shard(made()), plain(made())
    first = ours(model)
    tokens = next(batches(1))
    with torch.inference_mode():
        losses = [loss_of(each, tokens).item() for each in (twin, model, model)]
    dist.barrier()
    first.close()
    closed = told(lambda: model(tokens))
    second = ours(model, name='second')
    again = told(lambda: model(tokens))
    second.close()
    return losses, closed, again


@script
def changed():
    """What step() is told of a gradient that one rank alone has changed after it went, and whether the step can be made after that."""
    model = bt.shard(made())
    optimizer = ours(model)
    tokens = next(batches(1))
    loss_of(model, tokens).backward()
    weight = model.blocks[1].up.weight
    kept = weight.grad
    if dist.get_rank() == 1:
        weight.grad = None
    refusal = told(optimizer.step)
    weight.grad = kept
    optimizer.step()
    steps = optimizer.stats()['steps']
    dist.barrier()
    optimizer.close()
    return refusal, steps


@script
def wrapped():
    """A model that fully_shard has wrapped before."""
    twin, model = plain(made()), bt.shard(plain(made()), push_early=False)
    results = [[*train(twin, theirs(twin.parameters()), 5), whole(twin)]]
    optimizer = ours(model)
    results.append([*train(model, optimizer, 5), whole_of(model)])
    optimizer.close()
    return results, {}


@script
def inside():
    """gathered(): names, shapes and plainness of a state_dict's tensors, and whether training goes on after it."""
    model = bt.shard(made())
    optimizer = ours(model)
    tokens = next(batches(1))
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    evaluation(model)
    with bt.gathered(model):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        tied = model.head.weight is model.embed.weight
    with torch.no_grad():
        after = loss_of(model, tokens)
    optimizer.close()
    alone = Net()
    alone.load_state_dict(state)
    return tied, loss.item(), after.item(), loss_of(alone, tokens).item()


def durable(name, model, **more):
    return ours(model, name=name, dram=None, threads=None, durability='step', resume='auto', **more)


@script
def first_half():
    model = bt.shard(made())
    optimizer = durable('halves', model)
    losses, _ = train(model, optimizer, 5)
    optimizer.close()
    return losses


@script
def second_half():
    """From the meta device: nothing of the model is here but names and shapes."""
    model = bt.shard(on_meta())
    optimizer = durable('halves', model)
    steps = optimizer.resume().step
    losses, _ = train(model, optimizer, 5)
    values = whole_of(model)
    optimizer.close()
    twin = plain(made())
    other = theirs(twin.parameters())
    expected = torch.cat([train(twin, other, 5)[0], train(twin, other, 5)[0]])
    return steps, losses, values, expected, whole(twin)


@script
def rolled_back():
    """Losses of three steps, and of the same three after a rollback to the version before them."""
    model = bt.shard(made())
    optimizer = durable('rolled_back', model)
    train(model, optimizer, 4)
    state, version = optimizer.state_dict(), optimizer.job.opened.session.version
    evaluated = [evaluation(model)]
    first, _ = train(model, optimizer, 3)
    evaluated.append(evaluation(model))  # FSDP2 keeps the root gathered after it
    optimizer.rollback(version)
    evaluated.append(evaluation(model))
    second, _ = train(model, optimizer, 3)
    evaluation(model)
    optimizer.load_state_dict(state)
    third, _ = train(model, optimizer, 3)
    optimizer.zero_grad()
    loss_of(model, next(batches(1))).backward()  # whose gradients no step takes
    optimizer.rollback(version)
    fourth, _ = train(model, optimizer, 3)
    optimizer.close()
    return first, [second, third, fourth], evaluated


def evaluation(model):
    with torch.no_grad():
        return loss_of(model, next(batches(1))).item()


def main(barrier=True):
    """barrier: ranks wait for each other behind each script."""
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    dist.init_process_group('gloo' if DEVICE == 'cpu' else 'cpu:gloo,cuda:nccl')
    torch.use_deterministic_algorithms(DEVICE == 'cuda')
    for name in sys.argv[1].split(','):
        torch.save(SCRIPTS[name](), f'{sys.argv[2]}/{name}-{dist.get_rank()}.pt')
        if barrier:
            dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
