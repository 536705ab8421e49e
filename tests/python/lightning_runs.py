"""Small models that Lightning's Trainer fits in its various ways, with the optimizers that it is given: what a run comes to."""
import lightning
import torch
from lightning.pytorch import callbacks
from scripts import batches, loss_of, mlp

import ballast.torch as bt

ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}
EPOCHS = 3


def theirs(_, parameters):
    return torch.optim.AdamW([parameter for _, parameter in parameters], **ARGUMENTS)


def ours(**more):
    """more: of Ballast. A model with two optimizers has two jobs."""
    def make(name, parameters):
        return bt.AdamW(parameters, **ARGUMENTS, **{'dram': '64MiB', 'threads': 1, **more, 'name': f"{more.get('name', 'job')}-{name}"})
    return make


class Plain(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        self.net, self.make, self.losses = mlp(), make, []

    def training_step(self, batch, _):
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.losses.append(loss_of(self.net, batch).item())

    def configure_optimizers(self):
        optimizer = self.make('net', self.named_parameters())
        return {'optimizer': optimizer, 'lr_scheduler': torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class Gan(lightning.LightningModule):
    """Two optimizers, each of which trains while the other's parameters want no gradient."""

    def __init__(self, make):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = torch.nn.Linear(16, 16), mlp()
        self.make, self.losses = make, []

    def training_step(self, batch, _):
        for optimizer, sign in zip(self.optimizers(), (-1.0, 1.0)):
            self.toggle_optimizer(optimizer)
            loss = sign * loss_of(self.judge, (self.maker(batch[0]), batch[1]))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def validation_step(self, batch, _):
        self.losses.append(loss_of(self.judge, (self.maker(batch[0]), batch[1])).item())

    def configure_optimizers(self):
        return [self.make('maker', self.maker.named_parameters('maker')), self.make('judge', self.judge.named_parameters('judge'))]


# By name: the model, and functions of nothing that give arguments of the Trainer.
CASES = {
    'plain': (Plain, dict),
    'accumulated and clipped by norm': (Plain, lambda: {'accumulate_grad_batches': 2, 'gradient_clip_val': 0.1}),
    'bf16-mixed and clipped by value': (Plain, lambda: {'precision': 'bf16-mixed', 'gradient_clip_val': 0.01,
                                                        'gradient_clip_algorithm': 'value'}),
    'moving average': (Plain, lambda: {'callbacks': [callbacks.EMAWeightAveraging(decay=0.5)]}),
    'stochastic weight average': (Plain, lambda: {'callbacks': [callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)]}),
    'gan': (Gan, dict),
}


def fit(case, make, folder=None, start=None, epochs=EPOCHS, devices=1):
    """(losses, parameters) of a run. folder: for a checkpoint at the end of each epoch, epoch=0.ckpt the first. start: a checkpoint to
    go on from. The optimizers are closed."""
    model_of, arguments = CASES[case]
    torch.manual_seed(3)
    model, arguments = model_of(make), arguments()
    data = [pair for batch in batches(4) for pair in zip(*batch)]
    loader = torch.utils.data.DataLoader(data, batch_size=32 // devices)
    if folder is not None:
        saves = callbacks.ModelCheckpoint(folder, '{epoch}', save_top_k=-1, every_n_epochs=1)
        arguments['callbacks'] = [*arguments.get('callbacks', []), saves]
    trainer = lightning.Trainer(max_epochs=epochs, accelerator='cpu', devices=devices, logger=False, enable_progress_bar=False,
                                enable_model_summary=False, enable_checkpointing=folder is not None, num_sanity_val_steps=0,
                                strategy='ddp_find_unused_parameters_true' if devices > 1 else 'auto', **arguments)
    trainer.fit(model, loader, loader, ckpt_path=start)
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, bt.AdamW):
            optimizer.close()
    return model.losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_same(came, expected, **tolerance):
    """Losses and parameters of two runs. came: may have the last losses alone."""
    torch.testing.assert_close(torch.tensor(came[0]), torch.tensor(expected[0][-len(came[0]):]), **tolerance)
    for name, value in expected[1].items():
        torch.testing.assert_close(came[1][name], value, msg=lambda m, name=name: f'{name}: {m}', **tolerance)
