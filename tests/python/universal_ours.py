"""What the tests of universal checkpoints share: optimizers of ours for universal_deepspeed.py's model, and what they hold."""
import pathlib
import tarfile

import torch
from universal_deepspeed import AFTER, BEFORE, DECAY, groups_of, loss_of

import ballast.torch as bt

TAG = f'global_step{BEFORE}_universal'
GROUPS = [{'lr': 1e-2, 'betas': (0.8, 0.95), 'eps': 1e-6, 'weight_decay': decay} for decay in (DECAY, 0.0)]


def close(one, other):
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)


def unpacked(folder, stage):
    """Puts an archive of universal_deepspeed.py there; returns what the engine held and did next."""
    with tarfile.open(pathlib.Path(__file__).parent / f'universal_zero{stage}.tar.gz') as archive:
        archive.extractall(folder, filter='data')
    return torch.load(folder / 'expected.pt', weights_only=True)


def of(model, job, **more):
    return bt.AdamW(groups_of(model, named=True), **{**job, 'lr': 0.5, **more})


def state_of(optimizer, model):
    return {name: {'master': optimizer.job.read_master(parameter),
                   **{key: optimizer.job.read_state(parameter)[key] for key in ('exp_avg', 'exp_avg_sq')}}
            for name, parameter in model.named_parameters()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [(name, what) for name, entry in one.items() for what in entry if not torch.equal(entry[what], other[name][what])]


def losses(model, optimizer, begin=BEFORE, count=AFTER):
    """By rank, of the two ranks that the archives were made by."""
    found = [[], []]
    for step in range(begin, begin + count):
        optimizer.zero_grad()
        each = [loss_of(model, step, rank=rank) for rank in range(2)]
        (sum(each) / 2).backward()
        optimizer.step()
        for rank in range(2):
            found[rank].append(each[rank].item())
    return found
