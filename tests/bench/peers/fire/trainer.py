"""One rank of a training job, the same loop for every system. Started by the launcher, with torchrun's variables in the environment.

Usage: python -m fire.trainer --system NAME --directory DIR [--servers A,B] [--copies N] [--steps N] [--interval K] [--sweep K,K,K]
  --directory DIR   events.jsonl, and whatever the system keeps; a file named stop there ends the run after the step at hand
  --copies N        of each chunk of the state, on so many servers
  --steps N         ends after N steps
  --interval K      steps between two checkpoints, of systems that make them; 0: none
  --sweep K,K,K     after --alone N steps measures what a checkpoint costs every K steps, then ends
"""

import argparse
import importlib
import math
import os

from fire.events import Events

MICRO, ROWS, LENGTH = 2, 1, 512  # micro-batches, rows, bytes of a row: one global batch
LR, WARMUP, PERIOD = 6e-4, 20, 400
MAX_NORM = 1.0
HYPER = {'betas': (0.9, 0.95), 'eps': 1e-8, 'weight_decay': 0.1}


def learning_rate(step: int) -> float:
    return LR * min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(step, PERIOD) / PERIOD))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument('--system', required=True)
    parser.add_argument('--directory', required=True)
    parser.add_argument('--servers', default='')
    parser.add_argument('--copies', type=int, default=1)
    parser.add_argument('--steps', type=int, default=1 << 30)
    parser.add_argument('--interval', type=int, default=0)
    parser.add_argument('--sweep', default='')
    parser.add_argument('--alone', type=int, default=0)
    return parser.parse_args()


def sweep(system, events, interval: int, advance, checkpoint) -> None:
    """Two checkpoints, each before `interval` steps: the events tell how much longer these steps took than others."""
    events.tell('sweep', interval=interval)
    for _ in range(2):
        checkpoint()
        for _ in range(interval):
            advance()
    system.wait()
    events.tell('swept', interval=interval)


def main() -> None:
    args = parse()
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    events = Events(os.path.join(args.directory, 'events.jsonl'), rank=rank, generation=int(os.environ['GENERATION']))
    events.tell('started')
    import torch
    events.tell('imported')
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    torch.distributed.init_process_group('gloo')
    events.tell('grouped')
    from fire.model import Batches
    batches = Batches(MICRO, ROWS, LENGTH)
    system = importlib.import_module(f'fire.systems.{args.system}').System(args, events)
    step, cursor = system.start()
    if cursor:
        batches.restore(cursor)
    events.tell('opened', step=step)

    def advance() -> bool:
        """One step. Returns whether it is the last."""
        nonlocal step
        mine = batches.next()[rank * MICRO // world:(rank + 1) * MICRO // world]
        losses = [system.backward(tokens, targets, 1 / len(mine)) for tokens, targets in mine]
        system.step(learning_rate(step), batches.state())
        step += 1
        stop = step >= args.steps or (rank == 0 and os.path.exists(os.path.join(args.directory, 'stop')))
        told = torch.tensor([sum(losses) / MICRO, float(stop)])
        torch.distributed.all_reduce(told)
        if rank == 0:
            events.tell('step', step=step, world=world, loss=round(told[0].item(), 4))
        return told[1].item() > 0

    if args.sweep:
        for _ in range(args.alone):
            advance()
        system.checkpoint(step, batches.state())  # the first takes longer, and counts for none
        system.wait()
        for interval in map(int, args.sweep.split(',')):
            sweep(system, events, interval, advance, lambda: system.checkpoint(step, batches.state()))
    else:
        last = advance()
        while not last:
            if args.interval and step % args.interval == 0:
                system.checkpoint(step, batches.state())
            last = advance()
    if rank == 0 or system.saves_together:
        system.save(os.path.join(args.directory, 'parameters.pt'), rank)
    events.tell('ended', step=step)
    system.close()
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
