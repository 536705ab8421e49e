"""Hugging Face's Trainer and Accelerate, each in processes of its own; against torch.optim.AdamW under the same script."""
import pathlib
from textwrap import dedent

import pytest
import torch
from own_process import Process
from test_ranks import free_port

pytest.importorskip('transformers')
pytest.importorskip('accelerate')
HERE = pathlib.Path(__file__).parent

HEAD = f'''
import os, signal, sys
import torch
sys.path.insert(0, {str(HERE)!r})
from models import batch, gpt2
import ballast.torch as bt
torch.set_num_threads(1)
torch.manual_seed(5)
ARGUMENTS = dict(lr=3e-3, weight_decay=0.05)
def ours(model, **more):
    return bt.AdamW(model.named_parameters(), **ARGUMENTS, dram='128MiB', threads=2, **more)
def theirs(model):
    return torch.optim.AdamW(model.parameters(), **ARGUMENTS)
examples = [{{key: value[0] for key, value in batch('gpt2', i).items()}} for i in range(96)]
'''

TRAINER = '''
from transformers import Trainer, TrainerCallback, TrainingArguments
class KillAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if 'KILL_AT' in os.environ and state.global_step == int(os.environ['KILL_AT']):
            os.kill(os.getpid(), signal.SIGKILL)
def run(optimizer_of, folder, resume=False):
    torch.manual_seed(5)
    model = gpt2()
    arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=4, max_steps=20, logging_steps=1, save_steps=5,
                                  report_to=[], use_cpu=True, seed=1, max_grad_norm=0.5, lr_scheduler_type='cosine',
                                  disable_tqdm=True, dataloader_num_workers=0, save_total_limit=2)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, optimizers=(optimizer, schedule),
                      callbacks=[KillAfter()])
    trainer.train(resume_from_checkpoint=resume)
    return [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry]
'''


def start(folder, body, rank=0, world=1, port=0, **variables):
    script = folder / f'script{rank}.py'
    script.write_text(HEAD + body, encoding='utf-8')
    if world > 1:
        variables |= {'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(world), 'MASTER_ADDR': '127.0.0.1',
                      'MASTER_PORT': str(port)}
    return Process(script, folder, folder / f'{rank}.log', **variables)


def run(folder, body, world=1, expect=0, **variables):
    port = free_port()
    ranks = [start(folder, body, rank, world, port, **variables) for rank in range(world)]
    codes = [rank.wait(400) for rank in ranks]
    logs = '\n'.join(rank.output for rank in ranks)
    assert codes == [expect] * world, logs
    return logs


@pytest.mark.parametrize('world', [1, 2])
def test_trainer_like_torch(world, tmp_path):
    run(tmp_path, TRAINER + dedent('''
        came = run(ours, 'ours')
        expected = run(theirs, 'theirs')
        torch.testing.assert_close(torch.tensor(came), torch.tensor(expected), rtol=1e-3, atol=1e-3)
        assert len(came) == 20 and came[-1] < came[0]
        '''), world=world)


def test_trainer_killed_and_resumed(tmp_path):
    durable = TRAINER + dedent('''
        folder = os.environ['FOLDER']
        losses = run(lambda model: ours(model, directory=folder + '-state', nvme='1GiB', resume='auto'), folder,
                     resume=bool(os.environ.get('FROM_CHECKPOINT')))
        torch.save(losses, folder + '.pt')
        ''')
    run(tmp_path, durable, FOLDER='whole')
    run(tmp_path, durable, expect=-9, FOLDER='killed', KILL_AT='13')
    run(tmp_path, durable, FOLDER='killed', FROM_CHECKPOINT='1')
    whole, killed = torch.load(tmp_path / 'whole.pt'), torch.load(tmp_path / 'killed.pt')
    assert whole == killed


def test_accelerate_prepare_and_its_checkpoints(tmp_path):
    body = dedent('''
        from accelerate import Accelerator
        def run(make, resume):
            torch.manual_seed(5)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = gpt2()
            optimizer = make(model)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.95 ** i)
            loader = torch.utils.data.DataLoader(examples, batch_size=4)
            model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
            losses = []
            if resume:
                accelerator.load_state('saved')
                loader = accelerator.skip_first_batches(loader, 12)
            for i, inputs in enumerate(loader, 12 if resume else 0):
                with accelerator.accumulate(model):
                    loss = model(**inputs).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                if i == 11 and make is not theirs and not resume:
                    accelerator.save_state('saved')
            return losses
        durable = lambda model: ours(model, directory='state', nvme='1GiB', resume='auto')
        if os.environ.get('AGAIN'):
            again = run(durable, True)
            assert again == torch.load('came.pt')[12:], again
        else:
            came = run(durable, False)
            torch.save(came, 'came.pt')
            torch.testing.assert_close(torch.tensor(came), torch.tensor(run(theirs, False)), rtol=1e-3, atol=1e-3)
        ''')
    run(tmp_path, body)
    run(tmp_path, body, AGAIN='1')
