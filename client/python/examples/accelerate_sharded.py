"""Accelerate over a model whose parameters live on the state servers: gradient accumulation, clipping, and its checkpoints.

Usage: torchrun --nproc-per-node 2 accelerate_sharded.py [EPOCHS] [resume]. accelerate launch works as well."""
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from language_model import make_dataset, make_model

import ballast.torch

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
# Accelerate holds back gradients of a model that it has prepared. Here each backward reduces and sends, and two make a step.
model = ballast.torch.shard(make_model(), backwards=2)
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='accelerate_sharded_state', dram='256MiB',
                                nvme='1GiB')
loader = torch.utils.data.DataLoader(make_dataset(320), batch_size=8)
optimizer, loader = accelerator.prepare(optimizer, loader)  # not the model, which shard() has prepared
start = 0
if 'resume' in sys.argv[2:]:
    accelerator.load_state('accelerate_sharded_checkpoint')  # its named state takes the job back to a version, parameters included
    start = optimizer.optimizer.resume().step // (len(loader) // 2)

for epoch in range(start, epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state('accelerate_sharded_checkpoint')
    accelerator.print(f'epoch {epoch + 1}: loss {loss.item():.4f}')
accelerator.wait_for_everyone()
optimizer.optimizer.close()
dist.destroy_process_group()
