#!/usr/bin/env python3
"""A training step with optimizer state on NVMe: DeepSpeed's ZeRO-3 against a Ballast chunk store, in one run on one disk.

Usage: deepspeed_nvme.py [--json FILE] [--directory DIR] [--rounds N] [--threads N] [--staging SIZE] [--dram SIZE] [--peer FILE] ...
  --directory DIR   on the disk to measure; takes about 36 bytes per parameter of both, gone afterwards
  --rounds N        measured steps of each, alternating which goes first (default 9)
  --staging SIZE    our DRAM for state on its way (default 96MiB)
  --dram SIZE       our DRAM for state that stays there, in the row that has any (default 1536MiB: with it we keep less in memory
                    than DeepSpeed does)
  --layers, --hidden  the model (default 16 linear layers of 4096 x 4096, bf16, one row per batch)

Both train the same model on the same inputs with AdamW, on the CPU. DeepSpeed: offload_optimizer nvme, pipelined read and
write, 12 buffers, tuned aio, a sub-group per layer. Ours: plain torch, whose gradients a hook copies into the chunks' gradient
buffers (shared memory) during backward; build/*/bin/nvme_step_peer looks at the norm, updates the chunks on NVMe and copies
the result into the trainer's parameters. No durability on either side.

Rows, ratio = DeepSpeed's seconds / ours, the median over rounds (above 1 we are faster): step/f32, all state on the disk;
step/f32_dram, with --dram; step/8bit (our 8-bit moments against the same fp32 ones of DeepSpeed, which has none for this);
backward+step/f32. Resident sets are the peaks over the measured rounds: theirs, and ours of trainer and peer together.
"""
import argparse
import glob
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time

from workers import CHUNK, HYPER, DeepSpeed, Trainer, make_model, median, status_bytes, take_turns

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--directory', default='.')
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--staging', default='96MiB')
    parser.add_argument('--dram', default='1536MiB')
    parser.add_argument('--peer')
    parser.add_argument('--layers', type=int, default=16)
    parser.add_argument('--hidden', type=int, default=4096)
    parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parameters = args.layers * args.hidden ** 2
    if args.parameters % CHUNK:
        parser.error(f'--layers x --hidden^2: expected a multiple of {CHUNK} parameters, got {args.parameters}')
    if args.peer is None:
        found = sorted(glob.glob(os.path.join(ROOT, 'build', '*', 'bin', 'nvme_step_peer')), key=os.path.getmtime)
        args.peer = found[-1] if found else None
    return args


class DeepSpeedF32(DeepSpeed):
    def step(self):
        taken = super().step()
        taken['f32'] = taken.pop('optimizer')
        return taken


class Shared:
    """bf16 in memory that a child may map under `path`."""

    def __init__(self, parameters):
        import torch
        self.fd = os.memfd_create('ballast')
        os.ftruncate(self.fd, 2 * parameters)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, 2 * parameters), dtype=torch.bfloat16)
        self.path = f'/proc/self/fd/{self.fd}'


class Peer:
    def __init__(self, args, moments, gradients, parameters, dram='0'):
        directory = os.path.join(args.directory, f'ballast_{moments}_{dram}')
        self.process = subprocess.Popen(
            [args.peer, '--directory', directory, '--chunks', str(args.parameters // CHUNK), '--gradients', gradients.path,
             '--parameters', parameters.path, '--moments', moments, '--staging', args.staging, '--dram', dram, '--threads', str(args.threads),
             '--learning-rate', str(HYPER['lr'])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(gradients.fd, parameters.fd))
        if self.process.stdout.readline().strip() != 'ready':
            sys.exit('deepspeed_nvme.py: nvme_step_peer ended before it was ready')

    def ask(self, request):
        self.process.stdin.write(request + '\n')
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


class Ballast(Trainer):
    def start(self):
        self.forward = make_model(self.args)
        gradients, parameters, *others = (Shared(self.args.parameters) for _ in range(4))
        at = 0
        for weight in self.forward.parameters():
            part = slice(at, at := at + weight.numel())
            shared = parameters.tensor[part].view(weight.shape)
            shared.copy_(weight.detach())
            weight.data = shared
            weight.register_post_accumulate_grad_hook(self.hand_over(gradients.tensor[part].view(weight.shape)))
        for other in others:
            other.tensor.copy_(parameters.tensor)
            other.tensor = None  # a peer's alone from here on: not in this process's resident set
        self.peers = {'f32': Peer(self.args, 'f32', gradients, parameters),
                      'f8': Peer(self.args, 'f8', gradients, others[0]),
                      'f32_dram': Peer(self.args, 'f32', gradients, others[1], self.args.dram)}

    @staticmethod
    def hand_over(target):
        def hook(weight):
            target.copy_(weight.grad)
            weight.grad = None
        return hook

    def step(self):
        loss = self.loss()
        start = time.perf_counter()
        loss.backward()
        answer = {'backward': time.perf_counter() - start, 'loss': loss.item()}
        for name, peer in self.peers.items():
            start = time.perf_counter()
            peer.ask('step')
            answer[name] = time.perf_counter() - start
        return answer

    def save(self, path):
        import torch
        torch.save(self.forward[0].weight.detach().clone(), path)

    def reset_peak(self):
        super().reset_peak()
        for peer in self.peers.values():
            peer.ask('reset_peak')

    def resident(self):
        # Asking for a peak does not move it. Shared memory is resident in both, and there once.
        peaks = {name: peer.ask('resident') for name, peer in self.peers.items()}
        own = {name: peak['peak_rss_bytes'] - peak['shared_bytes'] for name, peak in peaks.items()}
        return {'bytes': status_bytes('VmHWM') + own['f32'], 'dram_bytes': status_bytes('VmHWM') + own['f32_dram'],
                'peer_bytes': peaks['f32']['peak_rss_bytes'], 'peer8_bytes': peaks['f8']['peak_rss_bytes']}

    def stop(self):
        for peer in self.peers.values():
            peer.stop()


WORKERS = {'deepspeed': DeepSpeedF32, 'ballast': Ballast}


# ---- the main process


def measure(args, directory):
    seconds, resident = take_turns(__file__, tuple(WORKERS), args, directory)
    rows = []
    for name, theirs, ours in (('step/f32', ('f32',), ('f32',)), ('step/f32_dram', ('f32',), ('f32_dram',)),
                               ('step/8bit', ('f32',), ('f8',)), ('backward+step/f32', ('backward', 'f32'), ('backward', 'f32'))):
        a = [sum(taken[key] for key in theirs) for taken in seconds['deepspeed']]
        b = [sum(taken[key] for key in ours) for taken in seconds['ballast']]
        rows.append({'name': name, 'ratio': median([x / y for x, y in zip(a, b)]), 'seconds': median(a),
                     'ballast_seconds': median(b), 'parameters': args.parameters})
    return rows, resident


def main():
    args = parse()
    if args.worker:
        return WORKERS[args.worker](args).serve()
    for module in ('torch', 'deepspeed'):
        if importlib.util.find_spec(module) is None:
            print(f'skipped: {module} is not installed (pip install torch==2.13.0 numpy; '
                  'DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8; apt-get install libaio-dev)')
            return 0
    if args.peer is None:
        sys.exit('deepspeed_nvme.py: no build/*/bin/nvme_step_peer: build the release preset, or give --peer')
    directory = tempfile.mkdtemp(prefix='deepspeed_nvme.', dir=args.directory)
    try:
        rows, resident = measure(args, directory)
    except ChildProcessError as error:
        if 'async_io' not in str(error) and 'libaio' not in str(error):
            raise
        print(f'skipped: DeepSpeed cannot build its async_io operator here (apt-get install libaio-dev)\n{error}')
        return 0
    finally:
        shutil.rmtree(directory)
    mib = {name: peak['bytes'] / CHUNK for name, peak in resident.items()}
    print(f'seconds of a step over {args.parameters} parameters; resident: DeepSpeed {mib["deepspeed"]:.0f} MiB, '
          f'ours {mib["ballast"]:.0f} MiB, of which nvme_step_peer {resident["ballast"]["peer_bytes"] / CHUNK:.0f}; with '
          f'{args.dram} for state {resident["ballast"]["dram_bytes"] / CHUNK:.0f}')
    print(f'{"row":24} {"peer":>8} {"ours":>8} {"ratio":>6}')
    for row in rows:
        print(f'{row["name"]:24} {row["seconds"]:8.4f} {row["ballast_seconds"]:8.4f} {row["ratio"]:6.2f}')
    if resident['ballast']['dram_bytes'] > resident['deepspeed']['bytes']:
        print('ours took more DRAM than DeepSpeed: lower --dram for a fair comparison')
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'rows': rows, 'resident': resident}, file, indent=1)
    return 0


if __name__ == '__main__':
    sys.exit(main())
