"""One rank of test_changes_sharded.py: changes_sharded_main.py SCRIPT[,SCRIPT...] FOLDER, as shard_main.py. Each way of changes.py at each
moment, on a model of shard() and on a plain twin whose gradients are averaged."""
import contextlib
import copy
import functools
import os
import warnings

import torch
import torch.distributed as dist
from changes import GRADIENTS, WAYS
from shard_main import main, script
from torch import nn

import ballast.torch as bt
from ballast import Error
from ballast.torch.tensors.remote import remote_of

LR = 0.25
MOMENTS = ['between steps', 'after a pass without backward', 'after a pass with gradients alone', 'after a caught exception',
           'before backward', 'before step', 'gathered', 'gathered to write']
# With torch.optim a step leaves the new Parameters as they are, and torch's DTensor takes another .data without a change.
NOT_BEFORE_STEP = ('load_state_dict(assign=True)', '.data = another')
WAYS_AT = {moment: WAYS for moment in MOMENTS} | {'before step': [way for way in [*WAYS, *GRADIENTS] if way.name not in NOT_BEFORE_STEP]}
# Moments that come to a model as 'between steps' does, which has every way: after passes that no step takes.
LIKE_BETWEEN = ('after a pass without backward', 'after a pass with gradients alone', 'after a caught exception')
# What a pair tries but in full rounds, for a cell takes it several times as long; and one rank at those moments.
OF_PAIRS = ('mul_', 'load_state_dict', '.data.mul_', 'numpy', '.data = new values', '.data = another shape', 'a replaced Parameter',
            'a replaced module', 'tied', 'frozen', 'replaced', 'None')


# Torch's own words: of a fresh module that cannot load a DTensor, and of a DTensor's memory.
OF_TORCH = ('the parameter named "weight"', '.numpy() is not supported for tensor subclasses')


def ways_at(moment, world):
    everything = (world == 1 and moment not in LIKE_BETWEEN) or os.environ.get('TEST_ROUNDS') == 'full'
    return [way for way in WAYS_AT[moment] if everything or way.name in OF_PAIRS]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tokens(seed):
    return torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(seed + dist.get_rank()))


def loss_of(model, seed=0):
    batch = tokens(seed)
    return nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class Boom(Exception):
    pass


def cut_off(model):
    """A backward pass that an exception ends amid the blocks."""
    def explode(*_):
        raise Boom
    hook = model.blocks[0].register_full_backward_hook(explode)
    try:
        loss_of(model, 50).backward()
    except Boom:
        pass
    finally:
        hook.remove()


def averaged(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Sharded:
    def __init__(self, values, early):
        self.model = Net()
        self.model.load_state_dict(values)
        bt.shard(self.model, push_early=early)
        self.optimizer = bt.SGD(self.model.named_parameters(), lr=LR, name=f'changes-{early}', dram='64MiB', threads=1)
        self.optimizer.resume()

    def around(self, moment):
        if not moment.startswith('gathered'):
            return contextlib.nullcontext()
        return bt.gathered(self.model, write=moment == 'gathered to write')

    def backward(self, loss):
        loss.backward()

    def values(self):
        with bt.gathered(self.model):
            return {name: value.clone() for name, value in self.model.state_dict().items()}

    def changed(self):
        pass

    def reset(self, values):
        self.optimizer.zero_grad()
        self.model.requires_grad_(True)
        self.model.load_state_dict(values)

    def save(self):
        self.model.state_dict(), self.optimizer.state_dict()


class Plain:
    def __init__(self, values):
        self.model = Net()
        self.model.load_state_dict(values)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def around(self, moment):
        return contextlib.nullcontext()

    def changed(self):
        """A Parameter that took another's place is trained, as shard() has it; torch.optim's optimizer goes on with the other."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def backward(self, loss):
        loss.backward()
        averaged(self.model)

    def values(self):
        return dict(self.model.state_dict())

    def save(self):
        self.model.state_dict(), self.optimizer.state_dict()


def cell(way, moment, side, undo):
    """A step with the change in it. undo: takes what the change returned."""
    model, optimizer = side.model, side.optimizer
    optimizer.zero_grad()
    if moment == 'after a pass without backward':
        with torch.no_grad():
            loss_of(model, 30)
    if moment == 'after a pass with gradients alone':
        loss_of(model, 30)
    if moment == 'after a caught exception':
        cut_off(model)
        optimizer.zero_grad()
    if moment not in ('before backward', 'before step'):
        with side.around(moment):
            undo.append(way.change(model, side.save))
        side.changed()
    loss = loss_of(model)
    if moment == 'before backward':
        undo.append(way.change(model, side.save))
        side.changed()
    side.backward(loss)
    if moment == 'before step':
        undo.append(way.change(model, side.save))
        side.changed()
    side.optimizer.step()


def clean(side):
    """A step without a change. What is refused, is refused once."""
    side.optimizer.zero_grad()
    side.backward(loss_of(side.model))
    side.optimizer.step()


def outcome(way, moment, sharded, values, clean_values, names):
    """('counts', ''), ('refused', text), or another word and what is wrong."""
    undo = []
    try:
        cell(way, moment, sharded, undo)
    except Exception as error:
        text = f'{type(error).__name__}: {error}'
        for each in filter(None, undo if not moment.startswith('gathered') else []):  # which has brought back the model itself
            with contextlib.suppress(Exception):
                each()
        try:
            with contextlib.suppress(Error):
                sharded.model.state_dict()  # tells what is left of the change
            sharded.reset(values)
            clean(sharded)
        except Exception as later:
            return 'broken', f'{text}; then {type(later).__name__}: {later}'
        came = sharded.values()
        if any(not torch.allclose(came[name], value, atol=1e-5) for name, value in clean_values.items()):
            return 'harmed', text
        is_named = any(f"'{name}'" in text for name in names) or any(own in text for own in OF_TORCH)
        return 'refused' if is_named else 'unnamed', text
    try:
        came = sharded.values()
    except Exception as error:
        return 'broken', f'{type(error).__name__}: {error}'
    twin = Plain(values)
    try:
        cell(way, moment, twin, [])
    except Exception as error:
        return 'unlike', f"torch's twin: {error}"
    expected = twin.values()
    for name, value in expected.items():
        if name not in came or came[name].shape != value.shape or not torch.allclose(came[name], value, atol=1e-5):
            return 'lost', name
    return 'counts', ''


def table(early):
    torch.manual_seed(4)
    values = copy.deepcopy(Net().state_dict())
    twin = Plain(values)
    clean(twin)
    expected = copy.deepcopy(twin.values())
    sharded = Sharded(values, early)
    names = list(values)
    came = {}
    for moment in MOMENTS:
        for way in ways_at(moment, dist.get_world_size()):
            sharded.reset(values)
            kind = 'gradient ' if way in GRADIENTS else ''
            came[moment, kind + way.name] = outcome(way, moment, sharded, values, expected, names)
            if came[moment, kind + way.name][0] == 'broken':
                sharded.optimizer.close()
                dist.barrier()
                return came
    dist.barrier()
    sharded.optimizer.close()
    return came


@script
def early():
    return table(True)


@script
def late():
    return table(False)


def model_and_optimizer(name, early, values):
    model = Net()
    model.load_state_dict(values)
    bt.shard(model, push_early=early)
    return model, bt.AdamW(model.named_parameters(), lr=1e-2, name=name, dram='64MiB', threads=1)


def parameters_of(model):
    with bt.gathered(model):
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@script
def cut_off_passes():
    """By push_early: parameters after six batches, and after the same with passes between that exceptions cut off; what step() is told
    right after one, and among micro-batches."""
    torch.manual_seed(4)
    values, came = copy.deepcopy(Net().state_dict()), {}
    for early in (True, False):
        runs = []
        for breaks in (False, True):
            model, optimizer = model_and_optimizer(f'cut-off-{early}-{breaks}', early, values)
            said = []
            for i in range(6):
                if breaks and i % 2:
                    optimizer.zero_grad()
                    cut_off(model)
                    if i == 3:
                        said.append(told(optimizer.step))
                    if i == 5:
                        cut_off_forward(model)
                optimizer.zero_grad()
                loss_of(model, i).backward()
                optimizer.step()
            runs.append(parameters_of(model))
            if breaks:
                optimizer.zero_grad()
                loss_of(model, 7).backward()
                with contextlib.suppress(Error):  # gradients of the pass before have gone
                    cut_off(model)
                said.append(told(optimizer.step))
                optimizer.zero_grad()
                loss_of(model, 8).backward()
                optimizer.step()
            dist.barrier()
            optimizer.close()
        came[early] = runs, said
    return came


def cut_off_forward(model):
    def explode(*_):
        raise Boom
    hook = model.blocks[1].register_forward_hook(explode)
    try:
        loss_of(model, 60)
    except Boom:
        pass
    hook.remove()


@script
def loads():
    """What loads that cannot be taken whole are told, after a pass without backward; whether parameters and buffers stayed as they were;
    and the values of a load that can."""
    torch.manual_seed(1)
    model = Net()
    model.norm = nn.BatchNorm1d(3)
    bt.shard(model)
    optimizer = bt.AdamW(model.named_parameters(), name='loads', dram='64MiB', threads=1)
    with torch.no_grad():
        loss_of(model)
    before = parameters_of(model)
    with bt.gathered(model):
        other = {name: value + 1 for name, value in model.state_dict().items()}
    short, longer, bent = dict(other), {**other, 'more': torch.zeros(1)}, {**other, 'head.weight': torch.zeros(3, 3)}
    del short['head.weight']
    mine = bent if dist.get_rank() == dist.get_world_size() - 1 else other
    said = []
    for state in (short, longer, bent, mine):
        with torch.no_grad():
            loss_of(model)
        said.append(told(lambda state=state: model.load_state_dict(state)))
    stayed = torch.equal(parameters_of(model), before) and not model.norm.running_mean.any()
    with torch.no_grad():
        loss_of(model)
    model.load_state_dict(short, strict=False)
    model.load_state_dict(other)
    came = torch.equal(parameters_of(model), before + 1) and bool(model.norm.running_mean.eq(1).all())
    dist.barrier()
    optimizer.close()
    return said, stayed, came


@script
def forward_within():
    """Losses of one batch within gathered(), by copies that were written to, and outside; and what a pass with gradients is told."""
    torch.manual_seed(1)
    model = Net()
    bt.shard(model)
    optimizer = bt.SGD(model.named_parameters(), lr=LR, name='within', dram='64MiB', threads=1)
    clean_step = functools.partial(clean, Step(model, optimizer))
    clean_step()
    with torch.no_grad():
        outside = loss_of(model).item()
        with bt.gathered(model, write=True):
            within = loss_of(model).item()
            model.head.weight.mul_(0.5)
            written = loss_of(model).item()
        after = loss_of(model).item()
    with bt.gathered(model):
        refused = told(lambda: loss_of(model))
    clean_step()
    if dist.get_rank() == 0:
        with torch.no_grad(), bt.gathered(model):
            loss_of(model)  # of this rank alone
    steps = optimizer.stats()['steps']
    dist.barrier()
    optimizer.close()
    return (outside, within), (written, after), refused, steps


class Step:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def backward(self, loss):
        loss.backward()


@script
def held():
    """Losses of a model that nothing trains and that no optimizer has: before shard() and after, beside one that is trained."""
    torch.manual_seed(1)
    reference = Net().requires_grad_(False)
    with torch.no_grad():
        before = loss_of(reference).item()
    bt.shard(reference)
    model = bt.shard(Net())
    optimizer = bt.AdamW(model.named_parameters(), name='policy', dram='64MiB', threads=1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(loss_of(reference).item())
        loss_of(model).backward()
        optimizer.step()
    dist.barrier()
    optimizer.close()
    return before, losses


class Titan(nn.Module):
    """Blocks in a ModuleDict, as torchtitan has them."""

    def __init__(self, kind='dict'):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
        self.blocks = {'dict': lambda: nn.ModuleDict({str(i): block for i, block in enumerate(blocks)}),
                       'sequential': lambda: nn.Sequential(*blocks), 'named': lambda: Named(blocks)}[kind]()
        self.head = nn.Linear(8, 12)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks.children():
            x = x + block(x)
        return self.head(x)


class Named(nn.Module):
    """As transformers' models."""
    _no_split_modules = ['Sequential']

    def __init__(self, blocks):
        super().__init__()
        self.first, self.second, self.third = blocks


@script
def units():
    """Names of units by kind of model; losses of a job whose model was one unit, and of its second half with a unit for each block; what a
    large unit is told, and a model of small ones."""
    names = {}
    for kind in ('dict', 'sequential', 'named'):
        model = bt.shard(Titan(kind))
        names[kind] = sorted({part.home.name for part in map(remote_of, model.parameters())})
    losses = []
    for chosen in ([], None):
        torch.manual_seed(2)
        model = bt.shard(Titan(), units=chosen)
        optimizer = bt.AdamW(model.named_parameters(), name='units', durability='step', resume='auto')
        for i in range(optimizer.resume().step, 3 * (1 + (chosen is None))):
            optimizer.zero_grad()
            loss = loss_of(model, i)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        dist.barrier()
        optimizer.close()
    torch.manual_seed(2)
    model = bt.shard(Titan())
    optimizer = bt.AdamW(model.named_parameters(), name='units-whole', durability='step')
    whole = []
    for i in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        whole.append(loss.item())
    dist.barrier()
    optimizer.close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with torch.device('meta'):
            large = nn.Sequential(nn.Linear(8192, 4096), nn.Linear(4096, 8))
        bt.shard(large)
        bt.shard(Titan())
    return names, losses, whole, [str(each.message) for each in said if 'shard()' in str(each.message)]


def told(act):
    try:
        act()
    except Error as error:
        return str(error)
    return None


if __name__ == '__main__':
    main()
