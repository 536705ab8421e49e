"""Runs an example as it is, and writes down each loss that goes into backward: run_example.py EXAMPLE LOSSES ours|theirs KILL_AT
[ARGUMENT...]. theirs: torch's AdamW, and FSDP2 alone in place of shard(). KILL_AT: the process ends itself, by SIGKILL, after so many
steps; 0: it does not."""
import contextlib
import os
import runpy
import signal
import sys

import torch

import ballast.torch
from ballast.torch.sharding import blocks


class Theirs(torch.optim.AdamW):
    """Takes Ballast's arguments, and gives torch's results."""
    grad_norm = float('nan')  # examples print Ballast's

    def __init__(self, params, lr, max_norm=0.0, **_):
        super().__init__(params, lr=lr)
        self.max_norm = max_norm

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_norm:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group['params']], self.max_norm)
        super().step()
        return loss

    def resume(self):
        return 0, b''

    def close(self):
        pass


def fsdp2(model, mesh=None, weights=None, **_):
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    if weights is not None:
        model = type(model).from_pretrained(weights)
    for module in (*blocks.chosen(model), model):
        fully_shard(module, **({} if mesh is None else {'mesh': mesh}))
    return model


def main():
    example, losses, which, kill_at = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    del sys.argv[:4]
    sys.argv[0] = example
    sys.path[0] = os.path.dirname(example)
    torch.set_num_threads(1)
    if which == 'theirs':
        ballast.torch.AdamW, ballast.torch.shard = Theirs, fsdp2
        ballast.torch.save_weights, ballast.torch.gathered = (lambda _, folder: os.makedirs(folder, exist_ok=True)), contextlib.nullcontext
    optimizer, backward, made = ballast.torch.AdamW, torch.Tensor.backward, [0]
    step = optimizer.step

    def noted(self, *args, **more):
        with open(losses, 'a', encoding='utf-8') as file:
            file.write(f'{self.item()!r}\n')
        return backward(self, *args, **more)

    def counted(self, *args, **more):
        result = step(self, *args, **more)
        made[0] += 1
        if made[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    torch.Tensor.backward, optimizer.step = noted, counted
    runpy.run_path(example, run_name='__main__')


if __name__ == '__main__':
    main()
