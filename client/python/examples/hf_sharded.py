"""Hugging Face's Trainer over a model whose parameters live on the state servers, with its checkpoints and its resume.

Usage: torchrun --nproc-per-node 2 hf_sharded.py [STEPS] [resume]."""
import sys

import torch.distributed as dist
from language_model import make_dataset, make_model
from sharded_trainer import Sharded
from transformers import Trainer, TrainingArguments

import ballast.torch


class ShardedTrainer(Sharded, Trainer):
    """With two methods of Sharded, for Accelerate and for checkpoints."""


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
model = ballast.torch.shard(make_model(), push_early=False)  # gradients stay for the step: Trainer reads and clips them
arguments = TrainingArguments(output_dir='hf_sharded_checkpoints', max_steps=steps, per_device_train_batch_size=8, logging_steps=10,
                              save_steps=5, save_total_limit=2, lr_scheduler_type='linear', warmup_steps=10, report_to=[], use_cpu=True,
                              disable_tqdm=True)
optimizer = ballast.torch.AdamW, {'params': list(model.named_parameters()), 'lr': 3e-3, 'directory': 'hf_sharded_state', 'dram': '256MiB',
                                  'nvme': '1GiB'}
trainer = ShardedTrainer(model=model, args=arguments, train_dataset=make_dataset(), optimizer_cls_and_kwargs=optimizer)
trainer.train(resume_from_checkpoint='resume' in sys.argv[2:])
dist.barrier()
trainer.optimizer.optimizer.close()  # Accelerate's wrapper has Ballast's optimizer
dist.destroy_process_group()
