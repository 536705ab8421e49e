"""Masters that servers keep as what the bf16 parameters lack: nothing that a trainer sees differs but the bytes on the servers."""
import pytest
import torch
from conftest import two_state_servers
from torch import nn

import ballast
import ballast.torch as bt


def model(dtype=torch.bfloat16):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4096, 2048), nn.Tanh(), nn.Linear(2048, 4096)).to(dtype)


def train(servers, **more):
    """Losses, parameters and full state after some steps, by servers whose DRAM does not hold all state."""
    of = model()
    optimizer = bt.AdamW(of.named_parameters(), lr=1e-2, weight_decay=0.1, servers=servers, durability='none', **more)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        batch = torch.randn(4, 4096, dtype=torch.bfloat16)
        loss = (of(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    state = optimizer.full_state_dict()
    optimizer.close()
    return losses, [p.detach().clone() for p in of.parameters()], state


def test_training_has_the_bits_of_an_fp32_master(tmp_path):
    results = []
    for master in ('f32', 'remainder'):
        folder = tmp_path / master
        folder.mkdir()
        with two_state_servers(folder) as servers:
            results.append(train(servers, name=master, master=master))
    (losses, parameters, state), (other_losses, other_parameters, other_state) = results
    assert all(map(torch.equal, losses, other_losses))
    assert all(map(torch.equal, parameters, other_parameters))
    assert state['state'].keys() == other_state['state'].keys()
    for index, entry in state['state'].items():
        assert 'master' in entry
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other_state['state'][index][key])), (index, key)
    assert not torch.equal(state['state'][0]['master'], state['state'][0]['master'].bfloat16().float())


def test_what_cannot_be_honoured_is_refused_by_name(two_servers, job):
    def step(dtype=torch.bfloat16, **more):
        of = model(dtype)[0:1]
        optimizer = bt.AdamW(of.named_parameters(), master='remainder', name=job['name'], **more)
        of(torch.ones(1, 4096, dtype=dtype)).sum().backward()
        optimizer.step()

    with pytest.raises(ballast.Error, match='needs bf16 working parameters'):
        step(torch.float32, servers=two_servers, durability='none')
    with pytest.raises(ballast.Error, match='expected durability none, got DURABILITY_STEP'):
        step(servers=two_servers)
    with pytest.raises(ballast.Error, match='keeps no working copies'):
        step(dram='256MiB', threads=2)


def test_an_estimate_counts_two_bytes_less():
    of = model()
    tiers = [dict(ballast.estimate(of, servers=1, dram='100MiB', nvme='8GiB', durability='none', master=master).tiers)
             for master in ('f32', 'remainder')]
    parameters = sum(p.numel() for p in of.parameters())
    less = sum(tiers[0].values()) - sum(tiers[1].values())
    assert 1.8 * parameters < less < 2 * parameters
