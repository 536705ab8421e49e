"""Hugging Face's Trainer and Accelerate, each in processes of its own; against torch.optim.AdamW under the same script."""
import pathlib
from textwrap import dedent

import pytest
import torch
from own_process import Process, import_also
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
def ended(model, optimizer, losses):
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    if isinstance(optimizer, bt.AdamW):
        optimizer.close()
    return losses, kept
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
    arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=4, max_steps=12, logging_steps=1, save_steps=4,
                                  report_to=[], use_cpu=True, seed=1, max_grad_norm=0.5, lr_scheduler_type='cosine',
                                  disable_tqdm=True, dataloader_num_workers=0)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, optimizers=(optimizer, schedule),
                      callbacks=[KillAfter()])
    trainer.train(resume_from_checkpoint=resume)
    return ended(model, optimizer, [entry['loss'] for entry in trainer.state.log_history if 'loss' in entry])
def half_way(folder):
    return f'{folder}/checkpoint-4'
'''

ACCELERATE = '''
from accelerate import Accelerator
def run(optimizer_of, folder, resume=False):
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = gpt2()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.95 ** i)
    loader = torch.utils.data.DataLoader(examples[:64], batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, half = [], len(loader) // 2
    if resume:
        accelerator.load_state(resume)
        loader = accelerator.skip_first_batches(loader, half)
    for i, inputs in enumerate(loader, half if resume else 0):
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if i == half - 1 and not resume:
            accelerator.save_state(folder, safe_serialization='safe' in folder)
    return ended(model, optimizer.optimizer, losses)
def half_way(folder):
    return folder
'''

# Each way of saving, beside torch.optim's own run: moments of a job that ends with its process, the name of a version, moments of a
# durable job.
COMPARED = '''
def same(came, expected, **tolerance):
    torch.testing.assert_close(torch.tensor(came[0]), torch.tensor(expected[0][-len(came[0]):]), **tolerance)
    torch.testing.assert_close(came[1], expected[1], **tolerance)
expected = run(theirs, 'theirs')
assert expected[0][-1] < expected[0][0]
for folder, more in (('moments', {}), ('named-safe', {'nvme': '1GiB'}), ('durable', {'nvme': '1GiB', 'states': 'full'})):
    more = {'name': folder, **more, **({'directory': folder + '-state'} if more else {})}
    whole = run(lambda model: ours(model, **more), folder)
    same(whole, expected, rtol=1e-3, atol=1e-3)
    again = {**more, 'resume': 'auto'} if 'states' in more else more
    same(run(lambda model: ours(model, **again), folder, resume=half_way(folder)), whole, rtol=0.0, atol=0.0)
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
    codes = [rank.wait() for rank in ranks]
    logs = '\n'.join(rank.output for rank in ranks)
    assert codes == [expect] * world, logs
    return logs


@pytest.fixture(scope='module', autouse=True)
def imported():
    import_also('transformers.trainer', 'accelerate', 'models')


@pytest.mark.parametrize('loop', ['TRAINER', 'ACCELERATE'])
@pytest.mark.parametrize('world', [1, 2])
def test_like_torch_and_on_from_each_checkpoint(world, loop, tmp_path):
    said = run(tmp_path, {'TRAINER': TRAINER, 'ACCELERATE': ACCELERATE}[loop] + COMPARED, world=world)
    assert 'lr_scheduler.step()' not in said, said  # what torch says of a schedule that goes on before its optimizer


def test_trainer_killed_and_resumed(tmp_path):
    durable = TRAINER + dedent('''
        folder = os.environ['FOLDER']
        came = run(lambda model: ours(model, directory=folder + '-state', nvme='1GiB', resume='auto'), folder,
                   resume=bool(os.environ.get('FROM_CHECKPOINT')))
        torch.save(came, folder + '.pt')
        ''')
    run(tmp_path, durable, FOLDER='whole')
    run(tmp_path, durable, expect=-9, FOLDER='killed', KILL_AT='10')
    run(tmp_path, durable, FOLDER='killed', FROM_CHECKPOINT='1')
    whole, killed = torch.load(tmp_path / 'whole.pt'), torch.load(tmp_path / 'killed.pt')
    assert whole[0] == killed[0] and all(map(torch.equal, whole[1], killed[1]))
