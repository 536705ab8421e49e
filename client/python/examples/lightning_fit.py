"""Lightning's Trainer: its checkpoints and its resume, with the optimizer's state on Ballast.

Usage: lightning_fit.py [EPOCHS] [resume]. The checkpoints are in ./lightning_checkpoints."""
import sys

import lightning
import torch
from language_model import make_dataset, make_model
from lightning.pytorch.callbacks import ModelCheckpoint

import ballast.torch


class LanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs, *_):
        if self.global_step % 10 == 0:
            print(f'step {self.global_step}: loss {outputs["loss"].item():.4f}', flush=True)

    def configure_optimizers(self):
        # A job that is there already is an error, unless Trainer loads a checkpoint: that names the job and its version.
        return ballast.torch.AdamW(self.named_parameters(), lr=3e-3, directory='lightning_state', dram='256MiB', nvme='1GiB')


epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
trainer = lightning.Trainer(max_epochs=epochs, accelerator='cpu', devices=1, logger=False, enable_progress_bar=False,
                            enable_model_summary=False, gradient_clip_val=1.0,
                            callbacks=[ModelCheckpoint('lightning_checkpoints', save_last=True, enable_version_counter=False)])
loader = torch.utils.data.DataLoader(make_dataset(160), batch_size=8)
trainer.fit(LanguageModel(), loader, ckpt_path='lightning_checkpoints/last.ckpt' if 'resume' in sys.argv[2:] else None)
