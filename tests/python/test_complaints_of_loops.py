"""Programs of users whose loops do more with gradients, groups and parameters than to call step()."""
import concurrent.futures
import copy

import pytest
import torch
from complaints import KINDS, Complaints, check, step, steps
from scripts import batches, loss_of, mlp
from torch import nn

complaint = Complaints()


@complaint('MishaLaskin/curl#20', 'MishaLaskin/curl#28', 'rll-research/url_benchmark#11')
def an_encoder_belongs_to_two_optimizers(make):
    model, losses = mlp(), []
    optimizers = [make(model.named_parameters()), make(model[0].named_parameters(), 'Adam', lr=3e-3)]
    for batch in batches(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
    return [loss.item() for loss in losses], model


@complaint('facebookresearch/fairseq#4702', 'InternLM/InternEvo#169')
def a_frozen_layer_keeps_a_gradient_of_zeros(make):
    """torch.optim goes on by its momentum and decay."""
    model, losses = mlp(), []
    optimizer = make(model.named_parameters(), 'SGD', momentum=0.9, weight_decay=0.1)
    for i, batch in enumerate(batches(6)):
        if i == 3:
            model[0].requires_grad_(False)
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses], model


@complaint('KellerJordan/Muon#54', 'facebookresearch/moco#14')
def experts_without_tokens_stand_still(make):
    """Without decay, and each with a count of its own."""
    experts, losses = nn.ModuleList(nn.Linear(16, 4) for _ in range(3)), []
    optimizer = make(experts.named_parameters(), weight_decay=0.1)
    for batch, chosen in zip(batches(8), (0, 1, 0, 0, 2, 1, 0, 2)):
        losses.append(step(experts[chosen], optimizer, batch))
    return losses, experts


@complaint('Lightning-AI/pytorch-lightning#3323', 'Lightning-AI/pytorch-lightning#5152', 'pytorch/pytorch#50366')
def a_closure_skips_its_batch(make):
    model, data, losses = mlp(), list(batches(7)), []
    optimizer = make(model.named_parameters())

    def closure():
        optimizer.zero_grad()
        if len(losses) % 3 == 1:
            return None
        loss = loss_of(model, data[len(losses)])
        loss.backward()
        return loss
    for _ in data:
        loss = optimizer.step(closure)
        losses.append(-1.0 if loss is None else loss.item())
    return losses, model


@complaint('huggingface/pytorch-image-models#2532', 'Oneflow-Inc/libai#143')
def rates_decay_by_layer(make):
    model, losses = mlp(), []

    def made():
        return make([{'params': list(layer.named_parameters(str(i))), 'lr_scale': 0.75 ** (3 - i), 'weight_decay': 0.05 * (i == 3)}
                     for i, layer in enumerate(model) if i != 1])
    optimizer = made()
    for i, batch in enumerate(batches(8)):
        if i == 4:
            saved, source, optimizer = copy.deepcopy(optimizer.state_dict()), optimizer, made()
            make.take(optimizer, saved, source)
        for group in optimizer.param_groups:
            group['lr'] = 1e-2 / (1 + i) * group['lr_scale']
        losses.append(step(model, optimizer, batch))
    return losses, model


class Larc:
    """apex's wrapper, in short: a rate for each tensor within the gradient, and so no decay by the optimizer."""

    def __init__(self, optimizer):
        self.optim, self.param_groups = optimizer, optimizer.param_groups

    def __getattr__(self, name):
        return getattr(self.optim, name)

    def step(self):
        with torch.no_grad():
            decays = [group['weight_decay'] for group in self.optim.param_groups]
            for group, decay in zip(self.optim.param_groups, decays):
                group['weight_decay'] = 0
                for p in group['params']:
                    norm, slope = torch.norm(p.data), torch.norm(p.grad.data)
                    p.grad.data += decay * p.data
                    p.grad.data *= 0.02 * norm / (slope + norm * decay + 1e-8)
        self.optim.step()
        for group, decay in zip(self.optim.param_groups, decays):
            group['weight_decay'] = decay


@complaint('NVIDIA/apex#766', 'NVIDIA/apex#978')
def a_wrapper_has_rates_of_its_own(make):
    """And groups from before a load, which torch.optim has replaced; ours stay the same."""
    model = mlp()
    optimizer = Larc(make(model.named_parameters(), 'SGD', lr=0.5, momentum=0.9, weight_decay=0.01))
    losses = steps(model, optimizer, 3)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not make.is_ours:
        optimizer.param_groups = optimizer.optim.param_groups
    optimizer.param_groups[0]['lr'] = 0.1
    return [*losses, *steps(model, optimizer, 3), optimizer.optim.param_groups[0]['weight_decay']], model


@complaint('microsoft/rat-sql#45')
def groups_are_kept_beside_the_optimizer(make):
    model = mlp()
    optimizer = make([{'params': model[:3].named_parameters()}, {'params': model[3].named_parameters('3')}])
    head = optimizer.param_groups[1]
    head['lr'] = 1e-3
    losses = steps(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not make.is_ours:
        head = optimizer.param_groups[1]
    head['lr'] = 0.05
    return [*losses, *steps(model, optimizer, 2), optimizer.param_groups[1]['lr']], model


@complaint('pytorch/pytorch#38581')
def a_hook_masks_old_rows(make):
    model = mlp()
    model[3].weight.register_hook(lambda gradient: torch.cat([torch.zeros_like(gradient[:2]), gradient[2:]]))
    return steps(model, make(model.named_parameters(), weight_decay=0.1), 6), model


@complaint('ultralytics/ultralytics#21283', 'ultralytics/yolov5#262')
def a_model_is_halved_to_be_validated(make):
    """The program: parameters are other memory, with rounded values."""
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 3)
    model.half()
    with torch.no_grad():
        losses.append(loss_of(model, next(batches(1))).item())
    model.float()
    return losses + steps(model, optimizer, 3), model


@complaint('rasbt/LLMs-from-scratch#232')
def a_loop_moves_data_of_the_state(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 2)
    for entry in optimizer.state.values():
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.to('cpu')
                if value._grad is not None:
                    value._grad.data = value._grad.data.to('cpu')
    return losses + steps(model, optimizer, 2), model


@complaint('huggingface/trl#1593')
def a_reference_model_follows(make):
    """TR-DPO: a part of the trained model goes into the reference each few steps."""
    model, reference, losses = mlp(), mlp().requires_grad_(False), []
    reference.load_state_dict(model.state_dict())
    optimizer = make(model.named_parameters())
    for i, batch in enumerate(batches(7)):
        optimizer.zero_grad()
        margin = nn.functional.log_softmax(model(batch[0]), 1) - nn.functional.log_softmax(reference(batch[0]), 1)
        loss = -nn.functional.logsigmoid(margin.gather(1, batch[1][:, None])).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 2 == 1:
            for target, source in zip(reference.parameters(), model.parameters()):
                target.data.copy_(0.6 * source.data + 0.4 * target.data)
    return losses, nn.ModuleList([model, reference])


@complaint('ahmedfgad/TorchGA#5', 'ulissigroup/finetuna#2')
def an_ensemble_trains_in_threads(make):
    models = nn.ModuleList(mlp() for _ in range(4))
    optimizers = [make(model.named_parameters()) for model in models]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        losses = threads.map(steps, models, optimizers, [4] * 4, range(4))
        return [loss for each in losses for loss in each], models


# What the refusals say, of each kind.
REFUSED = {'rates_decay_by_layer': {'named': ["this optimizer is of job '.*'; give it name="]}}


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('program', complaint)
def test_as_torch_or_refused_by_name(program, kind, job, tmp_path):
    check(complaint[program], kind, job, tmp_path, REFUSED.get(program, {}).get(kind, []))
