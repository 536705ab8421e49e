"""Lightning's Trainer over a model whose parameters live on the state servers, with its checkpoints and its resume.

Usage: torchrun --nproc-per-node 2 lightning_sharded.py [EPOCHS] [resume]."""
import sys

import lightning
import torch
from language_model import make_dataset, make_model
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

import ballast.torch


class LanguageModel(lightning.LightningModule):
    def configure_model(self):
        self.model = ballast.torch.shard(make_model(), self.device_mesh['data_parallel'])

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, *_):
        if self.global_step % 10 == 0:
            self.print(f'step {self.global_step}: loss {outputs["loss"].item():.4f}', flush=True)

    def configure_optimizers(self):
        return ballast.torch.AdamW(self.named_parameters(), lr=3e-3, max_norm=1.0, directory='lightning_sharded_state',
                                   dram='256MiB', nvme='1GiB', resume='must' if RESUMES else 'never')


epochs, RESUMES = int(sys.argv[1]) if len(sys.argv) > 1 else 3, 'resume' in sys.argv[2:]
trainer = lightning.Trainer(max_epochs=epochs, accelerator='cpu', devices=2, logger=False, enable_progress_bar=False,
                            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), enable_model_summary=False,
                            callbacks=[ModelCheckpoint('lightning_sharded_checkpoints', save_last=True, enable_version_counter=False)])
loader = torch.utils.data.DataLoader(make_dataset(160), batch_size=8)
trainer.fit(LanguageModel(), loader, ckpt_path='lightning_sharded_checkpoints/last.ckpt' if RESUMES else None)
