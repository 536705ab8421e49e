#!/usr/bin/env python3
"""What a training loop gains by overlap=model: the same loop with and without, by turns.

Usage: torch_overlap.py [--json FILE] [--directory DIR] [--rounds N] [--rows N] [--tier dram|nvme]
  --rows N     of a batch (default 512): more make forward and backward passes longer
  --tier       where optimizer state is (default nvme, with --dram MIB, default 512)

Linear layers in bf16 on the CPU. One row, loop/overlap: time of an iteration without over that with. The ceiling beside it is what could be
had if the step cost nothing but what the next forward pass cannot hide: plain / (max(forward, step) + backward), from the plain loop's own times."""
import argparse
import json
import shutil
import sys
import tempfile
import time

from workers import HYPER, Trainer, make_model, median, started


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--rows', type=int, default=512)
    parser.add_argument('--tier', choices=('dram', 'nvme'), default='nvme')
    parser.add_argument('--dram', type=int, default=512)
    parser.add_argument('--hidden', type=int, default=2048)
    parser.add_argument('--layers', type=int, default=32)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
    return parser.parse_args()


class Plain(Trainer):
    """Answers a step with the seconds of several iterations, and of their parts."""
    overlaps = False
    iterations = 4

    def start(self):
        import ballast.torch
        import torch
        self.forward = make_model(self.args)
        where = {'dram': f'{4 * self.args.dram}MiB'} if self.args.tier == 'dram' else {
            'dram': f'{self.args.dram}MiB', 'directory': f'{self.args.directory}/{self.overlaps}', 'durability': 'none'}
        self.optimizer = ballast.torch.AdamW(self.forward.named_parameters(), threads=self.args.threads,
                                             overlap=self.forward if self.overlaps else None, **where, **HYPER)
        self.rows = torch.randn(self.args.rows, self.args.hidden, dtype=torch.bfloat16)

    def step(self):
        parts = {'forward': 0.0, 'backward': 0.0, 'step': 0.0}
        start = last = time.perf_counter()
        for _ in range(self.iterations):
            for part, act in (('forward', self.run_forward), ('backward', self.run_backward), ('step', self.run_step)):
                act()
                now = time.perf_counter()
                parts[part] += (now - last) / self.iterations
                last = now
        self.optimizer.wait()
        return {'iteration': (time.perf_counter() - start) / self.iterations, **parts}

    def run_forward(self):
        self.loss = self.forward(self.rows).float().square().mean()

    def run_backward(self):
        self.loss.backward()

    def run_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stop(self):
        self.optimizer.close()


class Overlapped(Plain):
    overlaps = True


WORKERS = {'plain': Plain, 'overlap': Overlapped}


def main():
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args).serve()
    directory = tempfile.mkdtemp(prefix='torch_overlap.', dir=args.directory)
    times = {name: [] for name in WORKERS}
    try:
        workers = {name: started(__file__, name, args, directory) for name in WORKERS}
        for i in range(args.rounds + 1):
            for name, worker in workers.items():
                came = worker.ask('step')
                if i > 0:  # the first opens the job
                    times[name].append(came)
            print(f'\rround {i} of {args.rounds}', end='', file=sys.stderr)
        print(file=sys.stderr)
        for worker in workers.values():
            worker.stop()
    finally:
        shutil.rmtree(directory)
    ceilings = [t['iteration'] / (max(t['forward'], t['step']) + t['backward']) for t in times['plain']]
    ratios = [a['iteration'] / b['iteration'] for a, b in zip(times['plain'], times['overlap'])]
    row = {'name': 'loop/overlap', 'ratio': median(ratios), 'ceiling': median(ceilings), 'parameters': args.layers * args.hidden**2,
           **{f'{name}_{part}_seconds': median([t[part] for t in times[name]]) for name in times for part in times[name][0]}}
    print(json.dumps(row, indent=1))
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as out:
            json.dump({'rows': [row]}, out)
    return 0


if __name__ == '__main__':
    sys.exit(main())
