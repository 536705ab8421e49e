#!/usr/bin/env python3
"""A training whose parameters, gradients and optimizer state are divided over ranks and kept off the device: ballast.torch.shard() against
FSDP2 and DeepSpeed ZeRO-3, in one run on one machine.

Usage: torch_shard.py [--json FILE] [--directory DIR] [--rounds N] [--turn N] [--only dram|nvme] [--layers N | --parameters N] ...
  --directory DIR   on the disk to measure; takes about 40 bytes per parameter, gone afterwards
  --rounds N        turns of each system (default 3), in alternating order
  --turn N          measured steps of a turn (default 2), behind one that is not measured
  --layers N        blocks of the model (default 16: 203M parameters); --parameters N: as many blocks as come nearest
  --width, --length width of the model (default 1024), tokens of a rank's row (default 128)
  --dram SIZE       the server's memory where its state is on NVMe (default 1GiB)
  --systems A,B     some of the systems below
  --profile DIR     rank 0 of each system writes cProfile's account of its turns there
  --device cuda     one rank and its GPU, all processors; masters, moments and gathered units go to it from the host's memory
  --ranks N         default 2, on a GPU 1
  --rows N          rows of a rank in a step (default 1)
  --return-memory   trainers' malloc gives freed memory above 1 MiB back at once, so that peaks are what systems need and not what
                    glibc keeps between allocations; page faults take time then

All train one GPT on the same batches with AdamW and clipping (norm 1), as ranks over gloo, on the CPU, one thread each, in bf16 with
fp32 masters and moments. They take turns, so that a drift of the machine meets all of them.
  ballast         shard() with push_early and one ballastd (in the process of a single rank), durability none, state in DRAM
  ballast_served  of a single rank: a ballastd beside it
  fsdp2           fully_shard of the same units with CPUOffloadPolicy, and torch's fused AdamW
  deepspeed       ZeRO-3 with parameters and optimizer on the CPU
  ballast_nvme    shard() whose server keeps its state on NVMe
  deepspeed_nvme  ZeRO-Infinity: parameters and optimizer on NVMe, pipelined, aio tuned
On a GPU: all on the GPU; then parameters and state on the host, by shard() over its own server in the process and over a ballastd, by
FSDP2, by DeepSpeed ZeRO-3; then parameters on the GPU and state on the host, by ballast.torch.AdamW and by DeepSpeed ZeRO-2.
  hbm, ballast, ballast_served, fsdp2, deepspeed, ballast_state, deepspeed_state; and both on NVMe, as above

Rows: tokens/s by the median step of rank 0; peak resident set of a trainer in its turns after the first, and on a GPU the most that torch
had allocated there; CPU seconds of a step, of all trainers (user, system) and of the server; seconds of a step in which gathers waited for
pulls, and of the call that updates. Goals: on CPUs at least 1.0 of FSDP2's tokens/s at at most 0.5 of its peak, and 1.25 of DeepSpeed
ZeRO-3's; on a GPU 1.5 of either with offload. The last lines say which are not met.
"""
import argparse
import contextlib
import cProfile
import ctypes
import gc
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import sys
import tempfile
import time

from workers import HYPER, Ranks, Trainer, deepspeed_engine, median, status_bytes

MAX_NORM = 1.0
HYPER = {**HYPER, 'lr': 3e-4}
LOSSES_APART = 0.05  # of systems that do the same in bf16; the losses fall by 2 and more
NAMES = {'cpu': {'dram': ('ballast', 'ballast_served', 'fsdp2', 'deepspeed'), 'nvme': ('ballast_nvme', 'deepspeed_nvme')},
         'cuda': {'hbm': ('hbm',), 'dram': ('ballast', 'ballast_served', 'fsdp2', 'deepspeed'),
                  'state': ('ballast_state', 'deepspeed_state'), 'nvme': ('ballast_nvme', 'deepspeed_nvme')}}
GOALS = {'cpu': (('ballast', 'fsdp2', 'tokens', 1.0), ('ballast', 'fsdp2', 'peak', 0.5), ('ballast', 'deepspeed', 'tokens', 1.25),
                 ('ballast_nvme', 'deepspeed_nvme', 'tokens', 2.0)),
         'cuda': (('ballast', 'fsdp2', 'tokens', 1.5), ('ballast', 'deepspeed', 'tokens', 1.5), ('ballast', 'hbm', 'tokens', 0.5),
                  ('ballast', 'fsdp2', 'gpu', 1.0), ('ballast_state', 'deepspeed_state', 'tokens', 1.0),
                  ('ballast_nvme', 'deepspeed_nvme', 'tokens', 2.0))}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--turn', type=int, default=2)
    parser.add_argument('--device', choices=NAMES, default='cpu')
    parser.add_argument('--only', choices=[only for names in NAMES.values() for only in names])
    parser.add_argument('--systems')
    parser.add_argument('--layers', type=int)
    parser.add_argument('--parameters', type=int, default=203_000_000)
    parser.add_argument('--width', type=int, default=1024)
    parser.add_argument('--length', type=int, default=128)
    parser.add_argument('--dram', default='1GiB')
    parser.add_argument('--ranks', type=int)
    parser.add_argument('--rows', type=int, default=1)
    parser.add_argument('--threads', type=int, help=argparse.SUPPRESS)
    parser.add_argument('--profile')
    parser.add_argument('--return-memory', action='store_true')
    parser.add_argument('--server', help=argparse.SUPPRESS)
    parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.hidden = args.width * 8 // 3 // 64 * 64
    args.block = 4 * args.width ** 2 + 3 * args.width * args.hidden
    if args.layers is None:
        args.layers = max(1, round(args.parameters / args.block))
    args.world = args.ranks or (2 if args.device == 'cpu' else 1)
    if args.threads is None:
        args.threads = 1 if args.device == 'cpu' else os.cpu_count()
    return args


class Rank(Trainer):
    """One rank of a system. Subclasses wrap the model, and say how gradients and the update are made."""

    def start(self):
        import torch

        from fire.model import Batches, make_model
        torch.set_num_threads(self.args.threads)
        self.join()
        self.rank = torch.distributed.get_rank()
        self.batches = Batches(self.args.world, self.args.rows, self.args.length)
        sizes = {'width': self.args.width, 'layers': self.args.layers, 'heads': self.args.width // 64, 'hidden': self.args.hidden}
        model = make_model(torch.bfloat16, **sizes).to(self.args.device)
        torch.set_default_device(self.args.device)
        self.model = self.wrap(model)
        self.update_seconds = 0.0
        self.profile = cProfile.Profile() if self.args.profile and self.rank == 0 else None

    def join(self):
        import torch
        torch.distributed.init_process_group('gloo' if self.args.device == 'cpu' else 'cpu:gloo,cuda:nccl')

    def one(self):
        """A step: its seconds, and its loss."""
        import torch
        start = time.perf_counter()
        with torch.device('cpu'):
            tokens, targets = (each.to(self.args.device) for each in self.batches.next()[self.rank])
        loss = self.model(tokens, targets)
        self.backward(loss)
        before = time.perf_counter()
        self.update()
        if self.args.device == 'cuda':
            torch.cuda.synchronize()
        end = time.perf_counter()
        self.update_seconds += end - before
        return end - start, loss.item()

    def step(self):
        """A turn. What a system does ahead at the end of a step is done in one before the measured ones, too."""
        import torch
        torch.distributed.barrier()
        with self.profile or contextlib.nullcontext():
            self.one()
            used, waited, updated = resource.getrusage(resource.RUSAGE_SELF), self.waited(), self.update_seconds
            seconds, losses = zip(*(self.one() for _ in range(self.args.turn)))
            now = resource.getrusage(resource.RUSAGE_SELF)
        return {'seconds': seconds, 'loss': losses[-1], 'waited': (self.waited() - waited) / self.args.turn,
                'update': (self.update_seconds - updated) / self.args.turn,
                'user': (now.ru_utime - used.ru_utime) / self.args.turn, 'system': (now.ru_stime - used.ru_stime) / self.args.turn}

    def waited(self):
        """Seconds so far in which gathers waited for parameters that are elsewhere."""
        return 0.0

    def reset_peak(self):
        gc.collect()
        ctypes.CDLL('libc.so.6').malloc_trim(0)  # what the whole model took before it was divided is no system's
        super().reset_peak()
        if self.args.device == 'cuda':
            import torch
            torch.cuda.reset_peak_memory_stats()

    def resident(self):
        import torch
        return {'bytes': status_bytes('VmHWM'), 'swapped': status_bytes('VmSwap'),
                'gpu': torch.cuda.max_memory_allocated() if self.args.device == 'cuda' else 0}

    def stop(self):
        if self.profile is not None:
            self.profile.dump_stats(os.path.join(self.args.profile, f'{self.args.worker}.prof'))


class Ballast(Rank):
    """The model is in bf16: masters are the servers' own."""

    def wrap(self, model):
        import ballast.torch
        self.place(model)
        where = {'servers': self.args.server} if self.args.server else {'dram': memory_of(self.args)}
        self.optimizer = ballast.torch.AdamW(model.named_parameters(), durability='none', max_norm=MAX_NORM, name=self.args.worker,
                                             step_timeout=600.0, **where, **self.more(model), **HYPER)
        self.optimizer.resume()
        return model

    def place(self, model):
        import ballast.torch
        ballast.torch.shard(model)

    def more(self, model):
        return {}

    def backward(self, loss):
        loss.backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def waited(self):
        return self.optimizer.stats()['unit_pull_wait_seconds']

    def stop(self):
        super().stop()
        self.optimizer.close()


class BallastState(Ballast):
    """Parameters and gradients stay where they are."""

    def place(self, model):
        pass

    def more(self, model):
        return {'overlap': model}

    def waited(self):
        return 0.0


class Fsdp2(Rank):
    """The sharded parameters are fp32 masters on the CPU. There CPUOffloadPolicy changes nothing but where tensors would be pinned:
    shards are on the CPU already, and FSDP2's copies to the device and back give the tensors themselves."""

    def policy(self):
        from torch.distributed.fsdp import CPUOffloadPolicy
        return {'offload_policy': CPUOffloadPolicy(pin_memory=self.args.device == 'cuda')}

    def wrap(self, model):
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = {'mesh': torch.distributed.init_device_mesh(self.args.device, (self.args.world,)),
                  'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16), **self.policy()}
        model.float()
        for block in model.blocks:
            fully_shard(block, **policy)
        fully_shard(model, **policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
        return model

    def backward(self, loss):
        loss.backward()

    def update(self):
        import torch
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Hbm(Fsdp2):
    """All of it stays on the GPU."""

    def policy(self):
        return {'reshard_after_forward': False}


class DeepSpeed(Rank):
    """As it comes: ZeRO-3 keeps up to 1e9 parameters gathered that it will use again soon, which is faster and takes memory."""

    def join(self):
        import deepspeed
        deepspeed.init_distributed('gloo' if self.args.device == 'cpu' else 'nccl')

    def wrap(self, model):
        return deepspeed_engine(model, self.zero(), HYPER, MAX_NORM)

    def zero(self):
        return {'stage': 3, 'offload_param': self.host(), 'offload_optimizer': self.host()}

    def host(self):
        return {'device': 'cpu', 'pin_memory': self.args.device == 'cuda'}

    def backward(self, loss):
        self.model.backward(loss)

    def update(self):
        self.model.step()


class DeepSpeedNvme(DeepSpeed):
    def zero(self):
        largest = 2 * self.args.hidden * self.args.width
        nvme = {**self.host(), 'device': 'nvme', 'nvme_path': os.path.join(self.args.directory, 'deepspeed')}
        return {'stage': 3, 'sub_group_size': self.args.block // self.args.world,
                'offload_param': {**nvme, 'buffer_count': 16, 'buffer_size': -(-largest // self.args.world // 1024) * 1024},
                'offload_optimizer': {**nvme, 'buffer_count': 12, 'pipeline_read': True, 'pipeline_write': True}}


class DeepSpeedState(DeepSpeed):
    def zero(self):
        return {'stage': 2, 'offload_optimizer': self.host()}


WORKERS = {'hbm': Hbm, 'ballast_served': Ballast, 'ballast_state': BallastState, 'deepspeed_state': DeepSpeedState,
           'ballast': Ballast, 'fsdp2': Fsdp2, 'deepspeed': DeepSpeed, 'ballast_nvme': Ballast, 'deepspeed_nvme': DeepSpeedNvme}


# ---- the main process


def tokens_of(args):
    """Of a step, all ranks together."""
    return args.world * args.rows * args.length


def memory_of(args):
    """What a server without NVMe is given: masters, moments and working copies, and room for gradients and buffers."""
    return f'{args.layers * args.block * 20 + (2 << 30) >> 20}MiB'


class Server:
    """The state server of one of our rows."""

    def __init__(self, name, args, directory):
        from ballast.embedded_daemon import Daemon
        on_disk = name.endswith('_nvme')
        self.daemon = Daemon(os.path.join(directory, f'{name}_server'), args.dram if on_disk else memory_of(args),
                             '16GiB' if on_disk else 0, os.cpu_count())
        self.address = self.daemon.address

    def cpu(self):
        """CPU seconds so far: user, system."""
        with open(f'/proc/{self.daemon.process.pid}/stat', encoding='ascii') as file:
            fields = file.read().rpartition(')')[2].split()
        return [int(field) / os.sysconf('SC_CLK_TCK') for field in fields[11:13]]

    def peak(self):
        return status_bytes('VmHWM', self.daemon.process.pid)

    def stop(self):
        self.daemon.stop()


class System:
    """A system's ranks, its server if it has one, and its measurements."""

    def __init__(self, name, args, directory):
        is_served = name in ('ballast_served', 'ballast_nvme') or (name == 'ballast' and args.world > 1)
        self.server = Server(name, args, directory) if is_served else None
        # The arguments of a rank.
        given = {key: getattr(args, key) for key in ('layers', 'width', 'length', 'ranks', 'rows', 'device', 'turn', 'threads', 'profile')}
        given = argparse.Namespace(**given, server=self.server.address if self.server else None)
        malloc = {'MALLOC_MMAP_THRESHOLD_': str(1 << 20)} if args.return_memory else {}
        self.ranks = Ranks(__file__, name, given, directory, args.world, DS_ACCELERATOR=args.device, **malloc)
        self.turns, self.server_cpu = [], []

    def turn(self):
        before = self.server.cpu() if self.server else [0, 0]
        answers = self.ranks.ask('step')
        after = self.server.cpu() if self.server else [0, 0]
        steps = 1 + len(answers[0]['seconds'])
        self.turns.append(answers)
        self.server_cpu.append([(b - a) / steps for a, b in zip(before, after)])

    def forget(self):
        """Turns so far were for the warm-up."""
        self.turns, self.server_cpu = [], []
        self.ranks.ask('reset_peak')

    def result(self, name, args):
        peaks = self.ranks.ask('resident')
        steps = [seconds for answers in self.turns for seconds in answers[0]['seconds']]

        def both(key):
            return median([sum(answer[key] for answer in answers) for answers in self.turns])

        def one(key):
            return median([answers[0][key] for answers in self.turns])
        row = {'name': name, 'tokens': tokens_of(args) / median(steps), 'steps': steps, 'peak': max(peak['bytes'] for peak in peaks),
               'swapped': max(peak['swapped'] for peak in peaks), 'user': both('user'), 'system': both('system'), 'waited': one('waited'),
               'update': one('update'), 'loss': sum(answer['loss'] for answer in self.turns[-1]) / args.world,
               'gpu': max(peak['gpu'] for peak in peaks)}
        if self.server:
            row['server_cpu'] = [median(each) for each in zip(*self.server_cpu)]
            row['server_peak'] = self.server.peak()
        return row

    def stop(self):
        self.ranks.stop()
        if self.server:
            self.server.stop()


def side_by_side(names, args, directory):
    """Rows of these systems; those that cannot be here are skipped with a word."""
    systems = {}
    try:
        for name in names:
            try:
                systems[name] = System(name, args, directory)
            except ChildProcessError as error:
                print(f'skipped: {name}\n{error}')
        for number in range(-1, args.rounds):
            if number == 0:
                for system in systems.values():
                    system.forget()
            for name in (list(systems) if number % 2 == 0 else reversed(systems)):
                systems[name].turn()
            print(f'\r{", ".join(systems)}: round {number + 1} of {args.rounds}', end='', file=sys.stderr)
        print(file=sys.stderr)
        return [system.result(name, args) for name, system in systems.items()]
    finally:
        for system in systems.values():
            system.stop()


def names_of(args):
    """Names, by group, of the systems that are asked for and installed."""
    missing = [module for module in ('deepspeed', 'ballast') if importlib.util.find_spec(module) is None]
    for module in missing:
        print(f'skipped: {module} is not installed (pip install ./client/python; '
              'DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8; apt-get install libaio-dev)')
    if args.only is not None and args.only not in NAMES[args.device]:
        sys.exit(f'--only {args.only}: expected one of {", ".join(NAMES[args.device])} with --device {args.device}')
    wanted = args.systems.split(',') if args.systems else list(WORKERS)
    if not set(wanted) <= set(WORKERS):
        sys.exit(f'--systems {args.systems}: expected some of {",".join(WORKERS)}')
    if args.world > 1:
        wanted = [name for name in wanted if name != 'ballast_served']  # as ballast
    return [[name for name in names if name in wanted and name.partition('_')[0] not in missing]
            for group, names in NAMES[args.device].items() if args.only in (None, group)]


def versions():
    found = {'python': sys.version.split()[0]}
    for module in ('torch', 'deepspeed', 'ballast'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[module] = importlib.metadata.version(module)
    return found


def show(rows, args):
    print(f'{args.layers} blocks, {args.layers * args.block / 1e6:.0f}M parameters, {args.world} ranks, {tokens_of(args)} tokens a step; '
          + ', '.join(f'{name} {version}' for name, version in versions().items()))
    print(f'{"system":15} {"tokens/s":>8} {"step s":>7} {"min":>6} {"max":>6} {"peak MiB":>8} {"server":>7} {"user":>6} {"system":>6} '
          f'{"server CPU":>13} {"waited":>7} {"update":>7} {"loss":>6}' + (f' {"GPU MiB":>8}' if args.device == 'cuda' else ''))
    for row in rows:
        served = f'{row["server_peak"] >> 20:7} ' if 'server_peak' in row else ' ' * 8
        cpu = '{:6.2f} {:6.2f}'.format(*row['server_cpu']) if 'server_cpu' in row else ''
        print(f'{row["name"]:15} {row["tokens"]:8.1f} {median(row["steps"]):7.3f} {min(row["steps"]):6.3f} {max(row["steps"]):6.3f} '
              f'{row["peak"] >> 20:8} {served}{row["user"]:6.2f} {row["system"]:6.2f} {cpu:>13} {row["waited"]:7.3f} {row["update"]:7.3f} '
              f'{row["loss"]:6.3f}' + (f' {row["gpu"] >> 20:8}' if args.device == 'cuda' else ''))


def compare(rows, args):
    """Ratios that are aimed at, and whether the systems trained the same."""
    by_name = {row['name']: row for row in rows}
    ratios = []
    for ours, peer, what, goal in GOALS[args.device]:
        if what == 'peak' and args.world == 1:
            continue  # the server is in the trainer's process
        if ours in by_name and peer in by_name:
            ratio = by_name[ours][what] / by_name[peer][what]
            most = what in ('peak', 'gpu')
            print(f'{what} of {ours} over those of {peer}: {ratio:.3f}; goal: at {"most" if most else "least"} {goal}'
                  f'{"" if (ratio <= goal) == most else ", NOT MET"}')
            ratios.append({'name': f'{ours}/{peer}/{what}', 'ratio': ratio, 'goal': goal})
    losses = [row['loss'] for row in rows]
    if losses and not max(losses) - min(losses) < LOSSES_APART:
        sys.exit(f'losses in the end are {losses}: the systems trained differently, and the comparison is void')
    return ratios


def main():
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args).serve()
    if importlib.util.find_spec('torch') is None:
        print('skipped: torch is not installed (pip install torch==2.13.0 numpy)')
        return 0
    if args.device == 'cuda':
        import torch
        if not torch.cuda.is_available():
            print('skipped: no GPU')
            return 0
        print(torch.cuda.get_device_name(), f'{args.threads} processors')
    directory = tempfile.mkdtemp(prefix='torch_shard.', dir=args.directory)
    try:
        rows = []
        for names in names_of(args):
            rows += side_by_side(names, args, directory)
            show(rows, args)
    finally:
        shutil.rmtree(directory)
    ratios = compare(rows, args)
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'rows': rows, 'ratios': ratios, 'versions': versions(), 'parameters': args.layers * args.block}, file, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
