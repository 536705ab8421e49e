"""DeepSpeed ZeRO-2 with the optimizer on the CPU; checkpoints are written while training waits, as it does by default."""

import os
import shutil

import deepspeed
import torch

from fire.model import make_model
from fire.trainer import HYPER, LR, MAX_NORM, MICRO, ROWS


class System:
    saves_together = False

    def __init__(self, args, events) -> None:
        self._events = events
        self._folder = os.path.join(args.directory, 'checkpoints')
        self._kept: list[str] = []

    def start(self) -> tuple[int, bytes]:
        deepspeed.init_distributed('gloo')
        model = make_model(torch.bfloat16)
        config = {'train_micro_batch_size_per_gpu': ROWS, 'gradient_accumulation_steps': MICRO // torch.distributed.get_world_size(),
                  'bf16': {'enabled': True}, 'gradient_clipping': MAX_NORM,
                  'optimizer': {'type': 'AdamW', 'params': {'lr': LR, **HYPER}},
                  'zero_optimization': {'stage': 2, 'offload_optimizer': {'device': 'cpu'}},
                  'checkpoint': {'load_universal': self._converted()}}
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._events.tell('modelled')
        if not os.path.exists(os.path.join(self._folder, 'latest')):
            return 0, b''
        self._kept = [os.path.join(self._folder, entry) for entry in sorted(filter(str.isdigit, os.listdir(self._folder)), key=int)]
        _, state = self._engine.load_checkpoint(self._folder)
        if state is None:
            raise RuntimeError('load_checkpoint found nothing that it could load')
        return state['step'], state['cursor']

    def _converted(self) -> bool:
        """Is the newest checkpoint one that was converted for another number of ranks?"""
        tags = []
        for name in ('latest_universal', 'latest'):
            path = os.path.join(self._folder, name)
            tags.append(int(open(path, encoding='ascii').read().strip().removesuffix('_universal')) if os.path.exists(path) else -1)
        return tags[0] >= max(tags[1], 0)

    def backward(self, tokens, targets, weight: float) -> float:
        loss = self._engine(tokens, targets)
        self._engine.backward(loss)  # which divides by the number of micro-batches
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()
        return loss.item()

    def step(self, lr: float, cursor: bytes) -> None:
        for group in self._engine.optimizer.param_groups:
            group['lr'] = lr
        self._engine.step()

    def checkpoint(self, step: int, cursor: bytes) -> None:
        path = os.path.join(self._folder, str(step))
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # what a killed save left, perhaps of more ranks; all ranks meet before they write
        self._kept = [kept for kept in self._kept if kept != path]
        self._engine.save_checkpoint(self._folder, tag=str(step), client_state={'step': step, 'cursor': cursor})
        self._events.tell('saved', step=step)
        self._kept.append(path)
        if torch.distributed.get_rank() == 0:
            for old in self._kept[:-2]:
                shutil.rmtree(old, ignore_errors=True)
        self._kept = self._kept[-2:]

    def wait(self) -> None:
        pass

    def save(self, path: str, rank: int) -> None:
        torch.save({name: parameter.detach() for name, parameter in self._engine.module.named_parameters()}, path + '.part')
        os.rename(path + '.part', path)

    def close(self) -> None:
        self._engine.destroy()
