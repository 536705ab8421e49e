#!/usr/bin/env python3
"""The same training run under the same faults, by each system: what counts in the end, and what was lost.

Usage: under_fire.py [--json FILE] [--plot FILE.png] [--seconds 120] [--systems ballast,deepspeed,fsdp2] [--directory DIR] [--build DIR]
  --seconds S     of each run under fire; faults come at fixed parts of it (below)
  --systems       a comma between them: ballast, ballast_every_k, deepspeed, fsdp2 (default: all; a system that is not installed is
                  left out with a word)
  --plot FILE     tokens over time as a picture; needs matplotlib
  --directory DIR on the disk that keeps checkpoints and logs; takes about 4 GB, gone afterwards
  --build DIR     where ballastd and the Python package were built (default build/release)

One model (31M parameters, bytes of licence texts), one global batch of two micro-batches, bf16 with fp32 masters, AdamW, clipping, a
schedule of the learning rate; two ranks over gloo that share the processors. Each system runs three times:
  1. undisturbed: tokens/s; systems with checkpoints also measure what one costs at several intervals, from which the interval with the
     best expected goodput is chosen
  2. under fire for S seconds. One small launcher restarts whatever dies, by the same command line, at once:
       0.15 S  kill -9 of a trainer
       0.32 S  kill -9 of a state server; of both trainers where there is none
       0.48 S  all trainers are killed; the group comes back with one
       0.64 S  all trainers are killed; the group comes back with two
       0.82 S  everything stands still, one byte of the newest state on disk flips, everything is killed
  3. undisturbed again, as many steps as the second run made: its parameters are the ones to have

Figures:
  goodput                 tokens of the steps that count in the end / (S x tokens/s undisturbed, of runs 1 and 3)
  goodput_without_starts  the same, seconds of process starts and `import torch` not counted
  lost_steps, lost_tokens made and not in the final state
  differing_elements      of the final parameters, bits against run 3; a sum over ranks is not the same bits for one and two ranks
                          in every system
  operator_actions        what a person had to do: conversions, deletions. They take no time here, beyond that of the command itself
"""
import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, replace

from fire.launcher import scratch
from fire.report import Row, draw, table
from fire.run import SCHEDULE, Outcome, Run, Setting
from fire.score import Score, score, step_seconds, sweep

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENS = 2 * 1 * 512  # of a step: fire/trainer.py
ALONE = 12  # undisturbed steps before a sweep
SETTINGS = {
    'ballast': Setting('ballast', servers=True),
    'ballast_every_k': Setting('ballast_every_k', servers=True, interval=10),
    # Its checkpoints are written while training waits, so the interval does not change what one costs.
    'deepspeed': Setting('deepspeed', checkpoints=True, converts=True, sweep=(2, 4)),
    # Written beside the training, so a save may slow a short interval more than a long one.
    'fsdp2': Setting('fsdp2', checkpoints=True, sweep=(2, 4, 8)),
}
NEEDS = {'deepspeed': 'deepspeed', 'ballast': 'ballast', 'ballast_every_k': 'ballast'}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--plot')
    parser.add_argument('--seconds', type=float, default=120)
    parser.add_argument('--systems', default=','.join(SETTINGS))
    parser.add_argument('--directory')
    parser.add_argument('--build', default=os.path.join(ROOT, 'build', 'release'))
    args = parser.parse_args()
    args.systems = args.systems.split(',')
    unknown = [system for system in args.systems if system not in SETTINGS]
    if unknown:
        parser.error(f'--systems {unknown[0]}: expected some of {", ".join(SETTINGS)}')
    return args


def versions(system: str) -> str:
    import torch
    named = {'deepspeed': 'deepspeed', 'ballast': 'ballast', 'ballast_every_k': 'ballast'}.get(system)
    said = f'torch {torch.__version__}'
    if named is None:
        return said
    try:
        return f'{named} {importlib.metadata.version(named)}, {said}'
    except importlib.metadata.PackageNotFoundError:
        return f'{named} of this tree, {said}'


def say(text: str) -> None:
    print(f'under_fire: {text}', file=sys.stderr, flush=True)


class Bench:
    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._args, self._directory = args, directory
        self._daemon = os.path.join(args.build, 'bin', 'ballastd')
        self._count = 0

    def _run(self, setting: Setting, *arguments: str, **how) -> Outcome:
        self._count += 1
        folder = os.path.join(self._directory, f'{self._count}_{setting.name}')
        outcome = Run(setting, folder, self._daemon, arguments).go(**how)
        if os.path.exists(outcome.parameters):
            kept = folder + '.pt'
            os.rename(outcome.parameters, kept)
            outcome.parameters = kept
        outcome.logs = {name: tail(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith('.log')}
        shutil.rmtree(folder)
        return outcome

    def measure(self, setting: Setting) -> tuple[Row, list[dict]]:
        seconds, found = self._args.seconds, []
        say(f'{setting.name}: undisturbed')
        if setting.sweep:
            first = self._run(setting, '--alone', str(ALONE), '--sweep', ','.join(map(str, setting.sweep)))
            must_end(first)
            found = sweep(first.events, ALONE, len(SCHEDULE), seconds)
            setting = replace(setting, interval=max(found, key=lambda each: each.goodput).interval)
        else:
            first = self._run(setting, '--steps', str(ALONE + 8))
            must_end(first)
        say(f'{setting.name}: under fire for {seconds:.0f} s')
        fire = self._run(setting, seconds=seconds, schedule=SCHEDULE)
        result = score(fire.events, seconds)
        ended = [event['step'] for event in fire.events if event['what'] == 'ended' and event['rank'] == 0]
        steps = ended[-1] if ended else result.steps
        say(f'{setting.name}: undisturbed again, {steps} steps')
        after = self._run(replace(setting, interval=setting.interval if setting.servers else 0), '--steps', str(steps))
        must_end(after)
        step_s = (step_seconds(first.events, last=ALONE if setting.sweep else None) + step_seconds(after.events)) / 2
        differing, elements = differ(fire.parameters, after.parameters) if ended else (None, 0)
        return row(setting, result, step_s, differing, elements, fire, found), fire.events


def must_end(outcome: Outcome) -> None:
    if not any(event['what'] == 'ended' for event in outcome.events):
        raise SystemExit('under_fire: an undisturbed run did not end:\n' + '\n'.join(f'{name}:\n{text}' for name, text in outcome.logs.items()))


def tail(path: str) -> str:
    with open(path, encoding='utf-8', errors='replace') as file:
        return ''.join(file.readlines()[-15:])


def differ(one: str, other: str) -> tuple[int, int]:
    """Elements whose bits differ, and all elements."""
    import torch
    a, b = torch.load(one), torch.load(other)
    if a.keys() != b.keys():
        raise SystemExit(f'under_fire: {one} and {other} have other parameters')
    bits = {2: torch.int16, 4: torch.int32}
    different = sum(int((a[name].contiguous().view(bits[a[name].element_size()]) != b[name].contiguous().view(bits[b[name].element_size()])).sum())
                    for name in a)
    return different, sum(tensor.numel() for tensor in a.values())


def row(setting: Setting, result: Score, step_s: float, differing: int | None, elements: int, fire: Outcome, found: list) -> Row:
    flip = 'there was none'
    if any(event['what'] == 'flipped' for event in fire.events):
        deleted = [action for action in fire.operator if action.startswith('deleted')]
        given_up = any(event['what'] == 'given_up' for event in fire.events)
        noticed = next((line for text in fire.logs.values() for line in text.splitlines() if 'CRC32C' in line or 'rebuilt from' in line), None)
        if given_up:
            flip = 'refused by name: ' + noticed.split('] ')[-1][:60] if noticed else 'the job does not start any more'
        elif deleted:
            flip = 'the checkpoint did not load'
        elif differing == 0:
            flip = 'repaired' if noticed else 'in bytes that nobody needed'
        else:
            flip = 'loaded without a word'
    return Row(setting.name, versions(setting.name), TOKENS / step_s, result.steps * step_s / result.seconds,
               result.steps * step_s / (result.seconds - result.starts_s), result.lost_steps, result.lost_steps * TOKENS, differing, elements,
               fire.operator, flip, result.steps, result.returns, setting.interval, found)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ['PYTHONPATH'] = os.pathsep.join([os.path.join(args.build, 'python'), os.environ.get('PYTHONPATH', '')])
    sys.path.insert(1, os.path.join(args.build, 'python'))
    if importlib.util.find_spec('torch') is None:
        print('skipped: torch is not installed (pip install torch==2.13.0 numpy)')
        return 0
    rows, runs = [], {}
    with scratch(args.directory) as directory:
        bench = Bench(args, directory)
        for system in args.systems:
            needs = NEEDS.get(system)
            if needs is not None and importlib.util.find_spec(needs) is None:
                say(f'{system} is left out: {needs} is not installed')
                continue
            measured, runs[system] = bench.measure(SETTINGS[system])
            rows.append(measured)
    print(table(rows))
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'seconds': args.seconds, 'rows': [asdict(each) for each in rows]}, file, indent=1)
    if args.plot:
        draw(args.plot, runs, args.seconds, TOKENS)
    return 0


if __name__ == '__main__':
    sys.exit(main())
