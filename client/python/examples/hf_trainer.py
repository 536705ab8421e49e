"""Hugging Face's Trainer, its checkpoints and its resume, with the optimizer's state on Ballast.

Usage: hf_trainer.py [STEPS] [resume]. torchrun --nproc-per-node 2 hf_trainer.py trains with two ranks."""
import sys

from language_model import make_dataset, make_model
from transformers import Trainer, TrainingArguments

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
model = make_model()
# `params` with names: without it Trainer gives its own groups, whose parameters have none, and the job knows them by place and shape.
# A job that is there already is an error, unless Trainer loads a checkpoint's optimizer state: that names the job to go on with.
optimizer = ballast.torch.AdamW, {'params': list(model.named_parameters()), 'lr': 3e-3, 'directory': 'hf_trainer_state', 'dram': '256MiB',
                                  'nvme': '1GiB'}
trainer = Trainer(
    model=model,
    args=TrainingArguments(output_dir='hf_trainer_checkpoints', max_steps=steps, per_device_train_batch_size=8, logging_steps=10,
                           save_steps=5, save_total_limit=2, lr_scheduler_type='linear', warmup_steps=10, report_to=[], use_cpu=True,
                           disable_tqdm=True),
    train_dataset=make_dataset(),
    optimizer_cls_and_kwargs=optimizer)
trainer.train(resume_from_checkpoint='resume' in sys.argv[2:])
