"""Parameters and gradients that servers reach by way of the host's memory. Where there is no GPU the same code runs on the CPU,
with copies that nobody would need there, and without streams."""
import copy
import threading

import pytest
import torch
from scripts import assert_close, batches, both, loss_of, mlp, train
from torch import nn

import ballast
import ballast.torch as bt
from ballast.torch.tensors import host_memory, memory


@pytest.fixture(params=['copied', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU'))])
def device(request, monkeypatch):
    if request.param == 'cuda':
        return torch.device('cuda')
    monkeypatch.setattr(memory, 'is_elsewhere', lambda tensor: True)
    return torch.device('cpu')


def of(model, job, **more):
    return bt.AdamW(model.named_parameters(), **{'lr': 1e-2, **job, **more})


@pytest.mark.parametrize('over_servers', [False, True])
@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_trains_as_without_copies(device, dtype, overlap, over_servers, job, request):
    """To the last bit, on the same device's gradients: a twin's, which are moved to the CPU."""
    model = mlp().to(device, dtype)
    twin = copy.deepcopy(model).to('cpu')
    more = {'servers': request.getfixturevalue('two_servers')} if over_servers else {}
    if over_servers:
        job = {'name': job['name']}
    mine = of(model, job, overlap=model if overlap else None, push_early=over_servers, **more)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(memory, 'is_elsewhere', host_memory.is_elsewhere)
        theirs = of(twin, {**job, 'name': job['name'] + '-twin'}, **more)
    for batch in batches(20):
        mine.zero_grad()
        loss_of(model, batch).backward()
        for a, b in zip(model.parameters(), twin.parameters()):
            b.grad = a.grad.cpu()
        mine.step()
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(memory, 'is_elsewhere', host_memory.is_elsewhere)
            theirs.step()
    mine.wait()
    for a, b in zip(model.parameters(), twin.parameters()):
        assert torch.equal(a.cpu(), b)


def test_as_torch(device, job):
    def script(model, make):
        optimizer = make(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=10)
        losses = []
        for i, batch in enumerate(batches(30)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if i == 10:
                model[0].weight.grad[0, 0] = float('inf')
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.item())
        return losses
    assert_close(*both(script, lambda p: bt.AdamW(p, lr=1e-2, **job), lambda p: torch.optim.AdamW(p, lr=1e-2),
                       make_model=lambda: mlp().to(device)))


def test_what_has_no_gradient_stays(device, job):
    """Also where it was edited since the host had it."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).to(device)
    optimizer = of(model, job)
    for linear in model:
        linear(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model[1].weight.mul_(3)
    kept = [parameter.detach().clone() for parameter in model[1].parameters()]
    before = model[0].weight.detach().clone()
    model[0](torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert all(torch.equal(now, then) for now, then in zip(model[1].parameters(), kept))
    model[1](torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()  # its master is what it was edited to
    assert (model[1].weight - kept[0]).abs().max() < 0.05


def test_a_step_after_load_state_dict_without_gradients(device, job):
    """Masters become the parameters, and the host's copies of them are older."""
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)).to(device)
    optimizer = of(model, job)
    sum(linear(torch.ones(2, 8, device=device)).sum() for linear in model).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.full_state_dict())
    with torch.no_grad():
        model[1].weight.fill_(0.5)
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    model[0](torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    assert bool((model[1].weight == 0.5).all())


def test_resumed_and_rolled_back(device, job, two_servers):
    job = {'name': job['name'], 'servers': two_servers}
    model = mlp().to(device)
    optimizer = of(model, job)
    train(model, optimizer, steps=3)
    kept = optimizer.state_dict()
    at_three = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, steps=2)
    at_five = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.close()

    again = mlp().to(device)
    optimizer = of(again, job, resume='must')
    assert optimizer.resume().step == 5
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), at_five))
    optimizer.load_state_dict(kept)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), at_three))
    assert all(parameter.device.type == device.type for parameter in again.parameters())
    optimizer.close()


def test_state_goes_to_torch_and_back(device, job):
    model = mlp().to(device)
    optimizer = of(model, job)
    train(model, optimizer, steps=5)
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.full_state_dict())
    train(model, optimizer, steps=5)
    train(twin, theirs, steps=5)
    optimizer.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for a, b in zip(model.parameters(), twin.parameters()):
            a.copy_(b)
    train(model, optimizer, steps=5)
    train(twin, theirs, steps=5)
    for a, b in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_edit_through_data_counts(device, job):
    model = mlp().to(device)
    optimizer = of(model, job)
    train(model, optimizer, steps=2)
    model[0].weight.data.fill_(0.25)
    model[0].weight.grad.zero_()
    optimizer.step()
    assert (model[0].weight - 0.25).abs().max() < 0.05


def test_a_skipped_step_changes_nothing(device, job):
    model = mlp().to(device)
    optimizer = of(model, job)
    train(model, optimizer, steps=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model[0].weight.grad[0, 0] = float('nan')
    with pytest.warns(UserWarning, match="'0.weight' is not finite"):
        optimizer.step()
    assert optimizer.last_step_skipped
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def test_an_edit_outlives_a_skipped_step(device, job):
    model = mlp().to(device)
    optimizer = of(model, job)
    train(model, optimizer, steps=2)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    model[0].weight.grad[0, 0] = float('inf')
    with pytest.warns(UserWarning, match='not finite'):
        optimizer.step()
    assert bool((model[0].weight == 0.25).all())
    model[0].weight.grad.zero_()
    optimizer.step()
    assert (model[0].weight - 0.25).abs().max() < 0.05


def test_another_thread_may_look_amid_a_step(device, job, two_servers):
    """Who holds the session may want the interpreter's lock, and the other way round."""
    model = mlp().to(device)
    optimizer = of(model, {'name': job['name']}, servers=two_servers)
    train(model, optimizer, steps=1)
    done = threading.Event()

    def look():
        while not done.is_set():
            assert optimizer.job.opened.session.version >= 0

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    train(model, optimizer, steps=30)
    done.set()
    looking.join(30)
    assert not looking.is_alive()


def test_a_transposed_parameter(device, job):
    model = mlp().to(device)
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    assert not model[0].weight.is_contiguous()
    twin = copy.deepcopy(model)
    ours = train(model, of(model, job), steps=10)
    theirs = train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), steps=10)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_places_are_kept_and_apart(monkeypatch):
    monkeypatch.setattr(host_memory, '_SLAB_BYTES', 4096)
    host = host_memory.HostMemory()
    shapes = [(3,), (0,), (31, 7), (1000,), (), (2000,), (5,), (500,)]
    likes = [torch.zeros(shape, dtype=torch.bfloat16 if i % 2 else torch.float32) for i, shape in enumerate(shapes)]
    places = [host.place(i, like) for i, like in enumerate(likes)]
    for i, (place, like) in enumerate(zip(places, likes)):
        assert place.shape == like.shape and place.dtype == like.dtype and place.is_contiguous()
        assert place.data_ptr() % 64 == 0
        place.fill_(i + 1)
    assert all(bool((place == i + 1).all()) for i, place in enumerate(places))
    assert all(host.place(i, like).data_ptr() == place.data_ptr() for i, (place, like) in enumerate(zip(places, likes)))
    assert host.place(0, likes[0].bfloat16()).dtype == torch.bfloat16  # a gradient's dtype may change


def test_other_devices_are_refused(job):
    model = nn.Linear(2, 2).to('meta')
    optimizer = bt.AdamW(model.parameters(), **job)
    model.weight.grad = torch.empty_like(model.weight)
    with pytest.raises(ballast.Error, match="is on meta; expected the CPU, or a GPU"):
        optimizer.step()
