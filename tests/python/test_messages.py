"""What ranks tell each other before a step, and what it is compared for; without ranks."""
import json
import math

import torch

from ballast.torch.agreement import agree
from ballast.torch.agreement.agree import Head, Said, difference
from ballast.torch.tensors.sketch import sketch


def test_a_message_is_read_as_it_was_written():
    orders = json.dumps([[[0, 1], 2, 77]]).encode()
    message = agree._HEAD.pack(1, True, 5, False, len(orders)) + orders + agree._ENTRY.pack(3, 9) + agree._ENTRY.pack(0, 0)
    assert Said.of(message) == (Head(1, True, 5, False, len(orders)), [[[0, 1], 2, 77]], [(3, 9), (0, 0)])


def sketches(*gradients):
    return {2 * rank: sketch(gradient) for rank, gradient in enumerate(gradients)}


def test_a_difference_of_gradients_is_told_with_the_ranks():
    ones = torch.ones(100)
    nan = torch.where(torch.arange(100) == 7, math.nan, ones)
    assert difference(sketches(ones, ones * (1 + 1e-6))) is None
    assert difference(sketches(ones, ones, 2 * ones)) == 'different gradients on rank 4 and on rank 0'
    assert difference(sketches(ones, nan)) == 'an Inf or a NaN in its gradient on rank 2 and none on rank 0'
    assert difference(sketches(nan, ones)) == 'an Inf or a NaN in its gradient on rank 0 and none on rank 2'
