#!/usr/bin/env python3
"""The optimizer phase of a PyTorch training step, ours against what users have today, in one run on one machine.

Usage: torch_step.py [--json FILE] [--directory DIR] [--rounds N] [--threads N] [--only dram|nvme|fp32|samples|muon] ...
  --directory DIR   on the disk to measure; takes about 36 bytes per parameter, gone afterwards
  --rounds N        measured steps of each (default 9)
  --dram SIZE       our budget where state is on NVMe (default 1536MiB: with it we keep less in memory than DeepSpeed does)
  --layers, --hidden  the model (default 16 linear layers of 4096 x 4096, bf16, one row per batch)

All train the same model on the same inputs with AdamW and gradient clipping (norm 1; none in fp32), on the CPU, each in a process of
its own; they take turns.
A step is backward, and the optimizer phase: clipping and the update, until all parameters hold the new version.
  ballast     ballast.torch.AdamW, embedded, durability none: state in DRAM, or on NVMe
  deepspeed   ZeRO-Offload (stage 2, optimizer on the CPU), or ZeRO-Infinity (stage 3, optimizer on NVMe, tuned as in deepspeed_nvme.py)
  torch       torch.optim.AdamW(fused=True) over fp32 masters, with copies of bf16 gradients and parameters
  fp32        torch.optim.AdamW(fused=True) and ballast, of the same model in fp32: neither has masters beside parameters
  muon        ballast.torch.Muon, and DeepSpeed's Muon with its state offloaded (stage 2); without clipping
  samples     ballast without the samples of parameters that tell of writes past torch's version counters

Rows, ratio = the peer's seconds / ours in the optimizer phase, the median over rounds (above 1 we are faster): dram/deepspeed,
dram/torch, nvme/deepspeed, fp32/torch, muon/deepspeed, samples/none (below 1 by what samples cost); beside each the same of CPU
seconds, and of backward and optimizer phase together; rows of a batch per second of whole steps, forward too ("tokens/s").
dram/ballast_step and nvme/ballast_step: our own seconds with durability step against those without; dram/ballast_early and
nvme/ballast_early: with push_early as well.
"""
import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time

from workers import HYPER, DeepSpeed, Trainer, make_model, median, take_turns

MAX_NORM = 1.0
ROWS = 256  # of a batch of Muon's: gradients of one row are matrices of rank one, whose iteration is mostly rounding
MUON = {'lr': 1e-2, 'momentum': 0.95, 'weight_decay': 0.01}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--dram', default='1536MiB')
    parser.add_argument('--only', choices=GROUPS)
    parser.add_argument('--layers', type=int, default=16)
    parser.add_argument('--hidden', type=int, default=4096)
    parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parameters = args.layers * args.hidden ** 2
    return args


class Step(Trainer):
    """A plain loop; subclasses say what the optimizer phase is."""

    def start(self):
        self.forward = make_model(self.args, self.dtype)
        self.make_optimizer()

    def step(self):
        begin = time.perf_counter()
        loss = self.loss()
        start = time.perf_counter()
        loss.backward()
        middle, used = time.perf_counter(), time.process_time()
        self.update()
        end, used = time.perf_counter(), time.process_time() - used
        self.forward.zero_grad(set_to_none=True)
        return {'forward': start - begin, 'backward': middle - start, 'optimizer': end - middle, 'cpu': used, 'loss': loss.item()}

    def save(self, path):
        import torch
        torch.save(self.forward[0].weight.detach().clone(), path)


class Ballast(Step):
    tier, durability, push_early, max_norm = 'dram', 'none', False, MAX_NORM

    def make_optimizer(self):
        import ballast.torch
        args = self.args
        budgets = {'directory': os.path.join(args.directory, type(self).__name__), 'threads': args.threads}
        if self.tier == 'nvme':
            budgets['dram'] = args.dram
        elif self.durability == 'none':
            budgets['nvme'] = 0
        self.optimizer = ballast.torch.AdamW(self.forward.parameters(), durability=self.durability, max_norm=self.max_norm,
                                             push_early=self.push_early, **budgets, **HYPER)

    def update(self):
        self.optimizer.step()

    def stop(self):
        self.optimizer.close()


class BallastStep(Ballast):
    durability = 'step'


class BallastNvme(Ballast):
    tier = 'nvme'


class BallastNvmeStep(Ballast):
    tier, durability = 'nvme', 'step'


class BallastEarly(BallastStep):
    push_early = True


class BallastNvmeEarly(BallastNvmeStep):
    push_early = True


class BallastUnsampled(Ballast):
    def make_optimizer(self):
        from ballast.torch.tensors import marks
        marks._samples = lambda memory, turns: [0] * len(memory)
        super().make_optimizer()


class BallastFp32(Ballast):
    dtype, max_norm = 'float32', 0.0


class BallastMuon(Step):
    rows = ROWS

    def make_optimizer(self):
        import ballast.torch
        self.optimizer = ballast.torch.Muon(self.forward.named_parameters(), threads=self.args.threads, durability='none', nvme=0,
                                            directory=os.path.join(self.args.directory, 'BallastMuon'), **MUON)

    def update(self):
        self.optimizer.step()

    def stop(self):
        self.optimizer.close()


class DeepSpeedMuon(DeepSpeed):
    optimizer, hyper, rows = 'Muon', MUON, ROWS

    def zero(self):
        return {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}


class TorchFp32(Step):
    dtype = 'float32'

    def make_optimizer(self):
        import torch
        self.optimizer = torch.optim.AdamW(self.forward.parameters(), fused=True, **HYPER)

    def update(self):
        self.optimizer.step()


class Torch(Step):
    def make_optimizer(self):
        import torch
        self.masters = [p.detach().float().requires_grad_() for p in self.forward.parameters()]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **HYPER)

    def update(self):
        import torch
        parameters = list(self.forward.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        with torch.no_grad():
            for master, parameter in zip(self.masters, parameters):
                master.grad.copy_(parameter.grad)
            self.optimizer.step()
            for master, parameter in zip(self.masters, parameters):
                parameter.copy_(master)


class DeepSpeedOffload(DeepSpeed):
    clipping = MAX_NORM

    def zero(self):
        return {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}


class DeepSpeedNvme(DeepSpeed):
    clipping = MAX_NORM


WORKERS = {'ballast_dram': Ballast, 'ballast_dram_step': BallastStep, 'ballast_dram_early': BallastEarly, 'ballast_nvme': BallastNvme,
           'ballast_nvme_step': BallastNvmeStep, 'ballast_nvme_early': BallastNvmeEarly, 'ballast_fp32': BallastFp32,
           'none_samples': BallastUnsampled, 'torch': Torch, 'torch_fp32': TorchFp32, 'deepspeed_dram': DeepSpeedOffload,
           'deepspeed_nvme': DeepSpeedNvme, 'ballast_muon': BallastMuon, 'deepspeed_muon': DeepSpeedMuon}
# Those that are there at a time, and take turns: all at once would not fit into memory.
GROUPS = {'dram': ('ballast_dram', 'torch', 'deepspeed_dram'), 'nvme': ('ballast_nvme', 'deepspeed_nvme'),
          'fp32': ('ballast_fp32', 'torch_fp32'), 'muon': ('ballast_muon', 'deepspeed_muon'), 'samples': ('ballast_dram', 'none_samples')}
DURABLE = {'dram': ('ballast_dram', 'ballast_dram_step', 'ballast_dram_early'),
           'nvme': ('ballast_nvme', 'ballast_nvme_step', 'ballast_nvme_early')}


def side_by_side(names, args, directory):
    """By name: the measured steps; the resident peak in bytes."""
    taken, resident = take_turns(__file__, names, args, directory)
    for name in names:
        shutil.rmtree(os.path.join(directory, WORKERS[name].__name__), ignore_errors=True)
    return taken, {name: peak['bytes'] for name, peak in resident.items()}


def row_of(row, peer, ours, measured, parameters):
    taken, resident = measured
    peer_bytes, ballast_bytes = resident[peer], resident[ours]
    names, (peer, ours) = (peer, ours), (taken[peer], taken[ours])
    cpu = [[taken.get('cpu', 0.0) for taken in steps] for steps in (peer, ours)]  # DeepSpeed's steps do not say
    phase = [taken['optimizer'] for taken in peer], [taken['optimizer'] for taken in ours]
    whole = [taken['optimizer'] + taken['backward'] for taken in peer], [taken['optimizer'] + taken['backward'] for taken in ours]
    tokens = [WORKERS[name].rows / median([taken['forward'] + taken['backward'] + taken['optimizer'] for taken in steps])
              for name, steps in ((names[0], peer), (names[1], ours))]
    return {'name': row, 'ratio': median([a / b for a, b in zip(*phase)]),
            'cpu_ratio': median([a / b for a, b in zip(*cpu)]),
            'backward_and_optimizer_ratio': median([a / b for a, b in zip(*whole)]),
            'seconds': median(phase[0]), 'ballast_seconds': median(phase[1]),
            'resident_bytes': peer_bytes, 'ballast_resident_bytes': ballast_bytes,
            'tokens_per_s': tokens[0], 'ballast_tokens_per_s': tokens[1],
            'gparam_per_s': parameters / median(phase[0]) / 1e9, 'ballast_gparam_per_s': parameters / median(phase[1]) / 1e9}


def measure(args, directory):
    rows = []
    for tier, names in GROUPS.items():
        if args.only not in (None, tier):
            continue
        measured = side_by_side(names, args, directory)
        for name in names[1:]:
            rows.append(row_of(f'{tier}/{name.split("_")[0]}', name, names[0], measured, args.parameters))
        if tier not in DURABLE:
            continue
        measured = side_by_side(DURABLE[tier], args, directory)
        plain, *durable = DURABLE[tier]
        for name in durable:
            rows.append(row_of(f'{tier}/ballast_{name.split("_")[2]}', name, plain, measured, args.parameters))
    return rows


def main():
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args).serve()
    for module in ('torch', 'ballast') if args.only in ('fp32', 'samples') else ('torch', 'deepspeed', 'ballast'):
        if importlib.util.find_spec(module) is None:
            print(f'skipped: {module} is not installed (pip install torch==2.13.0 numpy; pip install ./client/python; '
                  'DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8; apt-get install libaio-dev)')
            return 0
    directory = tempfile.mkdtemp(prefix='torch_step.', dir=args.directory)
    try:
        rows = measure(args, directory)
    finally:
        shutil.rmtree(directory)
    print(f'optimizer phase over {args.parameters} parameters; ratio above 1: ours is faster')
    print(f'{"row":20} {"seconds":>8} {"ours":>8} {"ratio":>6} {"CPU":>6} {"with backward":>13} {"tokens/s":>8} {"ours":>8} '
          f'{"MiB resident":>12} {"ours":>6}')
    for row in rows:
        print(f'{row["name"]:20} {row["seconds"]:8.4f} {row["ballast_seconds"]:8.4f} {row["ratio"]:6.3f} '
              f'{row["cpu_ratio"]:6.3f} {row["backward_and_optimizer_ratio"]:13.3f} {row["tokens_per_s"]:8.1f} '
              f'{row["ballast_tokens_per_s"]:8.1f} {row["resident_bytes"] >> 20:12} {row["ballast_resident_bytes"] >> 20:6}')
        if row['name'] == 'nvme/deepspeed' and row['ballast_resident_bytes'] > row['resident_bytes']:
            print('ours took more DRAM than DeepSpeed: lower --dram for a fair comparison')
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'rows': rows}, file, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
