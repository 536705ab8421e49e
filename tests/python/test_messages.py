"""What ranks tell each other before a step, and what it is compared for, and what a job's blob says; without ranks."""
import json
import math
import struct

import pytest
import torch

import ballast
from ballast.torch.agreement import agree
from ballast.torch.agreement.agree import Head, Said, difference
from ballast.torch.job import progress
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


def test_the_blob_of_a_job():
    """Earlier builds had a word of 64 bits for the steps alone, and all of its bits for a load that is under way."""
    said = progress.Progress()
    said.take([struct.pack('<Q', 7) + b'position'], 0)
    assert (said.steps, said.blob, said.origin, said.partly) == (7, b'position', 0, False)
    said.take([b'\xff' * 8], 0)
    assert (said.blob, said.origin, said.partly) == (b'', 0, True)
    said.origin = 0xfffffffe
    blobs = [b'', said.pack(3, b'x'), said.pack_under_way()]
    for rank, (steps, blob, partly) in {1: (3, b'x', False), 2: (2**32 - 1, b'', True)}.items():
        said.take(blobs, rank)
        assert (said.steps, said.blob, said.origin, said.partly) == (steps, blob, 0xfffffffe, partly)
        assert said.origins == {0xfffffffe}
    with pytest.raises(ballast.Error, match='4294967295 steps: a job counts at most 4294967294'):
        said.pack(2**32 - 1)
    said.take([], 0)
    assert (said.steps, said.blob, said.origin, said.origins, said.partly) == (0, b'', 0, {0}, False)
    assert [progress.origin_of(digest) for digest in (0, 5, 0xffffffff)] == [1, 5, 1]
