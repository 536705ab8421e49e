"""What a loop does around step() means what it means in torch."""
import copy
import re
import warnings

import pytest
import torch
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt


def pair(job, **arguments):
    arguments = {'lr': 1e-2, **arguments}
    return (lambda p: bt.AdamW(p, **arguments, **job)), (lambda p: torch.optim.AdamW(p, **arguments))


SCHEDULERS = {
    'lambda': lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    'one_cycle': lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=50),
    'cosine': lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
}


@pytest.mark.parametrize('scheduler', SCHEDULERS)
def test_schedulers(scheduler, job):
    def script(model, make):
        optimizer = make(model.parameters())
        schedule = SCHEDULERS[scheduler](optimizer)
        return train(model, optimizer, after_step=lambda i: schedule.step())
    assert_close(*both(script, *pair(job)))


def test_reduce_on_plateau(job):
    def script(model, make):
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        rates = []

        def after(i):
            schedule.step(1.0)
            rates.append(optimizer.param_groups[0]['lr'])
        return train(model, optimizer, steps=20, after_step=after) + rates
    assert_close(*both(script, *pair(job)))


def test_clip_grad_norm(job):
    def script(model, make):
        optimizer = make(model.parameters())
        return train(model, optimizer,
                     after_backward=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert_close(*both(script, *pair(job)))


def test_grad_scaler_with_an_inf(job):
    def script(model, make):
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler('cpu', init_scale=1024.0, growth_interval=10)
        losses = []
        for i, batch in enumerate(batches(30)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if i == 11:
                next(model.parameters()).grad.view(-1)[0] = float('inf')
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses + [scaler.get_scale()]
    assert_close(*both(script, *pair(job)))


def test_accumulation(job):
    def script(model, make):
        optimizer = make(model.parameters())
        losses = []
        for i, batch in enumerate(batches(40)):
            loss = loss_of(model, batch) / 4
            loss.backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    assert_close(*both(script, *pair(job)))


def test_groups_with_rates_of_their_own(job):
    def script(model, make):
        return train(model, make([{'params': model[0].parameters(), 'lr': 1e-3, 'weight_decay': 0.0},
                                  {'params': [*model[2].parameters(), *model[3].parameters()], 'betas': (0.8, 0.9)}]))
    assert_close(*both(script, *pair(job)))


def test_tensor_lr_and_edits_of_groups(job):
    def script(model, make):
        optimizer = make(model.parameters())
        optimizer.param_groups[0]['lr'] = torch.tensor(1e-2)

        def after(i):
            optimizer.param_groups[0]['lr'] = torch.tensor(1e-2 / (i + 2))
        return train(model, optimizer, after_step=after)
    assert_close(*both(script, *pair(job)))


def test_add_param_group_before_and_unfreezing_in_mid_run(job):
    def script(model, make):
        model[0].weight.requires_grad_(False)
        optimizer = make(model[0].parameters())
        optimizer.add_param_group({'params': [*model[2].parameters(), *model[3].parameters()], 'lr': 1e-3})

        def after(i):
            if i == 20:
                model[0].weight.requires_grad_(True)
        return train(model, optimizer, after_step=after)
    assert_close(*both(script, *pair(job)))


def test_add_param_group_in_mid_run(job):
    def script(model, make):
        optimizer = make(model[0].parameters())

        def after(i):
            if i == 10:
                optimizer.add_param_group({'params': [*model[2].parameters()], 'lr': 1e-3})
            if i == 20:
                optimizer.add_param_group({'params': [*model[3].parameters()], 'betas': (0.8, 0.9)})
        return train(model, optimizer, after_step=after)
    assert_close(*both(script, *pair(job)))


def test_a_job_has_room_for_sixteen_groups(job):
    ours, _ = pair(job)
    model = mlp()
    optimizer = ours(model[0].parameters())
    train(model, optimizer, steps=1)
    for _ in range(15):
        optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ballast.Error, match='room for 16 parameter groups'):
        optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(3))]})
    train(model, optimizer, steps=1)


def test_closure(job):
    def script(model, make):
        optimizer = make(model.parameters())
        losses = []
        for batch in batches(20):
            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss
            losses.append(optimizer.step(closure).item())
        return losses
    assert_close(*both(script, *pair(job)))


def test_gradients_that_are_none(job):
    """A tensor without a gradient is left alone, its step count and decay included."""
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            if i % 3 == 1:
                model[0].weight.grad = None
            if i % 7 == 2:
                optimizer.zero_grad()
        return train(model, optimizer, after_backward=after)
    assert_close(*both(script, *pair(job)))


def test_edits_of_gradients(job):
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            model[0].weight.grad *= 0.5
            model[3].weight.grad = model[3].weight.grad.t().contiguous().t()
        return train(model, optimizer, after_backward=after)
    assert_close(*both(script, *pair(job)))


def test_clamped_parameters_stay_clamped(job):
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            with torch.no_grad():
                model[0].weight.clamp_(-0.05, 0.05)
        return train(model, optimizer, after_step=after)
    assert_close(*both(script, *pair(job)))


def test_ema_swap(job):
    def script(model, make):
        optimizer = make(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model)

        def after(i):
            average.update_parameters(model)
            if i == 25:  # goes on from the average
                model.load_state_dict(average.module.state_dict())
        return train(model, optimizer, after_step=after)
    assert_close(*both(script, *pair(job)))


def skip(model, optimizer):
    optimizer.zero_grad()
    loss_of(model, next(batches(1))).backward()
    model[3].bias.grad[1] = float('nan')
    with pytest.warns(UserWarning, match='is not finite'):
        optimizer.step()
    assert optimizer.last_step_skipped


def test_an_edit_is_taken_back_before_a_step_took_it(job):
    def script(model, make):
        optimizer = make(model.parameters())
        losses = train(model, optimizer, steps=2)
        if isinstance(optimizer, bt.AdamW):  # torch's does not skip
            weight = model[0].weight.detach()
            kept = weight.clone()
            weight.mul_(3)
            skip(model, optimizer)
            weight.copy_(kept)
            losses += train(model, optimizer, steps=1)
            kept = weight.clone()
            for values in (kept * 2, kept):
                model[0].weight.data.copy_(values)
                optimizer.sync_from_params()
        else:
            losses += train(model, optimizer, steps=1)
        return losses + train(model, optimizer, steps=3)
    assert_close(*both(script, *pair(job)))


def test_an_edit_that_a_skipped_step_left_is_in_nobodys_way(job):
    def script(model, make):
        model[2].weight.requires_grad_(False)
        optimizer = make(model.parameters())
        losses = train(model, optimizer, steps=2)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        if isinstance(optimizer, bt.AdamW):
            skip(model, optimizer)
        model[2].weight.requires_grad_(True)
        return losses + train(model, optimizer, steps=3)
    assert_close(*both(script, *pair(job)))


def test_model_state_loaded_after_construction(job):
    other = mlp().state_dict()

    def script(model, make):
        optimizer = make(model.parameters())
        train(model, optimizer, steps=3)
        model.load_state_dict(copy.deepcopy(other))
        return train(model, optimizer)
    assert_close(*both(script, *pair(job)))


def durable(job, tmp_path):
    """With masters on the server: in memory alone a parameter is its own (test_own_masters.py)."""
    return {**job, 'directory': str(tmp_path / 'state'), 'nvme': '512MiB'}


def wide():
    """A model with a tensor that is sampled."""
    return nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))


def test_writes_through_data_to_rows_that_are_short_count(job, tmp_path):
    """Tokens of an embedding, and single elements of a matrix with short rows and of a long vector."""
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.bias, self.rest = nn.Embedding(4000, 16), nn.Parameter(torch.zeros(6000)), mlp()

        def forward(self, x):
            return self.rest(x + self.tokens.weight[:32] + self.tokens.weight[32:].mean() + self.bias.mean())

    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            model.tokens.weight.data[100 + 97 * i] = 0.5
            model.tokens.weight.data[1000 + 89 * i, i] = 3.0
            model.bias.data[500 * i] = 2.0
        return train(model, optimizer, steps=12, after_step=after)
    assert_close(*both(script, *pair(durable(job, tmp_path)), make_model=Tokens))


def write_to_one_element(sync):
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            if i == 5:
                model[2].weight.data[500, 7] = 3.0
                if sync:
                    getattr(optimizer, 'sync_from_params', lambda: None)()
        return train(model, optimizer, steps=10, after_step=after)
    return script


def test_a_write_to_one_element_through_data_needs_a_word(job, tmp_path):
    assert_close(*both(write_to_one_element(sync=True), *pair(durable(job, tmp_path)), make_model=wide))


def test_debug_finds_a_write_to_one_element_through_data(job, tmp_path):
    ours, theirs = pair({**durable(job, tmp_path), 'debug': True})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert_close(*both(write_to_one_element(sync=False), ours, theirs, make_model=wide))
    for each in caught:  # none where the sample has the element
        assert re.search("parameter 'group0.2.*' was written to by .data.* in so few elements", str(each.message))
        assert each.filename.endswith('scripts.py'), 'the line of the script'


def test_an_edit_of_bf16_keeps_the_master_bits_of_what_was_not_edited(job):
    model = mlp().bfloat16()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=3)
    before = torch.empty(model[0].weight.numel())
    optimizer.job.opened.session.read('0.weight', 'master', before)
    with torch.no_grad():
        model[0].weight[0, 0] = 3.0
    optimizer.sync_from_params()
    optimizer.job.opened.session.commit_values()
    after = torch.empty_like(before)
    optimizer.job.opened.session.read('0.weight', 'master', after)
    assert after[0] == 3.0
    assert torch.equal(after[1:], before[1:])


def test_overflow_skips_and_says_where(job):
    model = mlp()
    optimizer = bt.AdamW(model.named_parameters(), lr=1e-2, **job)
    train(model, optimizer, steps=2)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, next(batches(1))).backward()
    model[3].bias.grad[1] = float('nan')
    with pytest.warns(UserWarning, match="gradient of '3.bias' is not finite: the step was skipped"):
        optimizer.step()
    assert optimizer.last_step_skipped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    train(model, optimizer, steps=1)
    assert not optimizer.last_step_skipped


def test_nothing_happens_without_gradients(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_grad_norm_is_of_the_gradients_as_taken(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    loss_of(model, next(batches(1))).backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-6)


def test_versions_of_parameters_move(job):
    """As with torch's own: autograd must see that a parameter changed between forward and backward."""
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)
    x, y = next(batches(1))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


def test_versions_of_parameters_without_gradients_stay(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)
    loss_of(model, next(batches(1))).backward()
    model[0].weight.grad = None
    before = [parameter._version for parameter in model.parameters()]
    optimizer.step()
    moved = [parameter._version - version for parameter, version in zip(model.parameters(), before)]
    assert moved == [0] + [1] * (len(before) - 1)


@pytest.mark.parametrize('flag', ['differentiable', 'capturable'])
def test_refused_flags(flag, job):
    with pytest.raises(ballast.Error, match=flag):
        bt.AdamW(mlp().parameters(), **{flag: True}, **job)


def test_refused_tensors(job):
    with pytest.raises(ballast.Error, match='complex'):
        optimizer = bt.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], **job)
        optimizer.job.open()
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = bt.AdamW(embedding.named_parameters(), **job)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ballast.Error, match="'weight' has a sparse gradient"):
        optimizer.step()


def test_an_existing_job_is_an_error_that_names_the_three(job):
    model = mlp()
    first = bt.AdamW(model.parameters(), **job)
    train(model, first, steps=1)
    with pytest.raises(ballast.Error, match=r"never.*another job name, or drop the old job.*auto.*must: its weights then replace "
                                            "this model's") as raised:
        train(model, bt.AdamW(model.parameters(), **job), steps=1)
    assert raised.value.reason == 'JOB_EXISTS'


def test_no_warnings_in_a_plain_run(job):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = mlp()
        optimizer = bt.AdamW(model.parameters(), **job)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        train(model, optimizer, steps=3, after_step=lambda i: schedule.step())


def test_max_norm_clips_within_the_update(job):
    def script(model, make):
        optimizer = make(model.parameters())
        clip = (lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.1)) if isinstance(optimizer, torch.optim.AdamW) else None
        return train(model, optimizer, after_backward=clip)
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, max_norm=0.1, **job), lambda p: torch.optim.AdamW(p, lr=1e-2)))


def test_parameters_are_known_by_themselves_not_by_their_place(job):
    """Reordered between steps, they keep their moments."""
    def script(model, make):
        optimizer = make(model.parameters())

        def after(i):
            if i == 5:
                optimizer.param_groups[0]['params'].reverse()
        return train(model, optimizer, steps=15, after_step=after)
    assert_close(*both(script, *pair(job)))


def test_what_a_job_cannot_change_is_refused(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)
    with pytest.raises(ballast.Error, match='group 1 has amsgrad=True'):
        optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(3))], 'amsgrad': True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]['amsgrad'] = True
    with pytest.raises(ballast.Error, match='group 0 has amsgrad=True'):
        train(model, optimizer, steps=1)
    optimizer.param_groups[0]['amsgrad'] = False
    train(model, optimizer, steps=1)
    with pytest.raises(ballast.Error, match='one nesterov for all groups'):
        bt.SGD([{'params': [nn.Parameter(torch.zeros(3))], 'nesterov': True, 'momentum': 0.9},
                {'params': [nn.Parameter(torch.zeros(3))], 'momentum': 0.9}], **{**job, 'name': job['name'] + 'b'}).resume()


def test_a_refused_step_leaves_the_next_one_alone(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)
    optimizer.param_groups[0]['lr'] = float('nan')
    with pytest.raises(ballast.Error):
        train(model, optimizer, steps=1)
    optimizer.param_groups[0]['lr'] = 1e-3
    train(model, optimizer, steps=1)
    assert optimizer.stats()['steps'] == 2


def test_a_closed_optimizer_says_so(job):
    model = mlp()
    optimizer = bt.AdamW(model.parameters(), **job)
    train(model, optimizer, steps=1)
    optimizer.close()
    with pytest.raises(ballast.Error, match='closed'):
        train(model, optimizer, steps=1)


def test_the_older_of_two_optimizers_takes_nothing_with_it(job):
    model = mlp()
    first = bt.AdamW(model.parameters(), **job)
    train(model, first, steps=1)
    second = bt.AdamW(model.parameters(), resume='auto', **job)
    train(model, second, steps=1)
    first.close()
    train(model, second, steps=1)
