"""A loop in torchtitan's manner, from pretrained weights: the model is made on the meta device, and its weights stream from safetensors to
the state servers. No rank ever holds the model, and the same command goes on where it was.

Usage: torchrun --nproc-per-node 2 pretrained_shard.py [STEPS]. The weights come from ./pretrained, and go to ./trained."""
import os
import sys

import torch
import torch.distributed as dist
from language_model import make_dataset, make_model
from transformers import AutoConfig, AutoModelForCausalLM

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
if dist.get_rank() == 0 and not os.path.isdir('pretrained'):
    make_model().save_pretrained('pretrained')  # stands for a checkpoint that you have
dist.barrier()
with torch.device('meta'):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('pretrained'))
model = ballast.torch.shard(model, weights='pretrained')
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, max_norm=1.0, directory='pretrained_shard_state', dram='256MiB',
                                nvme='1GiB', resume='auto')
start, _ = optimizer.resume()
rows = make_dataset()[dist.get_rank()::dist.get_world_size()]
for step in range(start, steps):
    batch = [rows[(8 * step + i) % len(rows)] for i in range(8)]
    loss = model(**{key: torch.stack([row[key] for row in batch]) for key in batch[0]}).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9 and dist.get_rank() == 0:
        print(f'step {step + 1}: loss {loss.item():.4f}', flush=True)
if dist.get_rank() == 0:
    ballast.torch.save_weights(model, 'trained')  # one rank writes, tensor by tensor; from_pretrained('trained') reads it
dist.barrier()  # the first rank's close() ends the server that the others read from
optimizer.close()
dist.destroy_process_group()
