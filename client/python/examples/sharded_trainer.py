"""What a Trainer of transformers or TRL needs for a model of shard(), by public names alone. The other examples import it."""
import torch

import ballast.torch


class Sharded:
    """Comes before the Trainer among the base classes."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model  # shard() has prepared it

    def save_model(self, output_dir=None, **_):
        if self.args.should_save:
            ballast.torch.save_weights(self.model, output_dir or self.args.output_dir)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # a rank that went on would wait for the one that saves no longer than step_timeout
