"""A stash on each of two ranks, under FSDP2 with and without recompute, and under tensor parallelism."""
from test_ranks import run_pair


def test_bits_and_bytes_are_those_without_ranks(tmp_path):
    assert run_pair('stash_rank_main.py', tmp_path, tmp_path).count('same bits') == 2
