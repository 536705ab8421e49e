"""Trainers that a benchmark compares: each in a process of its own, asked for one step at a time."""
import json
import os
import re
import subprocess
import sys
import time

from fire.launcher import free_port

CHUNK = 1 << 20
HYPER = {'lr': 1e-5, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0.01}


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def status_bytes(field, process='self'):
    return int(re.search(field + r':\s+(\d+) kB', open(f'/proc/{process}/status').read()).group(1)) * 1024


def make_model(args, dtype='bfloat16'):
    import torch
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(args.hidden, args.hidden, bias=False, dtype=getattr(torch, dtype)) for _ in range(args.layers)]
    for layer in layers:  # keeps the size of activations, and so of gradients
        torch.nn.init.normal_(layer.weight, std=args.hidden ** -0.5)
    return torch.nn.Sequential(*layers)


class Trainer:
    """Answers requests of the main process, one line of JSON each."""
    dtype, rows = 'bfloat16', 1  # of parameters; of a batch

    def __init__(self, args):
        self.args, self.batch = args, 0

    def loss(self):
        import torch
        self.batch += 1
        batch = torch.randn(self.rows, self.args.hidden, generator=torch.Generator().manual_seed(self.batch))
        return self.forward(batch.to(getattr(torch, self.dtype))).float().square().sum()

    def serve(self):
        # What libraries print goes to stderr.
        answers = os.fdopen(os.dup(1), 'w')
        os.dup2(2, 1)
        self.start()
        print('"ready"', file=answers, flush=True)
        for line in sys.stdin:
            request = line.strip()
            if request == 'step':
                answer = self.step()
            elif request == 'reset_peak':
                answer = self.reset_peak()
            elif request == 'resident':
                answer = self.resident()
            else:
                answer = self.save(request.split(' ', 1)[1])
            print(json.dumps(answer), file=answers, flush=True)
        self.stop()

    def reset_peak(self):
        with open('/proc/self/clear_refs', 'w', encoding='ascii') as out:
            out.write('5')

    def resident(self):
        return {'bytes': status_bytes('VmHWM')}

    def stop(self):
        pass


def deepspeed_engine(model, zero, hyper, clipping, optimizer='AdamW'):
    """zero: DeepSpeed's zero_optimization. aio is tuned for one disk."""
    import deepspeed
    config = {'train_micro_batch_size_per_gpu': 1, 'bf16': {'enabled': True}, 'gradient_clipping': clipping,
              'optimizer': {'type': optimizer, 'params': hyper}, 'zero_optimization': zero,
              'aio': {'block_size': 1 << 20, 'queue_depth': 32, 'intra_op_parallelism': 2, 'single_submit': False,
                      'overlap_events': True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


class DeepSpeed(Trainer):
    """ZeRO-Infinity: stage 3, optimizer state on NVMe, a sub-group per layer, pipelined, tuned aio."""
    clipping, optimizer, hyper = 0.0, 'AdamW', HYPER

    def zero(self):
        return {'stage': 3, 'sub_group_size': self.args.hidden ** 2,
                'offload_optimizer': {'device': 'nvme', 'nvme_path': os.path.join(self.args.directory, 'deepspeed'),
                                      'buffer_count': 12, 'pipeline_read': True, 'pipeline_write': True}}

    def start(self):
        model = make_model(self.args)
        self.forward = deepspeed_engine(model, self.zero(), self.hyper, self.clipping, self.optimizer)
        self.first = model[0].weight

    def step(self):
        begin = time.perf_counter()
        loss = self.loss()
        start = time.perf_counter()
        self.forward.backward(loss)
        middle = time.perf_counter()
        self.forward.step()
        return {'forward': start - begin, 'backward': middle - start, 'optimizer': time.perf_counter() - middle, 'loss': loss.item()}

    def save(self, path):
        import deepspeed
        import torch
        with deepspeed.zero.GatheredParameters([self.first], enabled=self.zero()['stage'] == 3):
            torch.save(self.first.detach().clone(), path)


class Worker:
    """A trainer in a process of its own: `script` run again with --worker NAME. Its stderr goes to a file."""

    def __init__(self, script, name, args, directory, rank=0, world=1, port=0, **variables):
        """port: of the ranks' rendezvous. variables: of the environment. Returns at once: answer() waits until the trainer is ready."""
        flags = [f'--{flag.replace("_", "-")}={value}' for flag, value in vars(args).items()
                 if value is not None and flag not in ('json', 'rounds', 'directory', 'worker', 'parameters')]
        # DeepSpeed wants its rendezvous by environment. ninja is beside this interpreter in a venv.
        environment = {**os.environ, 'OMP_NUM_THREADS': str(args.threads), 'DS_ACCELERATOR': 'cpu', 'RANK': str(rank),
                       'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(world), 'LOCAL_WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1',
                       'MASTER_PORT': str(port),
                       'PATH': os.path.dirname(sys.executable) + os.pathsep + os.environ['PATH'], **variables}
        self.name = name
        self.log = os.path.join(directory, f'{name}.{rank}.log')
        with open(self.log, 'w', encoding='utf-8') as log:
            self.process = subprocess.Popen(
                [sys.executable, os.path.abspath(script), '--worker', name, '--directory', directory, *flags],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            tail = ''.join(open(self.log, encoding='utf-8', errors='replace').readlines()[-15:])
            raise ChildProcessError(f'{self.name} ended with {self.process.returncode}:\n{tail}')
        return json.loads(line)

    def say(self, request):
        self.process.stdin.write(request + '\n')
        self.process.stdin.flush()

    def ask(self, request):
        self.say(request)
        return self.answer()

    def stop(self):
        self.process.stdin.close()
        self.process.wait()

    def kill(self):
        self.process.kill()
        self.process.wait()


def started(script, name, args, directory):
    worker = Worker(script, name, args, directory)
    worker.answer()
    return worker


class Ranks:
    """`world` workers of one name that train together: each request goes to all of them, and all answer."""

    def __init__(self, script, name, args, directory, world, **variables):
        port = free_port()
        self.workers = [Worker(script, name, args, directory, rank, world, port, **variables) for rank in range(world)]
        self._answers()

    def _answers(self):
        try:
            return [worker.answer() for worker in self.workers]
        except ChildProcessError:
            for worker in self.workers:
                worker.kill()  # else they wait for the one that has ended
            raise

    def ask(self, request):
        """By rank."""
        for worker in self.workers:
            worker.say(request)
        return self._answers()

    def stop(self):
        for worker in self.workers:
            worker.process.stdin.close()
        for worker in self.workers:
            worker.process.wait()


def take_turns(script, names, args, directory):
    """Starts these trainers and steps them in turns, then checks that they did the same. By name: the answers of the measured
    steps; the peak of what was resident meanwhile, in bytes."""
    import torch
    workers = {name: started(script, name, args, directory) for name in names}
    files = {name: os.path.join(directory, name + '.pt') for name in (*names, 'start')}
    workers[names[0]].ask(f'save {files["start"]}')
    taken = {name: [] for name in names}
    warm_up = 2  # memory is touched, operators are built, extents written for the first time
    for number in range(-warm_up, args.rounds):
        if number == 0:
            for worker in workers.values():
                worker.ask('reset_peak')
        for name in (list(names) if number % 2 == 0 else reversed(names)):
            answer = workers[name].ask('step')
            if number >= 0:
                taken[name].append(answer)
        print(f'\r{", ".join(names)}: round {number + 1} of {args.rounds}', end='', file=sys.stderr)
    print(file=sys.stderr)
    resident = {name: worker.ask('resident') for name, worker in workers.items()}
    for name, worker in workers.items():
        worker.ask(f'save {files[name]}')
        worker.stop()
    check_same_work(torch.load(files['start']), {name: torch.load(files[name]) for name in names})
    return taken, resident


def check_same_work(start, results):
    """Ends the run unless all moved the first layer's weights alike. `results`: by name."""
    names = list(results)
    moved = (results[names[0]].float() - start.float()).abs().mean().item()
    for name in names[1:]:
        apart = (results[names[0]].float() - results[name].float()).abs().mean().item()
        print(f'first layer: moved by {moved:.3g} on average; {names[0]} and {name} {apart:.3g} apart')
        if not apart < 0.1 * moved:
            sys.exit(f'{names[0]} and {name} trained different parameters: the comparison is void')
