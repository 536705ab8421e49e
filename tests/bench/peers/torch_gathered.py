#!/usr/bin/env python3
"""gathered() of a sharded model against pulls of the same parameters into memory that is there, in one run on one machine.

Usage: torch_gathered.py [--json FILE] [--directory DIR] [--rounds N] [--width N] [--layers N]
  --directory DIR   for the server's files
  --rounds N        measured rounds (default 9): pulls and gathered() by turns
  --width, --layers of the model (default 1024 and 16: 203M parameters, bf16)

Systems: one rank with its server in the process (embedded); one rank, and two, with a ballastd (served, ranks). Of two ranks the first
works alone, as to save a file, or both at the same time.
Rows: GB/s of each rank, medians of rounds; ratio = seconds of pulls / those of an empty `with gathered(model)`, the median over rounds.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
import time

from torch_shard import Ballast, Server
from workers import Ranks, median

GOAL = 0.7


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--width', type=int, default=1024)
    parser.add_argument('--layers', type=int, default=16)
    parser.add_argument('--ranks', type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument('--threads', type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument('--server', help=argparse.SUPPRESS)
    parser.add_argument('--worker', help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.hidden = args.width * 8 // 3 // 64 * 64
    args.block = 4 * args.width ** 2 + 3 * args.width * args.hidden
    args.world, args.device, args.profile, args.rows, args.length = args.ranks, 'cpu', None, 1, 128
    return args


class Gatherer(Ballast):
    """One rank of a system."""

    def start(self):
        import torch

        from ballast.torch.sharding.sharded import models_of
        super().start()
        self.one()
        sharded, = models_of(self.model)
        parts = list(sharded.parameters)
        self.session = sharded.open_job().session
        index = {part: i for unit, indices in sharded.pulls._indices.items() for part, i in zip(unit.parts, indices)}
        self.which = [index[part] for part in parts]
        self.places = [torch.zeros(part.shape or (1,), dtype=torch.bfloat16) for part in parts]
        self.rounds = 0

    def pulls(self):
        self.session.await_pull(self.session.start_pull(self.which, self.places, whole=True))

    def gathered(self):
        import ballast.torch
        with ballast.torch.gathered(self.model):
            pass

    def step(self):
        """A round. By row: bytes, and seconds of pulls and of gathered() on this rank."""
        import torch
        self.rounds += 1
        whats = ('pulls', 'gathered') if self.rounds % 2 == 0 else ('gathered', 'pulls')
        answer = {'bytes': sum(place.nbytes for place in self.places)}
        for how in ('alone', 'both') if self.args.world > 1 else ('alone',):
            for what in whats:
                torch.distributed.barrier()
                start = time.perf_counter()
                if how == 'both' or self.rank == 0:
                    getattr(self, what)()
                answer[f'{how}_{what}'] = time.perf_counter() - start
        torch.distributed.barrier()
        return answer


SYSTEMS = {'embedded': 1, 'served': 1, 'ranks': 2}  # ranks


def measure(name, args, directory):
    """Rows of a system."""
    world = SYSTEMS[name]
    server = Server(name, args, directory) if name != 'embedded' else None
    given = argparse.Namespace(width=args.width, layers=args.layers, ranks=world, threads=1, server=server.address if server else None)
    try:
        ranks = Ranks(__file__, name, given, directory, world, DS_ACCELERATOR='cpu')
        answers = [ranks.ask('step') for _ in range(-1, args.rounds)][1:]  # the first touches memory
        ranks.stop()
    finally:
        if server:
            server.stop()
    rows = []
    for how in ('alone', 'both') if world > 1 else ('alone',):
        seconds = {what: [max(answer[f'{how}_{what}'] for answer in answered[:world if how == 'both' else 1]) for answered in answers]
                   for what in ('pulls', 'gathered')}
        size = answers[0][0]['bytes']
        rows.append({'name': f'{name}/{how}', 'ratio': median([a / b for a, b in zip(seconds['pulls'], seconds['gathered'])]), 'bytes': size,
                     **{f'{what}_gb_per_s': size / median(each) / 1e9 for what, each in seconds.items()}})
    return rows


def main():
    args = parse()
    if args.worker:
        return Gatherer(args).serve()
    directory = tempfile.mkdtemp(prefix='torch_gathered.', dir=args.directory)
    try:
        rows = [row for name in SYSTEMS for row in measure(name, args, directory)]
    finally:
        shutil.rmtree(directory)
    print(f'{"row":16} {"MB":>6} {"pulls GB/s":>10} {"gathered()":>10} {"ratio":>6}')
    for row in rows:
        print(f'{row["name"]:16} {row["bytes"] / 1e6:6.0f} {row["pulls_gb_per_s"]:10.2f} {row["gathered_gb_per_s"]:10.2f} {row["ratio"]:6.2f}'
              + ('' if row['ratio'] >= GOAL else f' below {GOAL}'))
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'rows': rows}, file, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
