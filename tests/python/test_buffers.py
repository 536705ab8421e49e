"""Buffers of a model, which no server keeps: a resume names them."""
import warnings

import pytest
import torch
from torch import nn

import ballast.torch as bt


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer('table', torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize('knows', ['attach', 'overlap', 'parameters alone'])
def test_a_resume_names_the_buffers_that_begin_anew(knows, job, tmp_path):
    job = {**job, 'directory': tmp_path, 'nvme': '256MiB', 'resume': 'auto'}
    said = []
    for _ in range(2):
        model = Norms()
        optimizer = bt.AdamW(model.named_parameters(), **job, **({'overlap': model} if knows == 'overlap' else {}))
        if knows == 'attach':
            optimizer.attach(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            optimizer.resume()
        said.append([str(each.message) for each in caught if 'buffers' in str(each.message)])
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.close()
    assert said[0] == []
    if knows == 'parameters alone':
        assert said[1] == []
        return
    [text] = said[1]
    assert 'norm.running_mean, norm.running_var, norm.num_batches_tracked are as' in text and 'table' not in text
    assert 'strict=False' in text
