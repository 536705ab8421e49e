"""A mixture of experts on the servers: only experts that tokens reach are pulled, pushed and updated, on one rank and on several."""
import copy
import io
import os
import re
import subprocess

import pytest
import torch
from experts_main import EXPERTS, STEPS
from test_shard import run

import ballast
import ballast.torch as bt
from ballast import programs

RANKS = ['agreed', 'kept', 'no_reshard', 'recomputed', 'micro_batches']


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    return run([*RANKS, 'evaluated', 'refused'], tmp_path_factory.mktemp('pair'), script='experts_main.py')


def check(done):
    """As one process in memory with the tokens of all ranks, whose experts without tokens have no gradient."""
    reached = [each for _, _, each in done]
    for (losses, parameters), (our_losses, our_parameters, _), _ in done:
        assert our_losses == pytest.approx(losses, rel=1e-5)
        for theirs, mine in zip(parameters, our_parameters):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    some = [set().union(*map(set, passes)) for blocks in zip(*reached) for passes in zip(*blocks)]
    assert any(len(each) < EXPERTS for each in some), 'no pass left an expert out'
    assert any(passes[0] != passes[1] for blocks in zip(*reached) for passes in zip(*blocks)), 'ranks never reached different experts'


@pytest.mark.parametrize('script', RANKS)
def test_ranks_whose_tokens_reach_different_experts(script, pair):
    check(pair[script])


def test_replicas_whose_tokens_reach_different_experts(tmp_path):
    check(run(['replicas'], tmp_path, world=4, script='experts_main.py')['replicas'])


def test_a_router_tells_what_to_pull(pair):
    """Only what the first step gathers outside of mixtures comes late."""
    for _, (_, _, stats), _ in pair['agreed']:
        late = [each['unit_pulls_late'] for each in stats]
        assert late[-1] == late[0] <= 2 + 2 * 2 + 2 * 2, late
        assert len(stats) == STEPS


def test_recomputation_pulls_no_expert_again(pair):
    """Backward gathers the last expert of a block ahead of the block's second forward pass."""
    pulls = [[stats[-1]['unit_pulls'] for _, (_, _, stats), _ in pair[script]] for script in ('agreed', 'recomputed')]
    assert pulls[0] == pulls[1]


def test_evaluation(pair):
    """On all ranks, and on one alone within gathered()."""
    for rank, (losses, expected) in enumerate(pair['evaluated']):
        assert losses[:3] == pytest.approx(expected, rel=1e-5)
        assert len(losses) == (6 if rank == 0 else 3) and losses[3:] == pytest.approx(expected[:len(losses) - 3], rel=1e-5)


def test_ranks_that_do_not_agree(pair):
    unlike, whole, number, (waited, _) = zip(*pair['refused'])
    assert 'ranks [0, 1] did not all come to reached_experts() within 2 s (step_timeout)' in waited and '[RANK_MISSING]' in waited
    for said in unlike:
        assert "a forward pass calls expert 'blocks.0.experts.3' where 'blocks.0.experts.1' comes next. 2 ranks gather each" in said
        assert 'ballast.torch.reached_experts(experts, tokens) returns, in its order; or all. A model that only' in said
        assert '[RANKS_DIFFER]' in said
    assert all('gathered with their block, whole. Make each expert a unit' in said for said in whole)
    assert all('expected tokens of shape [6], a number for each expert; got [4]' in said for said in number)


@pytest.fixture
def server(tmp_path):
    """Addresses of a server, and of its metrics."""
    process = subprocess.Popen(
        [programs.path('ballastd'), '--end-with', str(os.getpid()), '--listen', '127.0.0.1:0', '--metrics_listen', '127.0.0.1:0',
         '--data_directory', str(tmp_path / 'server'), '--budget.dram', '256MiB', '--budget.nvme', '1GiB', '--log_level', 'warn'],
        stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r'listen=(\S+) metrics=(\S+)', process.stdout.readline()).groups()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def test_8_of_64_experts_take_an_eighth_of_the_bytes(server, tmp_path):
    [(losses, same, left, stats, moved)] = run(['a_part'], tmp_path, world=1, script='experts_main.py', BALLAST_SERVERS=server[0],
                                         METRICS=server[1])['a_part']
    assert losses[1::2] == pytest.approx(losses[::2], rel=1e-5)
    assert same and left == 0
    *some, all_experts = moved
    for each in some:
        shares = [part / whole for part, whole in zip(each, all_experts)]
        print('pulled, pushed, updated; by stats():', ' '.join(f'{share:.4f}' for share in shares))
        assert all(0.12 <= share <= 0.16 for share in shares)
    # A pull for each gather: forward and backward of the layers and of experts; and what is ahead of a step that did not come.
    assert stats['unit_pulls'] == 5 * 2 * (2 + 2 * 8) + 2 * (2 + 2 * 64) + 4
    # Late are the layers in the first step, and in forward the experts of a layer that calls them without a word ahead.
    assert stats['unit_pulls_late'] == 4 + 5 * 8 + 64


def test_fused_experts_of_transformers(tmp_path):
    pytest.importorskip('transformers')
    for losses, left_out, states in run(['fused'], tmp_path, script='experts_main.py')['fused']:
        assert left_out > 0, 'tokens reached every expert'
        assert [loss for _, loss in losses] == pytest.approx([expected for expected, _ in losses], rel=1e-5)
        for came, expected in states:
            assert came.keys() == expected.keys() and 'model.layers.1.mlp.experts.gate_up_proj' in came
            for name, value in came.items():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def of_transformers(kind, implementation='eager'):
    transformers = pytest.importorskip('transformers')
    experts = {'GptOss': {'num_local_experts': 8, 'head_dim': 8}, 'Qwen3Moe': {'num_experts': 8, 'moe_intermediate_size': 12},
               'NemotronH': {'n_routed_experts': 8, 'layers_block_type': ['moe'], 'moe_intermediate_size': 12}}[kind]
    config = getattr(transformers, f'{kind}Config')(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                                    num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, **experts)
    model = getattr(transformers, f'{kind}ForCausalLM')(config)
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize('kind', ['Qwen3Moe', 'GptOss', 'NemotronH'])
@pytest.mark.parametrize('implementation', ['eager', 'grouped_mm'])
def test_split_experts_compute_as_fused_ones(kind, implementation):
    """Gated and not, with biases, weights either way round; sums in the order of each implementation."""
    model = of_transformers(kind, implementation)
    split = bt.split_experts(copy.deepcopy(model))
    tokens = torch.arange(3)[None]
    losses = [each(input_ids=tokens, labels=tokens, use_cache=False).loss for each in (model, split)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    theirs, mine = dict(model.named_parameters()), dict(split.named_parameters())
    without = 0
    for name, parameter in mine.items():
        layer, _, leaf = name.rpartition('.')
        fused, _, number = layer.rpartition('.')
        expected = theirs[name].grad if name in theirs else theirs[f'{fused}.{leaf}'].grad[int(number)]
        if parameter.grad is None:
            without += 1
            assert not expected.any()
        else:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
    assert without > 0, 'tokens reached every expert'


def test_a_state_of_fused_experts():
    model = of_transformers('GptOss')
    split, state = bt.split_experts(of_transformers('GptOss')), model.state_dict()
    assert split.load_state_dict(state).missing_keys == []
    assert all(torch.equal(value, state[name]) for name, value in split.state_dict().items())
    state['model.layers.0.mlp.experts.down_proj'] = torch.zeros(3, 24, 16)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*experts.0.down_proj.*Unexpected key.*experts.down_proj'):
        split.load_state_dict(state)


@pytest.mark.parametrize('copied', ['pickle', 'deepcopy', 'twice'])
def test_a_copy_of_a_split_model(copied):
    def copy_of(model):
        if copied == 'deepcopy':
            return copy.deepcopy(model)
        memory = io.BytesIO()
        torch.save(model, memory)
        memory.seek(0)
        return torch.load(memory, weights_only=False)
    split = bt.split_experts(of_transformers('GptOss'))
    made = copy_of(copy_of(split) if copied == 'twice' else split)
    experts, theirs = made.model.layers[0].mlp.experts, split.model.layers[0].mlp.experts
    assert type(experts) is type(theirs) and experts is not theirs
    assert not {p.data_ptr() for p in made.parameters()} & {p.data_ptr() for p in split.parameters()}
    tokens = torch.arange(3)[None]
    loss, expected = (each(input_ids=tokens, labels=tokens, use_cache=False).loss for each in (made, split))
    assert loss == expected
    loss.backward()
    assert [name for name, p in made.named_parameters() if p.grad is None] and all(p.grad is None for p in split.parameters())
    # The copy's own hooks: its state_dict() is the fused one, and it loads one, of its own values.
    state = made.state_dict()
    assert state.keys() == of_transformers('GptOss').state_dict().keys()
    with torch.no_grad():
        experts.get_submodule('3').down_proj.fill_(2)
    assert made.state_dict()['model.layers.0.mlp.experts.down_proj'][3].eq(2).all() and not theirs.down_proj.eq(2).any()
    assert made.load_state_dict(state).missing_keys == [] and torch.equal(experts.down_proj, theirs.down_proj)


def test_experts_on_the_meta_device():
    transformers = pytest.importorskip('transformers')
    with torch.device('meta'):
        model = bt.split_experts(of_transformers('GptOss'))
    expert = model.model.layers[0].mlp.experts.get_submodule('3').to_empty(device='cpu')
    expert.reset_parameters()
    assert not expert.down_proj_bias.any()
    assert expert.down_proj.std().item() == pytest.approx(transformers.GptOssConfig().initializer_range, rel=0.2)


class StrangeExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3, 4))


def test_what_split_experts_refuses():
    qwen = of_transformers('Qwen3Moe')
    qwen.model.layers[0].mlp.experts.register_parameter('scale', torch.nn.Parameter(torch.ones(8)))
    parallel = of_transformers('Qwen3Moe')
    parallel.model.layers[0].mlp.experts._is_expert_parallel = True
    for model, text in (
            (torch.nn.Linear(2, 2), 'split_experts(Linear): the model has no fused experts of transformers 5'),
            (torch.nn.Sequential(StrangeExperts()), "'0' is a StrangeExperts, which does not say how its experts compute"),
            (qwen, "'model.layers.0.mlp.experts', a Qwen3MoeExperts, has parameters {'gate_up_proj': [8, 24, 16]"),
            (parallel, "the experts of 'model.layers.0.mlp.experts' are divided among ranks already"),
            (bt.split_experts(of_transformers('Qwen3Moe')), 'has no fused experts')):
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(ballast.Error) as error:
            bt.split_experts(model)
        assert text in str(error.value)
        assert [name for name, _ in model.named_parameters()] == names
