"""The first steps of a fine-tune by Hugging Face's Trainer, with the seconds until the first is made.

Usage: first_step.py ballast|torch     whose AdamW"""
import sys
import time

# Where torch is installed, so are these: their imports are no part of ours.
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

began = time.monotonic()
if sys.argv[1] == 'ballast':
    import ballast.torch
imported = time.monotonic() - began


class Clock(TrainerCallback):
    first = None

    def on_step_end(self, *_, **__):
        self.first = self.first or time.monotonic() - began


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0))
tokens = torch.arange(64) % 512
began = time.monotonic()
if sys.argv[1] == 'ballast':
    optimizer = ballast.torch.AdamW(model.named_parameters(), lr=1e-3, directory='state', dram='1GiB', nvme='2GiB')
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
clock = Clock()
trainer = Trainer(
    model=model, callbacks=[clock], optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    args=TrainingArguments(output_dir='out', max_steps=2, per_device_train_batch_size=4, save_strategy='no', logging_steps=1, report_to=[],
                           use_cpu=True, disable_tqdm=True),
    train_dataset=[{'input_ids': tokens, 'labels': tokens}] * 8)
trainer.train()
losses = [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
print(f'{sys.argv[1]}: import {imported:.2f} s, optimizer and first step {clock.first:.2f} s, losses {losses[0]} {losses[1]}')
