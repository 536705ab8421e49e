"""PyTorch FSDP2: fp32 masters sharded on the CPU, bf16 compute, checkpoints by Distributed Checkpoint beside the training."""

import concurrent.futures
import os
import shutil

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from fire.model import make_model
from fire.trainer import HYPER, LR, MAX_NORM


class System:
    saves_together = True

    def __init__(self, args, events) -> None:
        self._events = events
        self._folder = os.path.join(args.directory, 'checkpoints')
        self._saving: concurrent.futures.Future | None = None
        self._kept: list[str] = []

    def start(self) -> tuple[int, bytes]:
        # Parameters stay gathered between forward and backward: they fit, and a gather less is faster.
        mesh = torch.distributed.init_device_mesh('cpu', (torch.distributed.get_world_size(),))
        shard = {'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16), 'reshard_after_forward': False,
                 'offload_policy': CPUOffloadPolicy(pin_memory=False), 'mesh': mesh}
        self._model = make_model(torch.float32)
        for block in self._model.blocks:
            fully_shard(block, **shard)
        fully_shard(self._model, **shard)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True, **HYPER)
        self._beside = torch.distributed.new_group(backend='gloo')  # saving must not meet the training's collectives
        self._events.tell('modelled')
        whole = self._whole()
        if not whole:
            return 0, b''
        self._kept = whole[-2:]
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {'model': model, 'optimizer': optimizer, 'cursor': torch.zeros(5056, dtype=torch.uint8), 'step': 0}
        dcp.load(state, checkpoint_id=whole[-1])
        set_state_dict(self._model, self._optimizer, model_state_dict=state['model'], optim_state_dict=state['optimizer'])
        return state['step'], state['cursor'].numpy().tobytes()

    def _whole(self) -> list[str]:
        """Checkpoints by age: one is whole once it has its .metadata."""
        entries = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return [os.path.join(self._folder, entry) for entry in sorted(entries, key=int)
                if os.path.exists(os.path.join(self._folder, entry, '.metadata'))]

    def backward(self, tokens, targets, weight: float) -> float:
        loss = self._model(tokens, targets)
        (loss * weight).backward()
        return loss.item()

    def step(self, lr: float, cursor: bytes) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        for group in self._optimizer.param_groups:
            group['lr'] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def checkpoint(self, step: int, cursor: bytes) -> None:
        self.wait()
        path = os.path.join(self._folder, str(step))
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # what a killed save left
            for old in self._kept[:-1]:  # the newest two are there while a third is written
                shutil.rmtree(old, ignore_errors=True)
        self._kept = [*self._kept[-1:], path]
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {'model': model, 'optimizer': optimizer, 'cursor': torch.frombuffer(bytearray(cursor), dtype=torch.uint8), 'step': step}
        # Without a sync: the storage is no trainer's machine's, and every save is the cheaper for it.
        writer = dcp.FileSystemWriter(path, sync_files=False)
        self._saving = dcp.async_save(state, storage_writer=writer, process_group=self._beside)
        self._saving.add_done_callback(lambda _: self._events.tell('saved', step=step))

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def save(self, path: str, rank: int) -> None:
        # As the forward uses them, and as the others save them.
        whole = {name: parameter.full_tensor().detach().to(torch.bfloat16) for name, parameter in self._model.named_parameters()}
        if rank == 0:
            torch.save(whole, path + '.part')
            os.rename(path + '.part', path)

    def close(self) -> None:
        self.wait()
