"""What a Trainer of transformers or TRL needs for a model of shard(), by public names alone. The other examples import it."""
import ballast.torch


class Sharded:
    """Comes before the Trainer among the base classes."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model  # shard() has prepared it

    def save_model(self, output_dir=None, **_):
        if self.args.should_save:
            ballast.torch.save_weights(self.model, output_dir or self.args.output_dir)
