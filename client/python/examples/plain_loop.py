"""A plain loop that goes on where it was, whenever it is run again.

Usage: plain_loop.py [STEPS]. Kill it at any moment: the same command goes on with the next step, with the same bits. Its state is in
./plain_loop_state."""
import sys

import torch
from language_model import make_dataset, make_model

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
model, dataset = make_model(), make_dataset()
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, directory='plain_loop_state', dram='256MiB', nvme='1GiB',
                                resume='auto')
start, _ = optimizer.resume()
for group in optimizer.param_groups:
    group['initial_lr'] = group['lr']  # of a schedule that begins later, torch wants it
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10), last_epoch=start - 1)

for step in range(start, steps):
    rows = [dataset[(8 * step + i) % len(dataset)] for i in range(8)]
    loss = model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 10 == 9:
        print(f'step {step + 1}: loss {loss.item():.4f}, gradient norm {optimizer.grad_norm:.3f}', flush=True)
print(f'{steps} steps done')
