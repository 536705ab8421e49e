"""What users of PyTorch and its frameworks have complained of, as programs of theirs: each comes to the same with torch.optim's optimizer
and with ours, or is refused by name, and the advice works."""
import re

import torch
from scripts import assert_close, batches, loss_of

import ballast
import ballast.torch as bt

KINDS = {'moments': {}, 'named': {'nvme': '4GiB'}, 'moments of a durable job': {'nvme': '4GiB', 'states': 'full'}}


class Complaints(dict):
    """Programs by name."""

    def __call__(self, *sources):
        """A program: make(named parameters, optimizer, **arguments) gives an optimizer. It returns (losses and other numbers, model).
        sources: whose it is."""
        def add(program):
            self[program.__name__] = program
            program.sources = sources
            return program
        return add


class Make:
    """Optimizers of torch, or ours with `more`; `refused`: what ours has refused."""

    def __init__(self, more=None):
        self._more, self.made, self.refused = more, [], []
        self.is_ours = more is not None

    def __call__(self, params, optimizer='AdamW', lr=1e-2, **arguments):
        if not self.is_ours:
            return getattr(torch.optim, optimizer)(params, lr=lr, **arguments)
        name = f"{self._more['name']}-{len(self.made)}"
        self.made.append(getattr(bt, optimizer)(params, lr=lr, **arguments, **{**self._more, 'name': name}))
        return self.made[-1]

    def take(self, optimizer, state, source):
        """optimizer.load_state_dict(state), as the advice has it where that is refused: a named state is another job's."""
        try:
            optimizer.load_state_dict(state)
        except ballast.Error as error:
            self.refused.append(str(error))
            optimizer.load_state_dict(source.full_state_dict())


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def steps(model, optimizer, count, seed=7):
    return [step(model, optimizer, batch) for batch in batches(count, seed)]


def check(program, kind, job, tmp_path, refused):
    """Runs the program with torch.optim, and with ours of this kind. refused: what ours has to refuse, in this order."""
    more, results = {**job, **KINDS[kind], **({'directory': tmp_path / 'state'} if 'nvme' in KINDS[kind] else {})}, []
    for make in (Make(), Make(more)):
        torch.manual_seed(1)
        try:
            results += program(make)
        finally:
            for optimizer in make.made:
                optimizer.close()
    expected, twin, came, model = results
    assert_close(expected, came, twin, model)
    assert len(make.refused) == len(refused), make.refused
    for said, words in zip(make.refused, refused):
        assert re.search(words, said)
