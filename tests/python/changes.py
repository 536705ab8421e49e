"""The ways in which a program changes parameters, modules and gradients without the optimizer, one by one, for any nn.Module. Each way
comes to the same for equal models: it draws nothing at random."""
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

COUNTS, REFUSED = 'counts', 'refused'


class Way(NamedTuple):
    name: str
    # change(model, save): save() takes the state_dicts that a checkpoint has. Returns what undoes the change, or None.
    change: Callable
    wants: str = COUNTS  # as with torch.optim; or refused by the name of a parameter
    first: str = COUNTS  # what it wants before the first step
    fp32: str = ''  # what it wants of fp32 parameters with masters on servers, if another
    overlap: str = ''  # what it wants with overlap, if another
    once: bool = False  # a second time changes nothing more


WAYS: list[Way] = []  # of parameters and modules: at any moment
GRADIENTS: list[Way] = []  # of gradients: between backward and step


def way(name, to=WAYS, **more):
    def add(change):
        to.append(Way(name, change, **more))
        return change
    return add


def of(name, to=WAYS, **more):
    """A way that changes each parameter by itself: change(parameter)."""
    def add(change):
        @torch.no_grad()
        def each(model, save):
            for parameter in model.parameters():
                if to is WAYS or parameter.grad is not None:
                    change(parameter)
        to.append(Way(name, each, **more))
        return change
    return add


def first(model, kind):
    return next(module for module in model.modules() if isinstance(module, kind))


def of_kind(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


def largest(model):
    return max(model.parameters(), key=lambda parameter: parameter.numel())


def waves(like):
    """Values in the shape of a tensor, small and unlike each other, and none a neighbour of what is there."""
    return (torch.arange(like.numel(), dtype=torch.float32).mul(0.37).sin() * 0.1).reshape(like.shape).to(like.dtype)


def bits(parameter):
    """The same memory as integers, which numpy has for every dtype."""
    return parameter.detach().view({2: torch.int16, 4: torch.int32}[parameter.element_size()]).numpy()


# --- values, by operations that version counters tell

of('mul_')(lambda p: p.mul_(0.5))
of('clamp_')(lambda p: p.clamp_(-0.02, 0.02))
of('copy_')(lambda p: p.copy_(waves(p)))
of('nn.init')(lambda p: nn.init.constant_(p, 0.01))
of('set_ of other memory')(lambda p: p.set_(waves(p)))
of('equal values')(lambda p: p.copy_(p.clone()))


@way('one row')
@torch.no_grad()
def _row(model, save):
    largest(model)[1].neg_()


@way('_foreach')
@torch.no_grad()
def _foreach(model, save):
    torch._foreach_mul_(list(model.parameters()), 0.5)


@way('load_state_dict')
def _load(model, save):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@way('vector_to_parameters')
def _vector(model, save):
    parameters = list(model.parameters())
    vector_to_parameters(parameters_to_vector(parameters).detach() * 0.5, parameters)


# --- values, by ways that version counters do not tell

of('.data.mul_')(lambda p: p.data.mul_(0.5))
of('.data.clamp_')(lambda p: p.data.clamp_(-0.02, 0.02))
of('.data.copy_')(lambda p: p.data.copy_(waves(p)))
of('.data, some elements')(lambda p: p.data.copy_(torch.where(p.data > 0, p.data, p.data * 0.5)))
of('.data[:]')(lambda p: p.data.__setitem__(slice(None), 0.03))
of('.data, the very bits')(lambda p: p.data.copy_(p.data.clone()))
of('.detach() of .data')(lambda p: p.data.detach().view(-1).add_(0.125))
of('numpy')(lambda p: bits(p).reshape(-1).__setitem__(slice(None), bits(waves(p)).reshape(-1)))
of('dlpack')(lambda p: torch.from_dlpack(p.detach()).data.mul_(0.5))
of('the storage')(lambda p: p.untyped_storage().copy_(waves(p).untyped_storage()))


@way('_foreach of .data')
def _foreach_data(model, save):
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.5)


@way('.data, one row')
def _data_row(model, save):
    largest(model).data[1].neg_()


@way('.data, some columns')
def _data_column(model, save):
    largest(model).data[:, 3::128].neg_()


@way('renormalised by numpy')
def _numpy_norm(model, save):
    weight = first(model, nn.Linear).weight
    bits(weight)[...] = bits((weight.detach() / weight.detach().float().abs().max() * 0.2).to(weight.dtype))


@way('an adapter merged')
def _merged(model, save):
    weight = first(model, nn.Linear).weight
    down, up = waves(weight[:2]), waves(weight[:, :2])
    weight.data += (up @ down).to(weight.dtype)


# --- other memory

of('.data = new values')(lambda p: setattr(p, 'data', waves(p)))
of('.data = the very bits')(lambda p: setattr(p, 'data', p.data.clone()))
of('share_memory_')(lambda p: p.share_memory_())


@way('.data = views of one buffer')
def _flat(model, save):
    flat = torch.cat([parameter.data.reshape(-1) for parameter in model.parameters()]) * 0.5
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin:begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()


@way('.data = transposed memory')
def _transposed(model, save):
    weight = first(model, nn.Linear).weight
    weight.data = (weight.data * 0.5).t().contiguous().t()


@way('.data = another shape', wants=REFUSED, once=True)
def _resized(model, save):
    parameter = largest(model)
    before = parameter.data
    parameter.data = torch.cat([before, before])[:before.shape[0] + 1]
    return lambda: setattr(parameter, 'data', before)


@way('.data of two parameters tied', wants=REFUSED, first=REFUSED, once=True)
def _tied_data(model, save):
    one, other = twins(model)
    before = one.weight.data
    one.weight.data = other.weight.data
    return lambda: setattr(one.weight, 'data', before)


@way('dtype there and back')
def _there_and_back(model, save):
    dtype = next(model.parameters()).dtype
    model.to(torch.float64).to(dtype)


@way('a narrower dtype', wants=REFUSED, fp32=COUNTS, once=True)
def _dtype(model, save):
    dtype, before = next(model.parameters()).dtype, [parameter.detach().clone() for parameter in model.parameters()]
    model.to(torch.float16)

    def undo():
        model.to(dtype)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before):
                parameter.copy_(value)
    return undo


# --- parameters and modules

def structure(model):
    """Returns what brings back the modules and parameters that are there now."""
    there = [(module, dict(module._parameters), dict(module._modules)) for module in model.modules()]

    def undo():
        for module, parameters, modules in there:
            module._parameters.update(parameters)
            module._modules.update(modules)
    return undo


def twins(model):
    """Two linear layers of one shape."""
    linears = of_kind(model, nn.Linear)
    return next((one, other) for i, one in enumerate(linears) for other in linears[i + 1:] if one.weight.shape == other.weight.shape)


def put_for(model, old, new):
    parent, name = next((parent, name) for parent in model.modules() for name, child in parent.named_children() if child is old)
    setattr(parent, name, new)


@way('a replaced Parameter', overlap=REFUSED, once=True)
def _replaced(model, save):
    layer, undo = first(model, nn.Linear), structure(model)
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    return undo


@way('a replaced module', overlap=REFUSED, once=True)
def _replaced_module(model, save):
    old, undo = first(model, nn.Linear), structure(model)
    new = nn.Linear(old.in_features, old.out_features, old.bias is not None, dtype=old.weight.dtype)
    new.load_state_dict({key: value * 0.5 for key, value in old.state_dict().items()})
    put_for(model, old, new)
    return undo


@way('load_state_dict(assign=True)', overlap=REFUSED, once=True)
def _assigned(model, save):
    undo = structure(model)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    return undo


@way('tied', overlap=REFUSED, once=True)
def _tied(model, save):
    (one, other), undo = twins(model), structure(model)
    one.weight = other.weight
    return undo


@way('tied and untied')
def _untied(model, save):
    one, other = twins(model)
    own = one.weight
    one.weight = other.weight
    one.weight = own
    own.data.copy_(other.weight.data)


@way('a resized embedding', overlap=REFUSED, once=True)
def _resized_embedding(model, save):
    old, undo = first(model, nn.Embedding), structure(model)
    new = nn.Embedding(old.num_embeddings + 2, old.embedding_dim, dtype=old.weight.dtype)
    new.weight.data.fill_(0.01)
    new.weight.data[:old.num_embeddings] = old.weight.data
    put_for(model, old, new)
    return undo


@way('parametrized', once=True)
def _parametrized(model, save):
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5
    parametrize.register_parametrization(first(model, nn.Linear), 'weight', Half())


@way('pruned', once=True)
def _pruned(model, save):
    prune.l1_unstructured(first(model, nn.Linear), 'weight', amount=0.5)


@way('frozen', once=True)
def _frozen(model, save):
    first(model, nn.Linear).requires_grad_(False)


@way('frozen, written and thawed')
def _thawed(model, save):
    layer = first(model, nn.Linear).requires_grad_(False)
    layer.weight.data.mul_(0.5)
    layer.requires_grad_(True)


@way('all frozen and thawed')
def _all_thawed(model, save):
    model.requires_grad_(False)
    model.requires_grad_(True)


# --- averages

def average(model):
    return [(parameter.detach() * 0.5).to(parameter.dtype) for parameter in model.parameters()]


def in_place(parameters, values):
    with torch.no_grad():
        for parameter, value in zip(parameters, values):
            parameter.copy_(value)


def by_data(parameters, values):
    for parameter, value in zip(parameters, values):
        parameter.data.copy_(value)


def by_memory(parameters, values):
    for parameter, value in zip(parameters, values):
        parameter.data = value


def _averages(write, name):
    def swap(model):
        parameters = list(model.parameters())
        own = [parameter.data for parameter in parameters] if write is by_memory else [each.detach().clone() for each in parameters]
        write(parameters, average(model))
        return lambda: write(parameters, own)

    @way(f'an average {name}')
    def _stays(model, save):
        swap(model)

    @way(f'an average {name}, and back')
    def _back(model, save):
        swap(model)()

    @way(f'an average {name}, saved, and back')
    def _saved(model, save):
        back = swap(model)
        save()
        back()

    @way(f'an average {name}, saved')
    def _stays_saved(model, save):
        swap(model)
        save()


_averages(in_place, 'in place')
_averages(by_data, 'by .data')
_averages(by_memory, 'by memory')


# --- gradients, which every way finds as backward left them

def gradient_of(name, **more):
    return of(name, to=GRADIENTS, **more)


gradient_of('mul_')(lambda p: p.grad.mul_(0.5))
gradient_of('.data.mul_')(lambda p: p.grad.data.mul_(0.5))
gradient_of('.data, in another order')(lambda p: p.grad.data.copy_(p.grad.data.flatten().flip(0).reshape(p.shape)))
gradient_of('.data = another')(lambda p: setattr(p.grad, 'data', waves(p)))
gradient_of('numpy')(lambda p: bits(p.grad).reshape(-1).__setitem__(slice(None), bits(waves(p)).reshape(-1)))
gradient_of('replaced')(lambda p: setattr(p, 'grad', waves(p)))
gradient_of('replaced by a transposed one')(lambda p: setattr(p, 'grad', waves(p).t().contiguous().t()))
gradient_of('None')(lambda p: setattr(p, 'grad', None))
gradient_of('zero')(lambda p: p.grad.zero_())
gradient_of('clip_grad_value_')(lambda p: nn.utils.clip_grad_value_([p], 1e-4))
gradient_of('left on a frozen parameter')(lambda p: p.requires_grad_(False))


@way('one is None', to=GRADIENTS)
def _one_none(model, save):
    first(model, nn.Linear).weight.grad = None


@way('clip_grad_norm_', to=GRADIENTS)
def _clip(model, save):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@way('_foreach', to=GRADIENTS)
def _foreach_gradients(model, save):
    torch._foreach_mul_([parameter.grad for parameter in model.parameters() if parameter.grad is not None], 0.5)


@way('a second backward', to=GRADIENTS)
def _twice(model, save):
    sum(parameter.square().sum() for parameter in model.parameters() if parameter.requires_grad).backward()


@way('of another shape', to=GRADIENTS, wants=REFUSED, once=True)
def _other_shape(model, save):
    weight = first(model, nn.Linear).weight
    before, gradient = weight.data, weight.grad
    weight.grad = None
    weight.data = torch.cat([before, before])
    weight.grad = torch.cat([gradient, gradient])

    def undo():
        weight.grad = None
        weight.data = before
        weight.grad = gradient
    return undo
