"""One parameter's entry of a saved state, and the master that it leaves; without a server."""
import pytest
import torch

import ballast
from ballast.torch.states.entries import Wanted, entry_of
from ballast.torch.states.writing import fitting

ADAM = Wanted('adamw', ('exp_avg', 'exp_avg_sq'), 'w', torch.zeros(2))
SGD = Wanted('sgd', ('momentum_buffer',), 'w', torch.zeros(2))
ADEMAMIX = Wanted('ademamix', ('exp_avg_fast', 'exp_avg_sq', 'exp_avg_slow'), 'w', torch.zeros(2))
ADAGRAD = Wanted('adagrad', ('sum',), 'w', torch.zeros(2), start=0.5)


def ones(**others):
    return {'step': 3, 'exp_avg': torch.ones(2), 'exp_avg_sq': torch.ones(2), **others}


def means(**others):
    return {'step': 3, 'exp_avg_fast': -torch.ones(2), 'exp_avg_sq': torch.ones(2), 'exp_avg_slow': -torch.ones(2), **others}


def test_an_entry_has_steps_moments_and_perhaps_a_master():
    entry = entry_of(ADAM, ones(master=torch.full((2,), 7.0)))
    assert entry.steps == 3 and list(entry.moments) == ['exp_avg', 'exp_avg_sq'] and entry.master.tolist() == [7, 7]
    assert entry_of(ADAM, {}) == (0, {}, None)
    assert entry_of(ADAM, {'mine': 1}) == (0, {}, None)  # others keep that


def test_torchs_sgd_counts_no_steps():
    assert entry_of(SGD, {'momentum_buffer': torch.ones(2)}).steps == 1
    assert entry_of(SGD, {'momentum_buffer': None}).steps == 0


def test_adagrads_sum_begins_with_its_start():
    assert entry_of(ADAGRAD, {'step': 0, 'sum': torch.full((2,), 0.5)}).moments['sum'].tolist() == [0, 0]
    assert entry_of(ADAGRAD, {'step': 1, 'sum': torch.full((2,), 0.5)}).moments['sum'].tolist() == [0.5, 0.5]


@pytest.mark.parametrize('wanted, saved, reason', [
    (ADAM, [1], 'BAD_SPEC'),
    (ADAM, ones(exp_avg={}), 'BAD_SPEC'),  # as torch flattens what is not there
    (ADAM, ones(momentum_buffer=torch.ones(2)), 'BAD_SPEC'),
    (ADAM, ones(exp_avg_sq=None), 'BAD_SPEC'),
    (ADAM, {'exp_avg': torch.ones(2), 'exp_avg_sq': torch.ones(2)}, 'BAD_SPEC'),
    (ADAM, ones(exp_avg=torch.ones(3)), 'BAD_SPEC'),
    (ADAM, ones(exp_avg=torch.ones(2, dtype=torch.int32)), 'BAD_DTYPE'),
    (ADAM, ones(step=1.5), 'BAD_REQUEST'),
    (ADAM, ones(step='x'), 'BAD_REQUEST'),
    (ADAM, ones(exp_avg=torch.tensor([1.0, float('nan')])), 'BAD_REQUEST'),
    (ADAM, ones(exp_avg_sq=-torch.ones(2)), 'BAD_REQUEST'),
    (SGD, {'step': 0, 'momentum_buffer': torch.ones(2)}, 'BAD_REQUEST'),
    (ADAGRAD, {'step': 0, 'sum': torch.zeros(2)}, 'BAD_REQUEST'),
    (ADEMAMIX, means(exp_avg_sq=-torch.ones(2)), 'BAD_REQUEST'),
    (ADEMAMIX, {key: value for key, value in means().items() if key != 'exp_avg_slow'}, 'BAD_SPEC'),
])
def test_an_entry_that_does_not_fit_is_refused(wanted, saved, reason):
    with pytest.raises(ballast.Error, match="parameter 'w'") as refused:
        entry_of(wanted, saved)
    assert refused.value.reason == reason


def test_a_mean_may_be_negative():
    assert entry_of(ADAM, ones(exp_avg=-torch.ones(2))).moments['exp_avg'].tolist() == [-1, -1]
    assert entry_of(ADEMAMIX, means()).moments['exp_avg_slow'].tolist() == [-1, -1]


def test_the_first_master_that_rounds_to_the_parameter_stays():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    first, second = torch.tensor([1.001, 9.0, 9.0]), torch.tensor([1.002, 2.001, 9.0])
    assert torch.equal(fitting(values, [first, second]), torch.tensor([1.001, 2.001, 3.0]))
    assert torch.equal(fitting(values, []), torch.tensor([1.0, 2.0, 3.0]))
