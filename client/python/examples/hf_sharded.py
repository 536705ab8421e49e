"""Hugging Face's Trainer over a model whose parameters live on the state servers, with its checkpoints and its resume.

Usage: torchrun --nproc-per-node 2 hf_sharded.py [STEPS] [resume]."""
import sys

import torch.distributed as dist
from language_model import make_dataset, make_model
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

import ballast.torch


class Arguments(TrainingArguments):
    place_model_on_device = False  # shard() has placed it


class ShardedTrainer(Trainer):
    def save_model(self, *args, **more):
        if self.args.should_save:
            with ballast.torch.gathered(self.model):  # whole parameters, for save_pretrained()
                super().save_model(*args, **more)

    def _load_from_checkpoint(self, *args, **more):
        """Parameters come with the optimizer's state: it names a version of the job, which has both."""


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
dist.init_process_group('gloo')
arguments = Arguments(output_dir='hf_sharded_checkpoints', max_steps=steps, per_device_train_batch_size=8, logging_steps=10,
                      save_steps=20, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True)
model = ballast.torch.shard(make_model(), push_early=False)  # gradients stay for the step: Trainer reads and clips them
model._is_accelerate_prepared = True  # which keeps Accelerate from wrapping it
optimizer = ballast.torch.AdamW(model.named_parameters(), lr=3e-3, directory='hf_sharded_state', dram='256MiB', nvme='1GiB')
trainer = ShardedTrainer(model=model, args=arguments, train_dataset=make_dataset(),
                         optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 10, steps)))
trainer.train(resume_from_checkpoint='resume' in sys.argv[2:])
dist.barrier()
optimizer.close()
dist.destroy_process_group()
