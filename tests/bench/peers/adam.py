#!/usr/bin/env python3
"""AdamW by our kernels against torch's fused and foreach AdamW and DeepSpeed's CPUAdam, in one run.

Usage: adam.py [--json FILE] [--library FILE] [--parameters N] [--rounds N] [--threads LIST]
  --library FILE    libballast_adam_peer.so (default: the newest under build/*/lib)
  --parameters N    parameters of one update (default 64 Mi), in tensors of 1 Mi
  --rounds N        rounds; in each all implementations run once, in rotating order (default 9)
  --threads LIST    numbers of threads (default 1,2)

Rows: bare/PEER/Tt is the step alone, 28 bytes per parameter for each of them: peers read fp32 gradients, ours bf16 and
writes bf16 parameters besides. use/PEER/Tt is the step as training uses it: bf16 gradients in, unscale, clip by the global
norm, step, bf16 parameters out. Ratio = the peer's time / ours, the median over rounds: above 1 we are faster.
A peer that is not there is a row with "skipped" and the reason. Parameters, fp32 and bf16, are compared at the end.
"""
import argparse
import ctypes
import glob
import json
import mmap
import os
import subprocess
import sys
import time

TENSOR = 1 << 20
HYPER = {'lr': 1e-3, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0.01}
SCALE, MAX_NORM = 1 / 1024, 1.0
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..', '..'))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json')
    parser.add_argument('--library')
    parser.add_argument('--parameters', type=int, default=64 << 20)
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--threads', default='1,2')
    parser.add_argument('--worker', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parameters % TENSOR or args.parameters <= 0:
        parser.error(f'--parameters: expected a multiple of {TENSOR}, got {args.parameters}')
    if args.library is None and torch_version() is not None:
        found = sorted(glob.glob(os.path.join(ROOT, 'build', '*', 'lib', 'libballast_adam_peer.so')), key=os.path.getmtime)
        if not found:
            parser.error('no build/*/lib/libballast_adam_peer.so: build the release preset, or give --library')
        args.library = found[-1]
    return args


def torch_version():
    try:
        import torch
        return torch.__version__
    except ImportError:
        return None


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


# ---- one process per number of threads, since OpenMP reads it once


def huge(torch, count, dtype):
    """A tensor on huge pages, where the system gives them: the same for everybody."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    memory = mmap.mmap(-1, size + (2 << 20))
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 << 20)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


class Job:
    """Gradients, and the parameters that every implementation starts from."""

    def __init__(self, torch, n):
        self.torch, self.n = torch, n
        generator = torch.Generator().manual_seed(1)
        self.start = huge(torch, n, torch.float32)
        self.start.normal_(0, 0.02, generator=generator)
        self.gradient16 = huge(torch, n, torch.bfloat16)
        self.gradient32 = huge(torch, n, torch.float32)
        # As a loss scaler leaves them; the norm after unscaling is above MAX_NORM.
        self.gradient32.normal_(0, 1.0, generator=generator)
        self.gradient16.copy_(self.gradient32)
        self.gradient32.copy_(self.gradient16)

    def split(self, tensor):
        return list(tensor.split(TENSOR))


class Torch:
    def __init__(self, job, name):
        torch = job.torch
        self.job, self.name = job, name
        self.master = huge(torch, job.n, torch.float32)
        self.master.copy_(job.start)
        self.working = huge(torch, job.n, torch.bfloat16)
        self.buffer = huge(torch, job.n, torch.float32)
        self.parameters = [torch.nn.Parameter(t) for t in job.split(self.master)]
        self.gradients = job.split(self.buffer)
        self.optimizer = self.make(torch)

    def make(self, torch):
        return torch.optim.AdamW(self.parameters, **{self.name.split('_')[1]: True}, **HYPER)

    def bare(self):
        for p, g in zip(self.parameters, self.bare_gradients):
            p.grad = g
        start = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start

    def use(self):
        torch = self.job.torch
        for p, g in zip(self.parameters, self.gradients):
            p.grad = g
        start = time.perf_counter()
        # Autocast's gradients: fp32 copies, unscaled as GradScaler does it, clipped, and parameters cast again.
        torch._foreach_copy_(self.gradients, self.gradients16)
        torch._foreach_mul_(self.gradients, SCALE)
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        torch._foreach_copy_(self.working16, [p.data for p in self.parameters])
        return time.perf_counter() - start

    def prepare(self):
        self.bare_gradients = self.job.split(self.job.gradient32)
        self.gradients16 = self.job.split(self.job.gradient16)
        self.working16 = self.job.split(self.working)


class DeepSpeed(Torch):
    def make(self, torch):
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        return DeepSpeedCPUAdam(self.parameters, adamw_mode=True, **HYPER)

    def use(self):
        torch = self.job.torch
        for p, g in zip(self.parameters, self.gradients):
            p.grad = g
        start = time.perf_counter()
        # As ZeRO-Offload: fp32 copies, one factor for scale and clip (stage_1_and_2.py: unscale_and_clip_grads), step, cast.
        torch._foreach_copy_(self.gradients, self.gradients16)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.gradients))).item() * SCALE
        torch._foreach_mul_(self.gradients, SCALE * min(1.0, MAX_NORM / (norm + 1e-6)))
        self.optimizer.step()
        torch._foreach_copy_(self.working16, [p.data for p in self.parameters])
        return time.perf_counter() - start


class Arrays(ctypes.Structure):
    _fields_ = [('n', ctypes.c_uint64), ('chunk', ctypes.c_uint64)] + [
        (name, ctypes.c_void_p) for name in ('gradient', 'master', 'moment1', 'moment2', 'working')]


class Hyper(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ('lr', 'beta1', 'beta2', 'eps', 'weight_decay')]


class Ballast:
    name = 'ballast'

    def __init__(self, job, library, threads):
        torch = job.torch
        self.library = ctypes.CDLL(library)
        self.library.ballast_pool_new.restype = ctypes.c_void_p
        self.library.ballast_adamw_use.restype = ctypes.c_double
        self.pool = ctypes.c_void_p(self.library.ballast_pool_new(threads))
        self.master, self.moment1, self.moment2 = (huge(torch, job.n, torch.float32) for _ in range(3))
        self.master.copy_(job.start)
        self.moment1.zero_(), self.moment2.zero_()
        self.working = huge(torch, job.n, torch.bfloat16)
        self.arrays = Arrays(job.n, TENSOR, *(t.data_ptr() for t in (job.gradient16, self.master, self.moment1,
                                                                     self.moment2, self.working)))
        self.hyper = Hyper(HYPER['lr'], *HYPER['betas'], HYPER['eps'], HYPER['weight_decay'])
        self.t = 0

    def prepare(self):
        pass

    def bare(self):
        self.t += 1
        start = time.perf_counter()
        self.library.ballast_adamw_step(self.pool, ctypes.byref(self.arrays), ctypes.byref(self.hyper),
                                        ctypes.c_uint64(self.t))
        return time.perf_counter() - start

    def use(self):
        self.t += 1
        start = time.perf_counter()
        self.library.ballast_adamw_use(self.pool, ctypes.byref(self.arrays), ctypes.byref(self.hyper),
                                       ctypes.c_uint64(self.t), ctypes.c_double(SCALE), ctypes.c_double(MAX_NORM))
        return time.perf_counter() - start


def worker(args):
    import torch
    threads = args.worker
    torch.set_num_threads(threads)
    job = Job(torch, args.parameters)
    runs, rows = [Ballast(job, args.library, threads)], []
    for name, make in (('torch_fused', Torch), ('torch_foreach', Torch), ('deepspeed', DeepSpeed)):
        try:
            runs.append(make(job, name))
        except Exception as error:  # not installed, or it does not build here
            why = f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
            rows += [{'name': f'{mode}/{name}/{threads}t', 'skipped': why} for mode in ('bare', 'use')]
    for run in runs:
        run.prepare()
    for mode in ('bare', 'use'):
        seconds = {run.name: [] for run in runs}
        for round_number in range(args.rounds + 1):
            for i in range(len(runs)):
                run = runs[(i + round_number) % len(runs)]
                taken = getattr(run, mode)()
                if round_number > 0:  # the first touches memory
                    seconds[run.name].append(taken)
            print(f'\r{threads} thread(s), {mode}: round {round_number} of {args.rounds}', end='', file=sys.stderr)
        print(file=sys.stderr)
        ours = seconds['ballast']
        for run in runs[1:]:
            theirs = seconds[run.name]
            rows.append({'name': f'{mode}/{run.name}/{threads}t', 'ratio': median([b / a for a, b in zip(ours, theirs)]),
                         'seconds': median(theirs), 'ballast_seconds': median(ours),
                         'parameters': args.parameters})
    # All did the same work: as many steps on the same gradients.
    for run in runs[1:]:
        difference = (run.master - runs[0].master).abs().max().item()
        # Of the order of the weights' ulp: bf16 has 8 bits.
        rounded = (run.working.float() - runs[0].working.float()).abs().max().item()
        if not (difference < 1e-4 and rounded < 2e-3):
            sys.exit(f'{run.name} and ballast ended with parameters {difference} and bf16 parameters {rounded} apart: '
                     'the comparison is void')
    print(json.dumps(rows))


def main():
    args = parse()
    if args.worker:
        return worker(args)
    version = torch_version()
    if version is None:
        print('skipped: torch is not installed (pip install torch==2.13.0)')
        return
    if not version.startswith('2.13.0'):
        print(f'torch is {version}; the figures in kernels/README.md are of 2.13.0', file=sys.stderr)
    rows = []
    for threads in (int(t) for t in args.threads.split(',')):
        command = [sys.executable, os.path.abspath(__file__), '--worker', str(threads), '--library', args.library,
                   '--parameters', str(args.parameters), '--rounds', str(args.rounds)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), DS_ACCELERATOR='cpu')
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.returncode)
        rows += json.loads(done.stdout.splitlines()[-1])
    print(f'torch {version}; seconds per update of {args.parameters} parameters')
    print(f'{"row":24} {"peer":>8} {"ours":>8} {"ratio":>6}')
    for row in rows:
        if 'skipped' in row:
            print(f'{row["name"]:24} skipped: {row["skipped"]}')
            continue
        print(f'{row["name"]:24} {row["seconds"]:8.4f} {row["ballast_seconds"]:8.4f} {row["ratio"]:6.2f}')
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump({'torch': version, 'rows': rows}, file, indent=1)


if __name__ == '__main__':
    main()
