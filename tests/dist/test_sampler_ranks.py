"""A sampler that no engine is bound to deals to the ranks of torch's process group."""

import numpy as np
import pytest

from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.testing.spawn import run_ranks

LENGTH = 11


def two_passes(rank: int) -> list[int]:
    del rank
    sampler = ElasticSampler(LENGTH, seed=3)
    samples = [*sampler, *sampler]
    assert len(samples) == 2 * len(sampler)
    return samples


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_unbound_ranks_share_the_stream(num_ranks: int) -> None:
    dealt = run_ranks(two_passes, num_ranks, 60)
    together = [sample for turn in zip(*dealt, strict=True) for sample in turn]
    stop = 2 * -(-LENGTH // num_ranks) * num_ranks
    assert together == ElasticSampler(LENGTH, seed=3).samples_at(np.arange(stop)).tolist()
