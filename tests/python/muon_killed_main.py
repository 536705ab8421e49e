"""One rank of test_muon_killed.py: muon_killed_main.py WAY SERVERS WHOM STEP:PLACE[,STEP:PLACE...] trains to STEPS, where it saves what it
has, and kills at a PLACE of a STEP: 'all', which are servers and ranks, or a 'server'. The file 'pids' has the pids of servers. Each matrix
has a wave of its own; a block of the model goes to the servers as the wave after its last begins. PLACE: a number of waves that rank 0 has
computed; 'prepared': all of them; 'stepped'; or milliseconds, such as '3ms', after 'prepared'."""
import os
import pathlib
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from muon_main import ROWS, full, made, momenta, ours
from torch.distributed.fsdp import fully_shard
from transformer import batch, loss_of

import ballast
import ballast.torch as bt
from ballast.torch.steps import assisted

STEPS = 10


class Kill:
    """On rank 0. ranks: whom to kill beside the servers; none: one server alone."""

    def __init__(self, optimizer, ranks):
        self._feature = next(each for each in optimizer.job.features if isinstance(each, assisted.Assisted))
        self._ranks, self._place, self._waves = ranks, '', 0
        self._compute, self._prepare = self._feature._compute, self._feature.prepare
        self._feature._compute, self._feature.prepare = self.compute, self.prepare

    def arm(self, place):
        self._place, self._waves = place, 0

    def compute(self, *arguments):
        self._compute(*arguments)
        self._waves += 1
        if self._place == str(self._waves):
            self.now()

    def prepare(self, job, ready):
        self._prepare(job, ready)
        if self._place == 'prepared':
            self.now()
        if self._place.endswith('ms'):
            threading.Timer(float(self._place.removesuffix('ms')) / 1000, self.now).start()

    def now(self):
        servers = [int(pid) for pid in pathlib.Path('pids').read_text(encoding='ascii').split()]
        for pid in [*servers, *self._ranks] if self._ranks else [servers[self._waves % 2]]:
            os.kill(pid, signal.SIGKILL)


def loop(model, optimizer, start, places, kill, dies):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(start, STEPS):
        tokens = batch(step, 0, size=ROWS)[rank * ROWS // ranks:(rank + 1) * ROWS // ranks]
        optimizer.zero_grad()
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        kill.arm(places.get(step, '') if rank == 0 else '')
        optimizer.step()
        if places.get(step) == 'stepped' and rank == 0:
            kill.now()
        time.sleep(60 if step in places and dies else 0)  # until it is killed


def result(way, model, optimizer):
    momentum = momenta(model, optimizer)
    if way != 'shard':
        return full(model), momentum
    with bt.gathered(model):
        return full(model), momentum


def main(way, servers, whom, places):
    assisted.WAVE_BYTES = 1
    dist.init_process_group('gloo')
    model = made()
    if way == 'shard':
        bt.shard(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = ours(model, name=way, servers=servers, resume='auto')
    start, _ = optimizer.resume()
    print(f'from {start}', flush=True)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, os.getpid())
    dies = whom == 'all'
    kill = Kill(optimizer, [*ranks[1:], ranks[0]] if dies else [])
    try:
        loop(model, optimizer, start, {int(step): place for step, _, place in (each.partition(':') for each in places.split(',') if each)},
             kill, dies)
    except ballast.Error as error:
        print(f'said {error.reason}: {error}', flush=True)
        os._exit(3)
    found = result(way, model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, f'{way}.pt')
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__':
    main(*sys.argv[1:])
