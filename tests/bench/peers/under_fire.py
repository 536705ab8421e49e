#!/usr/bin/env python3
"""The same training run under the same faults, by each system: what counts in the end, and what was lost.

Usage: under_fire.py [--json FILE] [--plot FILE.png] [--seconds 72] [--systems ballast,deepspeed,fsdp2] [--with FILE,...]
                     [--directory DIR] [--build DIR]
  --seconds S     of each run under fire; faults come at fixed parts of it (below)
  --systems       a comma between them: ballast, deepspeed, fsdp2 (the default); ballast_apart (its servers on machines of their own),
                  ballast_one_copy, ballast_every_k. A system that is not installed is left out with a word
  --plot FILE     tokens over time as a picture; needs matplotlib
  --with FILES    what earlier calls wrote with --json, for table and picture: systems can be measured one at a time
  --directory DIR on the disk that keeps checkpoints and logs; takes about 4 GB, gone afterwards
  --build DIR     where ballastd and the Python package were built (default build/release)

One model (31M parameters, bytes of licence texts), one global batch of two micro-batches, bf16 with fp32 masters, AdamW, clipping, a
schedule of the learning rate; two ranks over gloo that share the processors. There are two machines: a rank on each, and a state server
of Ballast's, which keeps two copies of each chunk. What is to outlive a machine is elsewhere: etcd, and the peers' checkpoints. These lie
on the same disk, so this shared storage is as fast as a local disk, and never fails. Each system runs three times:
  1. undisturbed: tokens/s; systems with checkpoints also measure what one costs at several intervals, from which the interval with the
     best expected goodput is chosen
  2. under fire for S seconds. One small launcher restarts whatever dies, by the same command line, at once:
       0.125 S  kill -9 of a trainer
       0.265 S  kill -9 of a state server; of both trainers where there is none
       0.4 S    all trainers are killed; the group comes back with one
       0.535 S  all trainers are killed; the group comes back with two
       0.675 S  a machine is lost: kill -9 of the trainer and the state server on it, and its disk is deleted. A machine with an empty
                disk takes its place at once
       0.85 S   everything stands still, one byte of the newest state on disk flips, everything is killed
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
import datetime
import glob
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

from fire.launcher import ENDINGS, scratch
from fire.report import Row, curve, draw, read_row, table
from fire.run import SCHEDULE, Outcome, Run, Setting, schedule_of
from fire.score import Score, score, step_seconds, sweep

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENS = 2 * 1 * 512  # of a step: fire/trainer.py
ALONE = 12  # undisturbed steps before a sweep
SETTINGS = {
    'ballast': Setting('ballast', servers=True, copies=2),
    'ballast_apart': Setting('ballast', servers=True, copies=2, apart=True, variant='_apart'),
    'ballast_one_copy': Setting('ballast', servers=True, variant='_one_copy'),
    'ballast_every_k': Setting('ballast_every_k', servers=True, interval=10),
    # Install it with DS_BUILD_CPU_ADAM=1: a kernel that is not built ahead is checked at each start, for 2 s.
    'deepspeed': Setting('deepspeed', checkpoints=True, converts=True, sweep=(2, 4, 8)),
    'fsdp2': Setting('fsdp2', checkpoints=True, sweep=(2, 4, 8)),
}
NEEDS = {system: setting.name.split('_')[0] for system, setting in SETTINGS.items() if setting.name != 'fsdp2'}
DEFAULT = 'ballast,deepspeed,fsdp2'


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--plot')
    parser.add_argument('--with', dest='earlier', default='')
    parser.add_argument('--seconds', type=float, default=72)
    parser.add_argument('--systems', default=DEFAULT)
    parser.add_argument('--directory')
    parser.add_argument('--build', default=os.path.join(ROOT, 'build', 'release'))
    args = parser.parse_args()
    args.systems = [system for system in args.systems.split(',') if system]
    unknown = [system for system in args.systems if system not in SETTINGS]
    if unknown:
        parser.error(f'--systems {unknown[0]}: expected some of {", ".join(SETTINGS)}')
    return args


def versions(system: str) -> str:
    import torch
    named = NEEDS.get(system)
    said = f'torch {torch.__version__}'
    if named is None:
        return said
    if named == 'deepspeed':
        folder = os.path.dirname(importlib.util.find_spec('deepspeed').origin)
        ahead = glob.glob(os.path.join(folder, 'ops', 'adam', 'cpu_adam_op*.so'))
        said += ', its kernel built ahead' if ahead else ', its kernel checked by JIT for 2 s of each start'
    try:
        return f'{named} {importlib.metadata.version(named)}, {said}'
    except importlib.metadata.PackageNotFoundError:
        return f'{named} of this tree, {said}'


def machine() -> str:
    with open('/proc/cpuinfo', encoding='ascii') as file:
        model = next((line.split(':')[1].strip() for line in file if line.startswith('model name')), 'unknown processor')
    return f'{datetime.date.today()}, {model}, {len(os.sched_getaffinity(0))} processors'


def say(text: str) -> None:
    print(f'under_fire: {text}', file=sys.stderr, flush=True)


class Failed(Exception):
    """A system has no row."""


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
        for name in sorted(os.listdir(folder)):
            if name.endswith('.log'):
                with open(os.path.join(folder, name), encoding='utf-8', errors='replace') as file:
                    outcome.logs[name] = file.read()
        shutil.rmtree(folder)
        return outcome

    def measure(self, setting: Setting) -> Row:
        seconds, found = self._args.seconds, []
        say(f'{setting.label}: undisturbed')
        if setting.sweep:
            first = self._run(setting, '--alone', str(ALONE), '--sweep', ','.join(map(str, setting.sweep)))
            must_end(first)
            found = sweep(first.events, ALONE, len(schedule_of(setting)), seconds)
            setting = replace(setting, interval=max(found, key=lambda each: each.goodput).interval)
        else:
            first = self._run(setting, '--steps', str(ALONE + 8))
            must_end(first)
        before = step_seconds(first.events, last=ALONE if setting.sweep else None)
        say(f'{setting.label}: under fire for {seconds:.0f} s')
        fire = self._run(setting, seconds=seconds, schedule=schedule_of(setting))
        result = score(fire.events, seconds)
        ended = [event['step'] for event in fire.events if event['what'] == 'ended' and event['rank'] == 0]
        steps = ended[-1] if ended else result.steps
        say(f'{setting.label}: undisturbed again, {steps} steps')
        after = self._run(replace(setting, interval=setting.interval if setting.servers else 0), '--steps', str(steps))
        must_end(after)
        measured = [before, step_seconds(after.events)]
        step_s = sum(seconds * count for seconds, count in measured) / sum(count for _, count in measured)
        differing, elements = differ(fire.parameters, after.parameters) if ended else (None, 0)
        return row(setting, result, step_s, [TOKENS / each for each, _ in measured], differing, elements, fire, found,
                   curve(fire.events, seconds, TOKENS))


def must_end(outcome: Outcome) -> None:
    if not any(event['what'] == 'ended' for event in outcome.events):
        raise Failed('an undisturbed run did not end:\n' +
                     '\n'.join(f'{name}:\n' + '\n'.join(text.splitlines()[-15:]) for name, text in outcome.logs.items()))


def differ(one: str, other: str) -> tuple[int, int]:
    """Elements whose bits differ, and all elements."""
    import torch
    a, b = torch.load(one), torch.load(other)
    if a.keys() != b.keys():
        raise Failed(f'{one} and {other} have other parameters')
    bits = {2: torch.int16, 4: torch.int32}

    def as_bits(tensor):
        return tensor.contiguous().view(bits[tensor.element_size()])
    different = sum(int((as_bits(a[name]) != as_bits(b[name])).sum()) for name in a)
    return different, sum(tensor.numel() for tensor in a.values())


def row(setting: Setting, result: Score, step_s: float, alone: list[float], differing: int | None, elements: int, fire: Outcome,
        found: list, points: tuple[list[float], list[float]]) -> Row:
    return Row(setting.label, versions(setting.name), alone, result.steps * TOKENS / result.seconds, result.steps * step_s / result.seconds,
               result.steps * step_s / (result.seconds - result.starts_s), result.lost_steps, result.lost_steps * TOKENS, differing,
               elements, fire.operator, flipped(fire), result.steps, result.deaths, result.returns, setting.interval, found, points)


def flipped(fire: Outcome) -> str:
    """What became of the byte."""
    flip = next((event for event in fire.events if event['what'] == 'flipped'), None)
    if flip is None:
        return 'there was no state'
    after = [event for event in fire.events if event['t'] > flip['t']]
    said = next((line for text in fire.logs.values() for line in text.splitlines() if 'CRC32C' in line or 'rebuilt from' in line), None)
    opened = next((event['step'] for event in after if event['what'] == 'opened' and event['rank'] == 0), None)
    if said is not None and 'rebuilt from' in said:
        return 'repaired'
    if opened is None:
        return 'refused by name: ' + said.split('] ')[-1][:60] if said else 'the job does not start any more'
    if 'step' not in flip:
        return 'in bytes that nobody needed'
    if opened == flip['step']:
        return 'loaded without a word'
    return 'the checkpoint did not load'


def check(args: argparse.Namespace) -> list[str]:
    """The systems that can run; says why others cannot."""
    if args.plot and importlib.util.find_spec('matplotlib') is None:
        raise SystemExit('under_fire: --plot needs matplotlib, which is not installed: pip install matplotlib')
    there = []
    for system in args.systems:
        needs = NEEDS.get(system)
        if needs is not None and importlib.util.find_spec(needs) is None:
            say(f'{system} is left out: {needs} is not installed')
        elif SETTINGS[system].copies > 1 and shutil.which('etcd') is None:
            say(f'{system} is left out: etcd is not installed (apt-get install etcd-server)')
        elif SETTINGS[system].servers and not os.path.exists(os.path.join(args.build, 'bin', 'ballastd')):
            say(f'{system} is left out: no bin/ballastd in {args.build}; expected a build of the preset release, or --build DIR')
        else:
            there.append(system)
    return there


def earlier_rows(args: argparse.Namespace) -> Iterator[Row]:
    for path in filter(None, args.earlier.split(',')):
        with open(path, encoding='utf-8') as file:
            told = json.load(file)
        if told['seconds'] != args.seconds:
            raise SystemExit(f'under_fire: {path} has runs of {told["seconds"]} s, expected {args.seconds} s (--seconds)')
        yield from map(read_row, told['rows'])


def prepare(directory: str) -> None:
    """What all runs share."""
    kind = subprocess.run(['stat', '-f', '-c', '%T', directory], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ('tmpfs', 'ramfs'):
        raise SystemExit(f'under_fire: {directory} is in memory ({kind}), where nothing has to reach a disk: give --directory on a disk')
    # DeepSpeed's kernel as it was compiled before, if it was: a kill must not leave its lock to other programs.
    extensions = os.path.join(directory, 'torch_extensions')
    compiled = os.environ.get('TORCH_EXTENSIONS_DIR', os.path.expanduser('~/.cache/torch_extensions'))
    if os.path.isdir(compiled):
        shutil.copytree(compiled, extensions)
    os.environ['TORCH_EXTENSIONS_DIR'] = extensions
    os.environ.pop('LOCAL_SIZE', None)  # would have DeepSpeed keep files in /dev/shm


def main() -> int:
    args = parse()
    for number in ENDINGS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    os.environ['PYTHONPATH'] = os.pathsep.join([os.path.join(args.build, 'python'), os.environ.get('PYTHONPATH', '')])
    sys.path.insert(1, os.path.join(args.build, 'python'))
    if importlib.util.find_spec('torch') is None:
        print('skipped: torch is not installed (pip install torch==2.13.0 numpy)')
        return 0
    rows, failed = list(earlier_rows(args)), False
    with scratch(args.directory) as directory:
        prepare(directory)
        bench = Bench(args, directory)
        for system in check(args):
            try:
                measured = bench.measure(SETTINGS[system])
            except (Failed, ValueError) as error:
                failed = True
                say(f'{system} has no row: {error}')
                continue
            rows.append(measured)
            if args.json:
                with open(args.json, 'w', encoding='utf-8') as file:
                    json.dump({'on': machine(), 'seconds': args.seconds, 'rows': [asdict(each) for each in rows]}, file, indent=1)
    print(f'{machine()}; {args.seconds:.0f} s under fire, a fault every {args.seconds / len(SCHEDULE):.0f} s')
    print(table(rows))
    if args.plot and rows:
        draw(args.plot, rows, args.seconds, machine())
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
