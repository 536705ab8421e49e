"""torch.compile around what an optimizer does, and what was made within torch.inference_mode."""
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import ballast
import ballast.torch as bt


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def trained(compiled, compiles, optimizer_of):
    """Parameters after twelve steps of a loop of which one part is given to `compiles`."""
    def part(name, function):
        return compiles(function) if name == compiled else function

    net, x = mlp(), torch.linspace(-1, 1, 32).reshape(4, 8)
    forward = part('forward', lambda x: net(x))
    forward(x)  # compiled before there is an optimizer
    optimizer = optimizer_of(net)

    def backward():
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        return loss

    step = part('step, the method', part('step, within a lambda', lambda: optimizer.step()) if 'lambda' in compiled else optimizer.step)

    def plain():
        backward()
        step()

    loop = part('closure', lambda: optimizer.step(backward)) if compiled == 'closure' else part('loop', plain)
    for _ in range(12):
        loop()
    optimizer.wait()
    found = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize('overlap', [False, True], ids=['', 'overlap'])
@pytest.mark.parametrize('compiled', ['step, the method', 'step, within a lambda', 'closure', 'loop', 'forward'])
def test_compiled(compiled, overlap, job):
    torch.compiler.reset()
    counter = CompileCounter()
    expected = trained('nothing', None, lambda net: bt.AdamW(net.named_parameters(), lr=1e-2, **job))
    came = trained(compiled, lambda function: torch.compile(function, backend=counter), lambda net: bt.AdamW(
        net.named_parameters(), lr=1e-2, **{**job, 'name': f'{job["name"]}-compiled'}, overlap=net if overlap else None))
    assert all(map(torch.equal, expected, came))
    assert counter.frame_count <= 12, 'compiled at each step anew'


def test_a_whole_graph_is_refused_by_torch(job):
    net = mlp()
    optimizer = bt.AdamW(net.named_parameters(), **job)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda: optimizer.step(), backend='eager', fullgraph=True)()


def test_a_parameter_of_inference_mode_is_refused_by_name(job):
    with torch.inference_mode():
        net = mlp()
    net[0].weight.grad = torch.ones(8, 8)
    with pytest.raises(ballast.Error, match=r"'0.weight' was made within torch.inference_mode\(\)"):
        bt.AdamW(net.named_parameters(), **job).step()


def test_gradients_of_inference_mode(job):
    found = []
    for name, more in (('plain', {}), ('overlapped', {'overlap': True})):
        net = mlp()
        optimizer = bt.AdamW(net.named_parameters(), **{**job, 'name': f'{job["name"]}-{name}'}, **({'overlap': net} if more else {}))
        for _ in range(2):
            with torch.inference_mode():
                for parameter in net.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        optimizer.wait()
        found.append([parameter.detach().clone() for parameter in net.parameters()])
        optimizer.close()
    assert all(map(torch.equal, *found))
