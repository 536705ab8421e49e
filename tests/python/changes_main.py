"""A cell of the table of test_changes.py: a change (changes.py) at a moment of a training, with ours and with torch's optimizer. Run with
a folder it is one rank of two under DistributedDataParallel: the number of cells, and what went wrong, go to FOLDER/changes-RANK.txt."""
import contextlib
import copy
import itertools
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from changes import COUNTS, GRADIENTS, WAYS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ballast
import ballast.torch as bt
from ballast.torch.modes import same_bits

ARGUMENTS = {'lr': 1e-3, 'weight_decay': 0.1}
_numbers = itertools.count()
torch.set_num_threads(1)  # the table has many small steps


class Net(nn.Module):
    """Tensors of less than 16 KiB and of more."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(48, 512)
        self.blocks = nn.Sequential(nn.Linear(512, 24, bias=False), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24, bias=False))

    def forward(self, tokens):
        return self.blocks(self.embedding(tokens)).float().square().mean() * 1000  # gradients far above Adam's eps


def made(dtype):
    torch.manual_seed(3)
    return Net().to(dtype)


class Masters:
    """torch's AdamW over fp32 masters, as users of 16-bit parameters write it by hand. A master that does not round to its parameter
    any more takes the parameter's value."""

    def __init__(self, parameters):
        self.parameters, self.masters, self.optimizer = list(parameters), None, None

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        if self.masters is None:
            self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
            self.optimizer = torch.optim.AdamW(self.masters, **ARGUMENTS)
        for master, parameter in zip(self.masters, self.parameters):
            kept = same_bits(master.to(parameter.dtype), parameter.detach())
            master.copy_(torch.where(kept, master, parameter.float()))
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters):
            parameter.copy_(master)


class Side:
    """One of the two trainings."""

    def __init__(self, model, optimizer, wrap, name=''):
        self.model, self.optimizer, self.name = model, optimizer, name
        self.parameters = list(model.parameters())  # the optimizer's
        self.passes = wrap(model)
        self.count = 0

    def save(self):
        if hasattr(self.optimizer, 'state_dict'):
            self.model.state_dict(), self.optimizer.state_dict()

    def change(self, way):
        if hasattr(self.optimizer, 'wait'):
            self.optimizer.wait()  # with overlap
        return way.change(self.model, self.save)

    def loss(self):
        tokens = torch.arange(8 * self.count, 8 * self.count + 8) % 48
        return self.passes(tokens + (dist.get_rank() if dist.is_initialized() else 0) % 48)

    def backward(self):
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self):
        self.optimizer.step()
        self.count += 1
        if hasattr(self.optimizer, 'wait'):
            self.optimizer.wait()

    def masters(self):
        if isinstance(self.optimizer, Masters):
            return self.optimizer.masters
        return [self.optimizer.state[each].get('master') for each in self.parameters]  # without one: frozen so far


# --- moments

def after_a_step(side, way):
    undo = side.change(way)
    side.backward()
    return undo


def after_an_evaluation(side, way):
    with torch.no_grad():
        side.loss()
    undo = side.change(way)
    with torch.no_grad():
        side.loss()
    side.backward()
    return undo


def after_an_exception_in_backward(side, way):
    def fail(gradient):
        raise MemoryError('as out of memory')
    side.optimizer.zero_grad()
    hook = side.model.blocks[0].weight.register_hook(fail) if side.model.blocks[0].weight.requires_grad else None
    with contextlib.suppress(MemoryError):
        side.loss().backward()
    if hook is not None:
        hook.remove()
    undo = side.change(way)
    side.backward()
    return undo


def between_backward_and_step(side, way):
    side.backward()
    return side.change(way)


MOMENTS = {'before the first step': after_a_step, 'after a step': after_a_step, 'after an evaluation': after_an_evaluation,
           'after an exception in backward': after_an_exception_in_backward, 'between backward and step': between_backward_and_step}
MOMENTS_OF_GRADIENTS = {'at the first step': between_backward_and_step, 'at a later step': between_backward_and_step}
FIRST = ('before the first step', 'at the first step')


def sides(way, dtype, arguments, wrap=lambda model: model):
    model = made(dtype)
    twin = copy.deepcopy(model)
    by_hand = dtype != torch.float32 or way.name == 'a narrower dtype'
    theirs = Masters(twin.parameters()) if by_hand else torch.optim.AdamW(twin.parameters(), **ARGUMENTS)
    if arguments.get('overlap'):
        arguments = {**arguments, 'overlap': model}
    name = f'changes{next(_numbers)}'
    ours = bt.AdamW(model.named_parameters(), **ARGUMENTS, **arguments, name=name, chunk_elements=1 << 16)
    return Side(model, ours, wrap, name), Side(twin, theirs, wrap)


def compare(ours, theirs):
    """What differs, in words; '' if nothing does."""
    names = [name for name, _ in ours.model.named_parameters()]
    pairs = [(f"'{name}'", *pair, pair[0].dtype) for name, *pair in zip(names, ours.model.parameters(), theirs.model.parameters())]
    if isinstance(theirs.optimizer, Masters):
        pairs += [(f"the master of '{name}'", mine, other, torch.float32)
                  for name, mine, other in zip(names, ours.masters(), theirs.masters()) if mine is not None]
    for name, mine, other, dtype in pairs:
        mine, other = mine.detach().float(), other.detach().float()
        # A few elements may have been at a rounding's border, or have next to no gradient, of which Adam takes the sign.
        apart = ~torch.isclose(mine, other, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=5e-5)
        if apart.float().mean() > 0.002:
            return f"{name}: {int(apart.sum())} elements are up to {float((mine - other).abs().max()):.2g} from torch's"
    return ''


def cells(way):
    """The moments of a way, in the trainings that they come in."""
    moments = list(MOMENTS_OF_GRADIENTS if way in GRADIENTS else MOMENTS)
    return [[moment] for moment in moments] if way.once else [moments]


def run(way, moments, dtype, arguments, wrap=lambda model: model):
    """A training with these moments in turn. Yields (moment, what is wrong; '' if nothing is)."""
    ours, theirs = sides(way, dtype, arguments, wrap)
    try:
        for moment in moments:
            if moment not in FIRST and ours.count == 0:
                for side in (ours, theirs):
                    side.backward()
                    side.step()
            act = {**MOMENTS, **MOMENTS_OF_GRADIENTS}[moment]
            keeps = dtype == torch.float32 and 'durability' in arguments  # else parameters are their own masters
            wants = way.first if moment in FIRST else (keeps and way.fp32) or way.wants
            wants = (arguments.get('overlap') and way.overlap) or wants
            yield moment, _count(ours, theirs, act, way) if wants == COUNTS else _refuse(ours, theirs, act, way)
    finally:
        ours.optimizer.close()
        if 'directory' in arguments:
            ballast.drop(ours.name, arguments['directory'])


def _count(ours, theirs, act, way):
    for side in (theirs, ours):
        act(side, way)
        side.step()
        if way in GRADIENTS:
            side.model.requires_grad_(True)
    return compare(ours, theirs)


def _is_ours(error):
    """Code of the package was amid it."""
    folder = os.path.dirname(ballast.__file__) + os.sep
    return any(frame.filename.startswith(folder) for frame in traceback.extract_tb(error.__traceback__))


def _refuse(ours, theirs, act, way):
    """Refused by name, and nothing is lost: once the change is undone the training goes on as if it had not been."""
    undo = None
    try:
        undo = act(ours, way)
        ours.step()
    except RuntimeError as error:
        if not isinstance(error, ballast.Error) and ours.count and not _is_ours(error):
            return ''  # torch's own, in forward or backward
        if not any(f"'{name}'" in str(error) for name, _ in ours.model.named_parameters()):
            return f'no parameter is named: {error}'
    else:
        return 'not refused'
    if undo is None:
        return 'refused before the change could be undone'
    undo()
    for side in (theirs, ours):
        side.backward()
        side.step()
    return compare(ours, theirs)


# Those that DistributedDataParallel, which has seen the model before, goes on with.
OF_RANKS = ('mul_', 'load_state_dict', '.data.mul_', '_foreach of .data', 'numpy', '.data, one row', '.data = new values',
            'an average by .data, saved, and back', 'an average in place, saved', 'None', 'replaced')


def wrapped(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def main(folder):
    dist.init_process_group('gloo')
    warnings.simplefilter('ignore')
    wrong, count = [], 0
    del MOMENTS['after an exception in backward']  # DistributedDataParallel itself cannot go on
    ways = [way for way in [*WAYS, *GRADIENTS] if way.name in OF_RANKS]
    for dtype, way in itertools.product((torch.float32, torch.bfloat16), ways):
        for moments in cells(way):
            for moment, what in run(way, moments, dtype, {'dram': '64MiB', 'threads': 1}, wrapped):
                count += 1
                if what:
                    wrong.append(f'{dtype}, {way.name}, {moment}: {what}')
    with open(os.path.join(folder, f'changes-{dist.get_rank()}.txt'), 'w', encoding='utf-8') as file:
        file.write('\n'.join([str(count), *wrong]))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1])
