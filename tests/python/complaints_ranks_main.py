"""One rank of programs of DistributedDataParallel's users: complaints_ranks_main.py KIND PROGRAM[,PROGRAM...] FOLDER, with RANK, WORLD_SIZE
and the rest of torch's variables. FOLDER/KIND-PROGRAM-RANK.pt has what each came to with torch.optim's optimizer and with ours: numbers and
parameters, or the text of the refusal. Another form, `preempted FOLDER`, is of test_complaints_of_ranks.py alone."""
import copy
import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from complaints import Complaints
from scripts import batches, loss_of, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ballast
import ballast.torch as bt

KINDS = {'plain': {}, 'overlap': {}, 'named': {'nvme': '1GiB'}}
STEPS = 40 if os.environ.get('TEST_ROUNDS') == 'full' else 9
complaint = Complaints()


class Make:
    """Optimizers of torch, or ours of this kind."""

    def __init__(self, kind, name, folder):
        self.kind, self._name, self._folder, self.made = kind, name, folder, []

    @property
    def is_ours(self):
        return self.kind is not None

    def __call__(self, net, optimizer='AdamW', lr=1e-2, **arguments):
        more = {key: arguments.pop(key) for key in ('group', 'push_early') if key in arguments}
        if not self.is_ours:
            return getattr(torch.optim, optimizer)(net.parameters(), lr=lr, **arguments)
        more |= {'overlap': net} if self.kind == 'overlap' else {}
        more |= {'directory': f'{self._folder}/{self._name}'} if self.kind == 'named' else {}
        self.made.append(getattr(bt, optimizer)(net.named_parameters(), lr=lr, **arguments, **more, **KINDS[self.kind], dram='128MiB',
                                                threads=2, step_timeout=60, name=f'{self.kind}-{self._name}-{len(self.made)}'))
        return self.made[-1]


def own(count):
    """Of all ranks' batches, this rank's."""
    return [batch for i, batch in enumerate(batches(count * dist.get_world_size())) if i % dist.get_world_size() == dist.get_rank()]


def train(net, optimizer, data, before_step=lambda i: None, set_to_none=True):
    losses = []
    for i, batch in enumerate(data):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(net, batch)
        loss.backward()
        before_step(i)
        optimizer.step()
        losses.append(loss.item())
    return losses


@complaint('pytorch/pytorch#44344', 'pytorch/pytorch#41954')
def gradients_are_views_of_buckets(make):
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    return train(net, make(net), own(STEPS), set_to_none=False), net


@complaint('fairscale#354')
def views_are_dropped_and_clipped(make):
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    return train(net, make(net), own(STEPS), lambda _: nn.utils.clip_grad_value_(net.parameters(), 1e-3)), net


def accumulated(make, syncs, **arguments):
    """Three batches a step. syncs(i): batch i is reduced."""
    net, losses = DistributedDataParallel(mlp(), **arguments), []
    optimizer = make(net)
    for i, batch in enumerate(own(3 * STEPS)):
        net.require_backward_grad_sync = syncs(i)  # as no_sync() does
        loss = loss_of(net, batch)
        (loss / 3).backward()
        losses.append(loss.item())
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, net


@complaint('karpathy/nanochat#33')
def views_gather_three_batches(make):
    return accumulated(make, lambda i: i % 3 == 2, gradient_as_bucket_view=True)


@complaint('modelscope/FunASR#3472', 'karpathy/build-nanogpt#30')
def the_last_batch_is_not_reduced(make):
    """After two steps that were right."""
    return accumulated(make, lambda i: i % 3 == (2 if i < 6 else 0))


@complaint('huggingface/accelerate#2790')
def each_fourth_pass_goes_round_the_wrapper(make):
    net, losses = DistributedDataParallel(mlp()), []
    optimizer = make(net)
    for i, batch in enumerate(own(STEPS)):
        losses += train(net.module if i % 4 == 3 else net, optimizer, [batch])
    return losses, net


@complaint('huggingface/transformers#45518')
def a_graph_is_static(make):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.unused = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=False))
    net = DistributedDataParallel(Checkpointed(), static_graph=True, gradient_as_bucket_view=True)
    return train(net, make(net), own(STEPS)), net


class Turns(nn.Module):
    """Layers that passes leave out: on both ranks, or on one."""

    def __init__(self):
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(16, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 4)
        self.passes = 0

    def forward(self, x):
        x, self.passes = self.first(x), self.passes + 1
        left_out = {self.passes % 4, (self.passes + dist.get_rank()) % 4}
        for i, layer in enumerate(self.layers):
            x = x if i in left_out else torch.relu(layer(x))
        return self.last(x)


@complaint('pytorch/pytorch#79171')
def layers_take_turns(make):
    net = DistributedDataParallel(Turns(), find_unused_parameters=True)
    return train(net, make(net, weight_decay=0.1), own(STEPS)), net


@complaint('pytorch/pytorch#79171')
def layers_take_turns_in_views(make):
    net = DistributedDataParallel(Turns(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=0.005)
    return train(net, make(net, weight_decay=0.1), own(STEPS)), net


def hooked(make, hook, state=None, **arguments):
    net = DistributedDataParallel(mlp(), **arguments)
    net.register_comm_hook(state, hook)
    return train(net, make(net, 'SGD', momentum=0.9), own(STEPS)), net  # Adam's first steps have the size of lr, however small a gradient


@complaint('facebookresearch/d2go#70')
def gradients_travel_in_fp16(make):
    return hooked(make, default_hooks.fp16_compress_hook, gradient_as_bucket_view=True)


@complaint('baidu-baige/LoongForge#158')
def a_hook_of_ones_own_rounds(make):
    """torch's for bf16 wants NCCL."""
    def rounds(_, bucket):
        tensor = bucket.buffer().bfloat16().float().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])
    return hooked(make, rounds)


@complaint('pytorch/pytorch#60611')
def gradients_travel_by_power_sgd(make):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1, random_seed=1)
    return hooked(make, powerSGD_hook.powerSGD_hook, state)


@complaint('pytorch/pytorch#71206')
def gradients_stay_local_after_four_steps(make):
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=4)
    return hooked(make, post_localSGD_hook.post_localSGD_hook, state)


@complaint('pytorch/pytorch#71206')
def models_are_averaged_now_and_then(make):
    from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415 - the test has no need of its imports
    net = DistributedDataParallel(mlp())
    optimizer = PostLocalSGDOptimizer(make(net, 'SGD', lr=0.1, momentum=0.9), PeriodicModelAverager(period=2, warmup_steps=2))
    return train(net, optimizer, own(STEPS)), net


@complaint('Lightning-AI/pytorch-lightning#3325', 'Lightning-AI/pytorch-lightning#20404', 'pytorch/pytorch#38174')
def ranks_might_have_uneven_inputs(make):
    net, losses = DistributedDataParallel(mlp()), []
    optimizer = make(net)
    with warnings.catch_warnings(record=True) as said, net.join():
        warnings.simplefilter('always')
        for batch in own(STEPS):
            losses += train(net, optimizer, [batch])
    assert [str(each.message).startswith('this loop runs, or an earlier one ran, within join()') for each in said] == [True] * make.is_ours
    return losses, net


@complaint('pytorch/pytorch#56755')
def the_shortest_rank_ends_an_epoch(make):
    net, losses = DistributedDataParallel(mlp()), []
    optimizer = make(net)
    for _ in range(2):
        try:
            with net.join(throw_on_early_termination=True):
                for batch in own(4)[:4 - dist.get_rank()]:
                    losses += train(net, optimizer, [batch])
        except RuntimeError as error:
            losses.append(float('exhausted inputs' in str(error)))
    return losses, net


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rest = nn.BatchNorm1d(16), mlp()

    def forward(self, x):
        return self.rest(self.norm(x))


def normed(make, **arguments):
    net = DistributedDataParallel(Norms(), **arguments)
    losses = train(net, make(net), own(STEPS))
    return losses + net.module.norm.running_mean.tolist() + net.module.norm.running_var.tolist(), net


@complaint('pytorch/pytorch#30718')
def statistics_come_from_the_first_rank(make):
    return normed(make, broadcast_buffers=True)


@complaint('pytorch/pytorch#30718')
def statistics_are_each_ranks_own(make):
    return normed(make, broadcast_buffers=False, gradient_as_bucket_view=True)


@complaint('pytorch/pytorch#37030')
def a_rank_alone_pushes_early_what_a_hook_changes(make):
    """Each rank has a group, a wrapper and a job of its own."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    net = DistributedDataParallel(mlp(), process_group=alone, gradient_as_bucket_view=True)
    net.register_comm_hook(alone, default_hooks.fp16_compress_hook)
    return train(net, make(net, group=alone, push_early=True), own(STEPS), set_to_none=False), net


def run(kind, name, folder):
    came = []
    for make in (Make(None, name, folder), Make(kind, name, folder)):
        torch.manual_seed(3)
        try:
            losses, net = complaint[name](make)
            for optimizer in make.made:
                optimizer.wait()
            came.append((torch.tensor(losses), [p.detach().clone() for p in net.parameters()]))
        except ballast.Error as error:
            came.append(str(error))
        finally:
            for optimizer in make.made:
                optimizer.close()
    torch.save(came, f'{folder}/{kind}-{name}-{dist.get_rank()}.pt')


def preempted(folder, total):
    """A launcher that takes its machine back sends SIGTERM, to one rank first; all end after that step. Then it starts as many ranks as
    there are machines."""
    asked, losses = torch.zeros(1), {}
    signal.signal(signal.SIGTERM, lambda *_: asked.fill_(1))
    torch.manual_seed(3)
    net = DistributedDataParallel(mlp())
    optimizer = bt.AdamW(net.named_parameters(), lr=1e-2, max_norm=0.5, directory=f'{folder}/state', nvme='1GiB', dram='128MiB',
                         threads=2, resume='auto')
    start, rank, size = optimizer.resume().step, dist.get_rank(), 32 // dist.get_world_size()
    for i, (x, y) in list(enumerate(batches(total)))[start:]:
        optimizer.zero_grad()
        loss = loss_of(net, (x[rank * size:(rank + 1) * size], y[rank * size:(rank + 1) * size]))
        loss.backward()
        if i == start + 3 and rank == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step(blob=str(i).encode())
        losses[i] = loss.item()
        ends = copy.deepcopy(asked)
        dist.all_reduce(ends)
        if ends.item() > 0:
            break
    optimizer.close()
    torch.save((losses, [p.detach().clone() for p in net.parameters()]), f'{folder}/{start}-{rank}.pt')


if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    if sys.argv[1] == 'preempted':
        preempted(sys.argv[2], int(sys.argv[3]))
    else:
        for program in sys.argv[2].split(','):
            run(sys.argv[1], program, sys.argv[3])
            dist.barrier()
    dist.destroy_process_group()
