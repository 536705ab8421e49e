"""Ballast: whole parameters on each rank, optimizer state on two state servers, every decided step durable before step() returns. With
two copies each server has the whole state, so that one may be lost with its disk.

Gradients are all-reduced by hand: with two ranks the sum is the same bits as DistributedDataParallel's, whose constructor imports
torch's compilers for a second."""

import os

import torch

import ballast.torch
from fire.model import make_model
from fire.trainer import HYPER, LR, MAX_NORM

FAILOVER_AFTER_S = 1.0  # a server that is silent for so long is left out


class System:
    saves_together = False
    durability = 'step'
    pin_interval = 0

    def __init__(self, args, events) -> None:
        self._args, self._events = args, events

    def start(self) -> tuple[int, bytes]:
        self._model = make_model(torch.bfloat16)
        copies = {'replicas': self._args.copies, 'failover_after': FAILOVER_AFTER_S} if self._args.copies > 1 else {}
        self.optimizer = ballast.torch.AdamW(self._model.named_parameters(), lr=LR, **HYPER, servers=self._args.servers, resume='auto',
                                             durability=self.durability, pin_interval=self.pin_interval, max_norm=MAX_NORM, **copies)
        self._events.tell('modelled')
        return self.optimizer.resume()

    def backward(self, tokens, targets, weight: float) -> float:
        loss = self._model(tokens, targets)
        (loss * (weight / torch.distributed.get_world_size())).backward()
        return loss.item()

    def step(self, lr: float, cursor: bytes) -> None:
        for group in self.optimizer.param_groups:
            group['lr'] = lr
        for sum_of_ranks in [torch.distributed.all_reduce(p.grad, async_op=True) for p in self._model.parameters()]:
            sum_of_ranks.wait()
        self.optimizer.step(blob=cursor)
        self.optimizer.zero_grad()

    def checkpoint(self, step: int, cursor: bytes) -> None:
        """The servers keep every decided step by themselves, or every `pin_interval`."""

    def save(self, path: str, rank: int) -> None:
        torch.save({name: parameter.detach() for name, parameter in self._model.named_parameters()}, path + '.part')
        os.rename(path + '.part', path)

    def close(self) -> None:
        self.optimizer.close()
