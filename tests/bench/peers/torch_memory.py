#!/usr/bin/env python3
"""What a trainer's memory grows by with optimizer state on NVMe: the same script with torch's plain SGD and with ours.

Usage: torch_memory.py [--json FILE] [--directory DIR] [--dram MIB] [--steps N]
  --dram MIB   our budget (default 512); the model is made so large that fp32 state is 4 times that
  --steps N    (default 20)

Peak resident set of each process, bf16 linear layers, one row per batch. Prints (ours - SGD's) and the bar: budget + 256 MiB. Ends with 1
if it is not met."""
import argparse
import json
import shutil
import sys
import tempfile

from workers import HYPER, Trainer, make_model, started, status_bytes

MIB = 1 << 20
HEADROOM = 256 * MIB


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--dram', type=int, default=512)
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--hidden', type=int, default=4096)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--layers', type=int)
    parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layers is None:
        args.layers = -(-4 * args.dram * MIB // (12 * args.hidden**2))
    args.parameters = args.layers * args.hidden**2
    return args


class Sgd(Trainer):
    def start(self):
        self.forward = make_model(self.args)
        self.optimizer = self.make(self.forward.parameters())

    def make(self, parameters):
        import torch
        return torch.optim.SGD(parameters, lr=HYPER['lr'])

    def step(self):
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {'loss': loss.item()}

    def resident(self):
        return {'bytes': status_bytes('VmHWM')}


class Ballast(Sgd):
    durability = 'none'

    def make(self, parameters):
        import ballast.torch
        return ballast.torch.AdamW(parameters, directory=f'{self.args.directory}/{self.durability}', dram=f'{self.args.dram}MiB',
                                   durability=self.durability, threads=self.args.threads, **HYPER)

    def stop(self):
        self.optimizer.close()


class BallastStep(Ballast):
    durability = 'step'


WORKERS = {'sgd': Sgd, 'none': Ballast, 'step': BallastStep}


def main():
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args).serve()
    directory = tempfile.mkdtemp(prefix='torch_memory.', dir=args.directory)
    peaks = {}
    try:
        for name in WORKERS:
            worker = started(__file__, name, args, directory)
            for step in range(args.steps):
                worker.ask('step')
                print(f'\r{name}: step {step + 1} of {args.steps}', end='', file=sys.stderr)
            print(file=sys.stderr)
            peaks[name] = worker.ask('resident')['bytes']
            worker.stop()
    finally:
        shutil.rmtree(directory)
    bar = args.dram * MIB + HEADROOM
    above = {name: peaks[name] - peaks['sgd'] for name in ('none', 'step')}
    print(f'{args.parameters} parameters, fp32 state {12 * args.parameters / (args.dram * MIB):.2f} of the DRAM budget of {args.dram} MiB; '
          f'SGD peaks at {peaks["sgd"] / MIB:.0f} MiB')
    for name, more in above.items():
        print(f'durability {name}: {more / MIB:.0f} MiB above SGD, bar {bar / MIB:.0f} MiB: {more / bar:.2f} of it')
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'peaks': peaks, 'above': above, 'bar': bar, 'parameters': args.parameters}, file, indent=1)
    return 0 if max(above.values()) <= bar else 1


if __name__ == '__main__':
    sys.exit(main())
