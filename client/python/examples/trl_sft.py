"""TRL's SFTTrainer, its checkpoints and its resume, with the optimizer's state on Ballast.

Usage: trl_sft.py [STEPS] [resume]. torchrun --nproc-per-node 2 trl_sft.py trains with two ranks."""
import sys

from datasets import Dataset
from language_model import make_dataset, make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer

import ballast.torch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
model = make_model()
optimizer = ballast.torch.AdamW, {'params': list(model.named_parameters()), 'lr': 3e-3, 'directory': 'trl_sft_state', 'dram': '256MiB',
                                  'nvme': '1GiB'}
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir='trl_sft_checkpoints', max_steps=steps, per_device_train_batch_size=8, logging_steps=10, save_steps=5,
                   save_total_limit=2, warmup_steps=10, max_length=32, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True),
    train_dataset=Dataset.from_list([{'input_ids': row['input_ids'].tolist()} for row in make_dataset()]),
    processing_class=make_tokenizer(),
    optimizer_cls_and_kwargs=optimizer)
trainer.train(resume_from_checkpoint='resume' in sys.argv[2:])
