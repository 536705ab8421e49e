"""The part of a tensor that the package takes a DTensor for, against the elements that torch gave it: on process groups that are none, so
that one process sees every rank's."""
import logging
import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ballast import Error
from ballast.torch.tensors import placement

ROUNDS = 1000 if os.environ.get('TEST_ROUNDS') == 'full' else 150
NAMES = ('rep', 'dp', 'ep', 'tp')


def chunk_of(tensor, mesh, placements):
    """This rank's part, as distribute_tensor would send it."""
    for axis, each in enumerate(placements):
        if isinstance(each, Shard):
            parts = [*torch.chunk(tensor, mesh.size(axis), each.dim), *[tensor.narrow(each.dim, 0, 0)] * mesh.size(axis)]
            tensor = parts[mesh.get_local_rank(axis)]
    return tensor.contiguous()


def random_case(rng):
    names = [name for name in NAMES if rng.random() < 0.6] or ['dp']
    if 'rep' in names and 'dp' not in names:
        names.append('dp')
    names.sort(key=NAMES.index)
    sizes = [rng.choice([1, 2, 2, 3]) for _ in names]
    shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
    parallel = {name: Shard(rng.randrange(len(shape))) if rng.random() < 0.8 else Replicate() for name in names if name in ('ep', 'tp')}
    return names, sizes, shape, parallel


def held(names, sizes, shape, parallel, rank):
    """This rank's parameter of a model that is parallel first and sharded by fully_shard then; None where it is a plain tensor."""
    dist.init_process_group('fake', store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        mesh = init_device_mesh('cpu', tuple(sizes), mesh_dim_names=tuple(names))
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        module = nn.Module()
        axes = tuple(name for name in names if name in parallel)
        if axes:
            inner = mesh[axes]
            placements = [parallel[name] for name in axes]
            local = chunk_of(whole, inner, placements)
            module.w = nn.Parameter(DTensor.from_local(local, inner, placements, run_check=False, shape=whole.shape, stride=whole.stride()))
        else:
            module.w = nn.Parameter(whole)
        module.forward = lambda x: x
        data = tuple(name for name in names if name in ('rep', 'dp'))
        if data:
            fully_shard(module, mesh=mesh[data])
        parameter = module.w
        if not isinstance(parameter, DTensor):
            return None
        key = placement.key_of('w', parameter)
        placement.check('w', parameter, key, rank)
        return key, parameter.to_local().detach().reshape(-1), chunk_of_dcp(parameter), is_refused(parameter)
    finally:
        dist.destroy_process_group()


def chunk_of_dcp(parameter):
    """The box that Distributed Checkpoint writes this rank's part to; None: it has no elements."""
    # torch keeps meshes that it has joined, with the place of the rank that this process was first.
    mesh = DeviceMesh('cpu', parameter.device_mesh.mesh.clone())
    chunk = DTensor.from_local(parameter.to_local(), mesh, parameter.placements, run_check=False, shape=parameter.shape,
                               stride=parameter.stride()).__create_chunk_list__()[0]
    return None if 0 in chunk.sizes else tuple((first, first + size) for first, size in zip(chunk.offsets, chunk.sizes))


def is_refused(parameter):
    try:
        placement.check_torchs('w', parameter)
    except Error as error:
        assert "parameter 'w' of shape" in str(error) and 'full_state_dict()' in str(error)
        return True
    return False


@pytest.fixture(scope='module', autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_boxes_are_what_torch_gives():
    rng = random.Random(5)
    sharded = mistaken = 0
    for _ in range(ROUNDS):
        case = names, sizes, shape, parallel = random_case(rng)
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        seen = torch.zeros(whole.numel(), dtype=torch.int64)
        said, is_right = set(), []
        for rank in range(math.prod(sizes)):
            came = held(*case, rank)
            if came is None:
                break
            key, elements, chunk, refused = came
            box = placement.box(key, tuple(shape), rank)
            said.add(refused)
            is_right.append(chunk == (box if elements.numel() else None))
            mine = whole[tuple(slice(begin, end) for begin, end in box)].reshape(-1)
            assert torch.equal(mine, elements), (case, rank, key, box)
            seen[elements.long()] += 1
            sharded += 1
        else:
            assert seen.min() == seen.max() > 0, case
            assert said == {not all(is_right)}, (case, 'refused on all ranks just where Distributed Checkpoint mistakes a part', is_right)
            mistaken += not all(is_right)
    assert sharded > ROUNDS and mistaken > ROUNDS / 200
