"""Stages of a pipeline: tensors that they share, and passes before the job is open."""
import pytest
from test_placed import WORLD, own_of, run_four


@pytest.fixture(scope='module')
def stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp('stages')
    ranks = run_four(['unopened_stage', 'tied_stages'], folder, 'stages_main.py')
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * WORLD, '\n'.join(rank.output for rank in ranks)
    return folder


def test_stages_that_share_a_tensor(stages):
    for expected, trained, untied, misnamed, half, wrong_group in own_of(stages, 'tied_stages'):
        for losses in trained:
            assert losses == pytest.approx(expected, abs=1e-5)
        for said in untied:
            assert said.startswith("parameter 'embed.weight' has different gradients on rank 2 and on rank 0") and 'tied=' in said
        assert "tied={'embed': ...}: this rank trains no parameter of that name" in misnamed
        assert "parameter 'embed.weight' is" in half and 'tied' in half
        assert "the gradient of tied parameter 'embed.weight' differs between rank 2 and rank 0" in wrong_group


def test_a_stage_that_runs_before_the_others(stages):
    for rank, (said,) in enumerate(own_of(stages, 'unopened_stage')):
        here, elsewhere = ([0, 1], [2, 3]) if rank < 2 else ([2, 3], [0, 1])
        assert f'parameters of this model are on ranks {here}, and ranks {elsewhere} have others, as stages of a pipeline do' in said
        assert 'call resume() of the optimizer on all ranks before the first pass' in said
