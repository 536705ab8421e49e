"""The same with Accelerate: gradient accumulation, clipping, and its checkpoints.

Usage: accelerate_loop.py [EPOCHS] [resume]. accelerate launch works as with any other optimizer."""
import sys

import torch
from accelerate import Accelerator
from language_model import make_dataset, make_model

import ballast.torch

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = make_model()
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, directory='accelerate_state', dram='256MiB', nvme='1GiB')
loader = torch.utils.data.DataLoader(make_dataset(160), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = 0
if 'resume' in sys.argv[2:]:
    accelerator.load_state('accelerate_checkpoint')
    start = optimizer.optimizer.resume().step // (len(loader) // 2)

for epoch in range(start, epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state('accelerate_checkpoint')
    accelerator.print(f'epoch {epoch + 1}: loss {loss.item():.4f}')
