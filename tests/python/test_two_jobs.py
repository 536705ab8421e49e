"""Two optimizers with one directory, and optimizers of some ranks alone: three ranks in one set of processes, and one rank with shard()."""
import pathlib

import pytest
import torch
from own_process import Process, run
from test_ranks import free_port

HERE = pathlib.Path(__file__).parent
WORLD = 3


@pytest.fixture(scope='module')
def told(tmp_path_factory):
    """By case, what the ranks were told, in their order."""
    folder, port = tmp_path_factory.mktemp('two_jobs'), str(free_port())
    ranks = [Process(HERE / 'two_jobs_main.py', folder, folder / f'{rank}.log', folder, MASTER_ADDR='127.0.0.1', MASTER_PORT=port,
                     WORLD_SIZE=str(WORLD), RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(WORLD)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * WORLD, '\n'.join(f'--- rank {i}\n{rank.output}' for i, rank in enumerate(ranks))
    results = [torch.load(folder / f'two_jobs-{rank}.pt') for rank in range(WORLD)]
    return {name: [of_rank[name][0] for of_rank in results] for name in results[0]}


def test_actor_and_critic_share_the_server_of_their_directory(told):
    for errors, found, there in told['actor_and_critic']:
        assert max(errors) < 1e-5
        assert found == 3 and there == ['actor', 'critic']


def test_other_budgets_for_one_directory_are_refused(told):
    for rank, (said, after) in enumerate(told['other_budgets']):
        assert said.removeprefix('rank 0: ').startswith("dram='65MiB': the ranks have a private state server in directory ")
        assert 'with dram=67108864, and their optimizers share it; leave dram out here, or close() the optimizers' in said, rank
        assert after == 'accepted'


def test_models_of_shard_in_one_directory(told):
    for errors in told['sharded_in_one_directory']:
        assert max(errors) < 1e-5


def test_a_group_of_one_rank_is_as_a_single_rank(told):
    for rank, (error, served, refused) in enumerate(told['on_one_rank_each']):
        assert error < 1e-5 and served
        assert refused == (f'group: rank {rank} is not in this process group; make the optimizer only on the group\'s ranks '
                           '[BAD_CONFIG]')


def test_a_group_of_two_of_three_ranks(told):
    for rank, (of_all, of_two, said) in enumerate(told['on_two_of_three']):
        assert of_all < 1e-5
        assert rank == 0 or (of_two < 1e-5 and said == (rank - 1, 2))


@pytest.mark.parametrize('name', ['fully_sharded_over_two_of_three', 'shard_over_two_of_three'])
def test_shards_over_the_ranks_of_a_group(name, told):
    """Meshes count ranks of the default group, a job those of its own."""
    nothing, *errors = told[name]
    assert nothing is None and max(errors) < 1e-5


def test_a_mesh_beyond_the_group_is_refused(told):
    for said in told['a_mesh_beyond_the_group'][1:]:
        assert said.removeprefix('rank 0: ').removeprefix('rank 1: ').startswith(
            "parameter '0.weight' is a DTensor over the ranks [0, 1, 2], but the optimizer is of the ranks [1, 2]; give it as group= one "
            'that has rank 0 too')


ONE_RANK = '''
import torch.distributed as dist
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
def step(model, optimizer):
    optimizer.zero_grad()
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    return model, optimizer
def made(name, apart=True, **more):
    torch.manual_seed(5)
    model = bt.shard(mlp()) if apart else mlp()
    return model, make(model, name=name, **more)
def values(model):
    with bt.gathered(model):
        return torch.cat([p.full_tensor().reshape(-1) if hasattr(p, 'full_tensor') else p.detach().reshape(-1) for p in model.parameters()])
def told(act):
    try:
        act()
    except ballast.Error as error:
        return str(error)
'''


def test_one_rank_shares_the_server_of_a_directory(tmp_path):
    """Of two models of shard() and of one whose parameters the trainer keeps; whichever opens first."""
    run(tmp_path, ONE_RANK + '''
    plain, first, second = made('plain', apart=False), made('first'), made('second')
    for each in (plain, first, second):
        step(*each)
    torch.testing.assert_close(values(first[0]), values(second[0]), rtol=0, atol=0)
    torch.testing.assert_close(values(first[0]), torch.cat([p.detach().reshape(-1) for p in plain[0].parameters()]), rtol=1e-6, atol=1e-6)
    assert ballast.jobs('state') == ['first', 'plain', 'second']
    said = told(made('third', dram='129MiB')[1].resume)
    assert said.startswith("dram=135266304: this process already has an embedded state server with dram=134217728"), said
    first[1].close()
    plain[1].close()
    step(*second)
    second[1].close()
    again = made('first', resume='must', dram='129MiB')
    assert again[1].resume().step == 1
    again[1].close()
    assert ballast.jobs('state') == ['first', 'plain', 'second']  # another server's
    '''.replace('\n    ', '\n'))


def test_a_server_without_parameters_that_is_used(tmp_path):
    run(tmp_path, ONE_RANK + '''
    plain = step(*made('plain', apart=False))
    first = made('first')
    said = told(first[1].resume)
    assert said.startswith('directory=') and 'make the optimizer of the shard() model before the first step of the others' in said, said
    plain[1].close()
    step(*first)
    first[1].close()
    '''.replace('\n    ', '\n'))
