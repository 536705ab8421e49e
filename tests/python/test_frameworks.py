"""PyTorch Ignite, skorch and MMEngine, each by its own loop: losses and parameters of torch.optim's optimizer, and runs that go on from
the checkpoints that it writes. Those that are not installed (frameworks.txt) are skipped."""
import pathlib

import pytest
import torch
from scripts import batches, loss_of, mlp

import ballast.torch as bt

ARGUMENTS = {'lr': 1e-2, 'weight_decay': 0.1}
CLOSE = {'rtol': 1e-3, 'atol': 1e-4}
EXACT = {'rtol': 0.0, 'atol': 0.0}
EPOCHS = 3
KINDS = {'moments': {}, 'named': {'nvme': '1GiB'}, 'moments of a durable job': {'nvme': '1GiB', 'states': 'full'}}


def ignite(make, folder, start):
    from ignite.engine import Engine, Events  # noqa: PLC0415
    from ignite.handlers import Checkpoint, DiskSaver, EMAHandler, LRScheduler  # noqa: PLC0415
    model, losses = mlp(), []
    optimizer = make(model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)

    def step(_, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    trainer, average = Engine(step), EMAHandler(model, momentum=0.1)
    average.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(schedule))
    objects = {'model': model, 'optimizer': optimizer, 'schedule': schedule, 'trainer': trainer, 'average': average.ema_model}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(objects, DiskSaver(folder, require_empty=False), n_saved=None,
                                                                 global_step_transform=lambda engine, _: engine.state.epoch))
    if start:
        Checkpoint.load_objects(objects, checkpoint=folder / f'checkpoint_{start}.pt')
    trainer.run(list(batches(4)), max_epochs=EPOCHS)
    return optimizer, losses, [*model.parameters(), *average.ema_model.parameters()]


class Mlp(torch.nn.Module):
    """skorch makes the model itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


def skorch(make, folder, start):
    from skorch import NeuralNet  # noqa: PLC0415
    from skorch.callbacks import Checkpoint  # noqa: PLC0415
    folder.mkdir(exist_ok=True)
    files = {key: str(folder / f'{key}{{}}.pt') for key in ('f_params', 'f_optimizer')}
    saves = [] if start else [Checkpoint(monitor=lambda net: True, f_criterion=None, f_history=None,
                                         **{key: name.format('{last_epoch[epoch]}') for key, name in files.items()})]
    net = NeuralNet(Mlp, torch.nn.CrossEntropyLoss, max_epochs=EPOCHS - start, batch_size=32, train_split=None, callbacks=saves, verbose=0,
                    optimizer=lambda groups, lr: make([(str(i), p) for i, p in enumerate(groups[0]['params'])]))
    net.initialize()
    if start:
        net.load_params(**{key: name.format(start) for key, name in files.items()})
    x, y = (torch.cat(part) for part in zip(*batches(4)))
    net.partial_fit(x, y)
    return net.optimizer_, net.history[:, 'train_loss'], list(net.module_.parameters())


def mmengine(make, folder, start):
    from mmengine.hooks import EMAHook, Hook  # noqa: PLC0415
    from mmengine.logging import MMLogger  # noqa: PLC0415
    from mmengine.model import BaseModel  # noqa: PLC0415
    from mmengine.optim import OptimWrapper  # noqa: PLC0415
    from mmengine.runner import Runner  # noqa: PLC0415

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y, mode):
            return {'loss': loss_of(self.net, (x, y))}

    class Losses(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            losses.append(outputs['loss'].item())

    model, losses = Model(), []
    data = [pair for batch in batches(4) for pair in zip(*batch)]
    runner = Runner(model, str(folder), experiment_name=f'{folder.name}{start}{len(MMLogger._instance_dict)}', log_level='ERROR',
                    train_dataloader=torch.utils.data.DataLoader(data, batch_size=32),
                    train_cfg={'by_epoch': True, 'max_epochs': EPOCHS}, resume=bool(start),
                    optim_wrapper=OptimWrapper(make(model.named_parameters()), accumulative_counts=2, clip_grad={'max_norm': 0.5}),
                    param_scheduler={'type': 'StepLR', 'step_size': 1, 'gamma': 0.5},
                    custom_hooks=[Losses(), EMAHook(momentum=0.1)], load_from=str(folder / f'epoch_{start}.pth') if start else None)
    runner.train()
    return runner.optim_wrapper.optimizer, losses, list(model.parameters())


RUNS = {'ignite': ignite, 'skorch': skorch, 'mmengine': mmengine}


def run(framework, make, folder, start=0):
    """(losses, parameters). start: the epoch after whose checkpoint the run goes on; 0: it begins."""
    pytest.importorskip(framework)
    torch.manual_seed(3)
    optimizer, losses, parameters = RUNS[framework](make, folder, start)
    kept = [parameter.detach().clone() for parameter in parameters]
    if isinstance(optimizer, bt.AdamW):
        optimizer.close()
    return losses, kept


def assert_same(came, expected, **tolerance):
    torch.testing.assert_close(torch.tensor(came[0]), torch.tensor(expected[0][-len(came[0]):]), **tolerance)
    torch.testing.assert_close(came[1], expected[1], **tolerance)


@pytest.fixture(autouse=True)
def pickles(monkeypatch):
    """MMEngine reads its own checkpoints by torch.load as it was before 2.6."""
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('framework', RUNS)
def test_like_torch_and_on_from_a_checkpoint(framework, kind, job, tmp_path):
    more = {**job, **KINDS[kind], **({'directory': pathlib.Path(tmp_path, 'state')} if 'nvme' in KINDS[kind] else {})}
    expected = run(framework, lambda named: torch.optim.AdamW([p for _, p in named], **ARGUMENTS), tmp_path / 'theirs')
    whole = run(framework, lambda named: bt.AdamW(named, **ARGUMENTS, **more), tmp_path / 'ours')
    assert_same(whole, expected, **CLOSE)
    if kind == 'moments of a durable job':
        more['resume'] = 'auto'
    assert_same(run(framework, lambda named: bt.AdamW(named, **ARGUMENTS, **more), tmp_path / 'ours', start=1), whole, **EXACT)


def test_skorch_makes_its_optimizer_anew(job):
    """fit() begins from nothing each time, with a new optimizer of the same arguments."""
    pytest.importorskip('skorch')
    from skorch import NeuralNet  # noqa: PLC0415
    x, y = (torch.cat(part) for part in zip(*batches(4)))
    arguments = {'max_epochs': 2, 'batch_size': 32, 'train_split': None, 'verbose': 0, 'lr': 1e-2}
    theirs = NeuralNet(Mlp, torch.nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, **arguments)
    ours = NeuralNet(Mlp, torch.nn.CrossEntropyLoss, optimizer=bt.AdamW, **arguments,
                     **{f'optimizer__{key}': value for key, value in job.items()})
    for net in (theirs, ours):
        net.fit(x, y)
        net.fit(x, y)
        net.set_params(optimizer__weight_decay=0.1)
        net.partial_fit(x, y)
    torch.testing.assert_close(ours.history[:, 'train_loss'], theirs.history[:, 'train_loss'], **CLOSE)
    ours.optimizer_.close()
