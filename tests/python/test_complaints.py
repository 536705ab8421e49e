"""Programs of users that save, load, copy and write an optimizer's state."""
import collections
import copy
import io

import pytest
import torch
from complaints import KINDS, Complaints, check, step, steps
from scripts import batches, loss_of, mlp
from torch import nn

import ballast

complaint = Complaints()


@complaint('pytorch/pytorch#2830', 'pytorch/pytorch#41839')
def state_is_moved_to_a_device(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 3)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    saved = torch.load(file, map_location='cpu')
    losses += steps(model, optimizer, 2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if torch.is_tensor(value):
                entry[key] = value.to('cpu')
    return losses + steps(model, optimizer, 3), model


@complaint('pytorch/pytorch#196083')
def a_state_of_another_is_not_shared(make):
    first, second = mlp(), mlp()
    optimizers = [make(each.named_parameters()) for each in (first, second)]
    losses = steps(first, optimizers[0], 3)
    second.load_state_dict(first.state_dict())
    make.take(optimizers[1], copy.deepcopy(optimizers[0].state_dict()), optimizers[0])
    return losses + steps(second, optimizers[1], 4, seed=9) + steps(first, optimizers[0], 4, seed=11), nn.ModuleList([first, second])


@complaint('davidtvs/pytorch-lr-finder#11', 'Lightning-AI/pytorch-lightning#6675')
def a_search_for_a_rate_leaves_nothing_behind(make):
    model = mlp()
    optimizer = make(model.named_parameters(), lr=1e-5)
    before, losses = copy.deepcopy((model.state_dict(), optimizer.state_dict())), []
    for _ in range(2):
        for i, batch in enumerate(batches(6)):
            optimizer.param_groups[0]['lr'] = 1e-5 * 4**i
            losses.append(step(model, optimizer, batch))
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        losses.append(optimizer.param_groups[0]['lr'])
    return losses + steps(model, optimizer, 3), model


@complaint('pytorch/pytorch#37410')
def moments_are_reset(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 3)
    optimizer.state = collections.defaultdict(dict)
    losses += steps(model, optimizer, 2)
    optimizer.__setstate__({'state': collections.defaultdict(dict)})
    losses += steps(model, optimizer, 2)
    for parameter in model[3].parameters():
        optimizer.state.pop(parameter, None)
    return losses + steps(model, optimizer, 2), model


@complaint('pytorch/pytorch#37410')
def moments_of_two_tasks_take_turns(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses, kept = [], [{}, {}]
    for turn in (0, 1, 0, 1):
        optimizer.state = collections.defaultdict(dict, kept[turn])
        losses += steps(model, optimizer, 2, seed=turn)
        kept[turn] = dict(optimizer.state)
    return losses, model


@complaint('ContinualAI/avalanche#725')
def a_head_grows_and_the_optimizer_is_reset(make):
    model = mlp()
    optimizer = make(model.parameters())
    losses = steps(model, optimizer, 3)
    old, model[3] = model[3], nn.Linear(64, 6)
    with torch.no_grad():
        for mine, theirs in zip(model[3].parameters(), old.parameters()):
            mine[:4] = theirs
    optimizer.state = collections.defaultdict(dict)
    optimizer.param_groups[0]['params'] = list(model.parameters())
    return losses + steps(model, optimizer, 3), model


@complaint('openvdb/fvdb-reality-capture#84', 'graphdeco-inria/gaussian-splatting: scene/gaussian_model.py')
def parameters_are_pruned_with_their_moments(make):
    model = nn.ParameterDict({'xyz': torch.linspace(-2, 2, 120).reshape(40, 3), 'opacity': torch.linspace(-1, 1, 40)[:, None]})
    optimizer = make([{'params': [parameter], 'lr': 0.01, 'name': name} for name, parameter in model.items()], 'Adam', lr=0.0, eps=1e-15)
    losses = []
    for turn in range(4):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss = (model['xyz'].square().sum(1, keepdim=True) * model['opacity'].sigmoid()).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        stays = torch.arange(len(model['xyz'])) % 4 != turn
        for group in optimizer.param_groups:
            old = group['params'][0]
            entry = optimizer.state[old]
            del optimizer.state[old]
            for key, value in entry.items():
                if key != 'step':
                    entry[key] = value[stays]
            model[group['name']] = group['params'][0] = nn.Parameter(old[stays].detach())
            optimizer.state[model[group['name']]] = entry
    return losses, model


@complaint('Guitaricet/relora: peft_pretraining/training_utils.py')
def moments_are_pruned(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 3)
    for parameter in model.parameters():
        for key in ('exp_avg', 'exp_avg_sq'):
            try:
                optimizer.state[parameter][key].mul_(0.1)
            except ballast.Error as error:
                make.refused.append(str(error))
                optimizer.state[parameter] = {**optimizer.state[parameter], key: optimizer.state[parameter][key] * 0.1}
    return losses + steps(model, optimizer, 3), model


@complaint('the tutorial "How to save memory by fusing the optimizer step into the backward pass"')
def an_optimizer_for_each_parameter_steps_in_backward(make):
    model, losses = mlp(), []
    optimizers = {parameter: make([named]) for named in model.named_parameters() for parameter in named[1:]}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for batch in batches(5):
        losses.append(loss_of(model, batch))
        losses[-1].backward()
    return [loss.item() for loss in losses], model


@complaint('pytorch/pytorch#60265', 'real-stanford/universal_manipulation_interface#70')
def a_schedule_is_made_anew_from_its_epoch(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    schedule, losses = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), []
    for batch in batches(5):
        losses.append(step(model, optimizer, batch))
        schedule.step()
    saved = copy.deepcopy(optimizer.state_dict())
    again = make(model.named_parameters())
    make.take(again, saved, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(again, 20, last_epoch=5)
    for batch in batches(5, 9):
        losses += [again.param_groups[0]['lr'], step(model, again, batch)]
        schedule.step()
    return losses, model


@complaint('pytorch/pytorch: torch.optim.lr_scheduler.OneCycleLR, cycle_momentum')
def momentum_follows_a_cycle(make):
    model = mlp()
    optimizer, losses = make(model.named_parameters(), 'Adam'), []
    schedule, data = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12), list(batches(12))
    for i, batch in enumerate([*data[:8], *data[5:]]):
        if i == 5:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
        if i == 8:
            for each, state in zip((model, optimizer, schedule), saved):
                each.load_state_dict(state)
        losses += [step(model, optimizer, batch), *optimizer.param_groups[0]['betas']]
        schedule.step()
    return losses, model


@complaint('facebookresearch/GloRe#8', 'Lightning-AI/pytorch-lightning#6891')
def a_state_of_other_groups_is_refused(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 2)
    state = optimizer.full_state_dict() if make.is_ours else optimizer.state_dict()
    named = list(model.named_parameters())
    for params, words in (([{'params': named[:2]}, {'params': named[2:]}], 'has a different number of parameter groups'),
                          (named[:3], "contains a parameter group that doesn't match the size of optimizer's group")):
        other = make(params)
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(state)
    return losses + steps(model, optimizer, 2), model


@complaint('Lightning-AI/pytorch-lightning#8502', 'technicolor-research/dsve-loc#16')
def layers_thaw_into_groups_of_their_own(make):
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    optimizer = make([(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad])
    losses = steps(model, optimizer, 2)
    for i, rate in ((2, 1e-3), (0, 1e-4)):
        model[i].requires_grad_(True)
        optimizer.add_param_group({'params': list(model[i].named_parameters(str(i))), 'lr': rate})
        losses += steps(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model[3].requires_grad_(False)
    return losses + steps(model, optimizer, 2), model


@complaint('PKU-YuanGroup/Open-Sora-Plan#186', 'harubaru/waifu-diffusion#31', 'huggingface/diffusers#2321')
def an_average_is_swapped_in_and_once_stays(make):
    model, losses = mlp(), []
    optimizer = make(model.named_parameters())
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for i, batch in enumerate(batches(8)):
        losses.append(step(model, optimizer, batch))
        for mean, parameter in zip(average, model.parameters()):
            mean.sub_(0.1 * (mean - parameter.detach()))
        if i % 3 == 2:
            own = [parameter.detach().clone() for parameter in model.parameters()]
            for mean, parameter in zip(average, model.parameters()):
                parameter.data.copy_(mean)
            losses.append(loss_of(model, batch).item())
            optimizer.state_dict()
            for mine, parameter in zip(own if i == 2 else [], model.parameters()):
                parameter.data.copy_(mine)
    return losses, model


@complaint('Population-based training, as ray-project/ray has it')
def the_best_of_a_population_is_copied(make):
    models = nn.ModuleList([mlp(), mlp()])
    optimizers, losses = [make(model.named_parameters(), lr=rate) for model, rate in zip(models, (1e-2, 1e-3))], []
    for turn in range(2):
        losses += [loss for model, optimizer in zip(models, optimizers) for loss in steps(model, optimizer, 2, seed=turn)]
        models[1].load_state_dict(models[0].state_dict())
        make.take(optimizers[1], copy.deepcopy(optimizers[0].state_dict()), optimizers[0])
        optimizers[1].param_groups[0]['lr'] *= 1.2
    return losses, models


@complaint('DLR-RM/stable-baselines3#735', 'DLR-RM/stable-baselines3#1336')
def a_rate_is_changed_in_the_state(make):
    model = mlp()
    optimizer, losses = make(model.named_parameters()), []
    for change in ({'lr': 5e-4}, {'lr': 1e-3, 'betas': [0.8, 0.99], 'weight_decay': 0.0}):
        losses += steps(model, optimizer, 2)
        state = optimizer.state_dict()
        state['param_groups'][0].update(change)
        optimizer.load_state_dict(state)
        losses.append(optimizer.param_groups[0]['lr'])
    return losses + steps(model, optimizer, 2), model


@complaint('ultralytics/ultralytics#19268', 'analysiscenter/batchflow#772')
def a_trainer_is_copied_whole(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    losses = steps(model, optimizer, 2)
    for take in (copy.deepcopy, lambda trainer: torch.save(trainer, io.BytesIO())):
        try:
            take({'model': model, 'optimizer': optimizer})
        except ballast.Error as error:
            make.refused.append(str(error))
    twin = copy.deepcopy(model)
    other = make(twin.named_parameters())
    make.take(other, copy.deepcopy(optimizer.state_dict()), optimizer)
    return losses + steps(twin, other, 2), twin


# What the refusals say, of each kind.
COPIED, NAMED = 'cannot be copied or pickled. Copy or save its state_dict', "this optimizer is of job '.*'; give it name="
REFUSED = {
    'a_state_of_another_is_not_shared': {'named': [NAMED]},
    'the_best_of_a_population_is_copied': {'named': [NAMED] * 2},
    'a_schedule_is_made_anew_from_its_epoch': {'named': [NAMED]},
    'a_trainer_is_copied_whole': {'moments': [COPIED] * 2, 'named': [COPIED] * 2 + [NAMED], 'moments of a durable job': [COPIED] * 2},
    'moments_are_pruned': {kind: [r'write optimizer.state\[p\] = \{\*\*optimizer.state\[p\]'] * 12 for kind in KINDS},
}


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('program', complaint)
def test_as_torch_or_refused_by_name(program, kind, job, tmp_path):
    check(complaint[program], kind, job, tmp_path, REFUSED.get(program, {}).get(kind, []))
