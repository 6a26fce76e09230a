"""Megatron's own loaders deal the same global batches at any layout, or the job is refused.

The versions that were read: megatron-core 0.19.2.
"""

import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import pytest

from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.errors import ConfigError

data_samplers = pytest.importorskip("megatron.training.datasets.data_samplers")
loaders = importlib.import_module("tenplex_megatron.adapters.megatron.loaders")

BATCH = 24
DEALINGS = [
    (dp, micro)
    for dp, micro in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4))
    if BATCH % (dp * micro) == 0
]


def global_batches(loaders: Sequence[Iterator[list[int]]], *, micro: int) -> Iterator[list[int]]:
    """What all ranks read in each step, micro-batch by micro-batch and rank by rank."""
    accumulation = BATCH // (micro * len(loaders))
    while True:
        try:
            yield [x for _ in range(accumulation) for loader in loaders for x in next(loader)]
        except StopIteration:
            return


def single(total: int, consumed: int, *, dp: int, micro: int) -> list[Iterator[list[int]]]:
    return [
        iter(
            data_samplers.MegatronPretrainingSampler(
                total_samples=total,
                consumed_samples=consumed,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=dp,
            )
        )
        for rank in range(dp)
    ]


@pytest.mark.parametrize("consumed", [0, BATCH, 5 * BATCH, 9 * BATCH])
@pytest.mark.parametrize("total", [10 * BATCH, 10 * BATCH + 1, 11 * BATCH - 1])
def test_the_ordinary_loader_deals_the_same_global_batches_at_any_layout(
    total: int, consumed: int
) -> None:
    expected = [list(range(start, start + BATCH)) for start in range(consumed, 10 * BATCH, BATCH)]
    for dp, micro in DEALINGS:
        found = global_batches(single(total, consumed, dp=dp, micro=micro), micro=micro)
        assert list(found) == expected, (dp, micro)


@pytest.mark.parametrize(("dp", "micro"), DEALINGS)
def test_our_sampler_cuts_a_global_batch_as_megatron_does(dp: int, micro: int) -> None:
    ours = []
    for rank in range(dp):
        sampler = ElasticSampler(10 * BATCH, shuffle=False)
        sampler.bind(
            micro=micro,
            accumulation=BATCH // (micro * dp),
            rank=rank,
            dp=dp,
            consumed=lambda: 3 * BATCH,
        )
        ours.append(list(sampler.batches()))
    assert ours == [list(loader) for loader in single(10 * BATCH, 3 * BATCH, dp=dp, micro=micro)]


def cyclic(total: int, consumed: int, *, dp: int, micro: int) -> list[Iterator[list[int]]]:
    """Megatron's own repetition: the same sampler is iterated again and again."""

    def endless(sampler: Iterable[list[int]]) -> Iterator[list[int]]:
        while True:
            yield from sampler

    return [
        endless(
            data_samplers.MegatronPretrainingRandomSampler(
                list(range(total)),
                total_samples=total,
                consumed_samples=consumed,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=dp,
                data_sharding=False,
            )
        )
        for rank in range(dp)
    ]


def cyclic_stream(total: int, *, dp: int, micro: int, steps: int) -> list[list[int]]:
    batches = global_batches(cyclic(total, 0, dp=dp, micro=micro), micro=micro)
    # Within a step the ranks' turns interleave sample by sample: another order, the same samples.
    return [sorted(batch) for batch in itertools.islice(batches, steps)]


def test_the_shuffling_loader_deals_the_same_global_batches_if_they_divide_the_data() -> None:
    total, steps = 5 * BATCH, 12
    expected = cyclic_stream(total, dp=1, micro=1, steps=steps)
    for dp, micro in DEALINGS:
        assert cyclic_stream(total, dp=dp, micro=micro, steps=steps) == expected
        for consumed in range(0, steps * BATCH, BATCH):
            resumed = global_batches(cyclic(total, consumed, dp=dp, micro=micro), micro=micro)
            assert sorted(next(resumed)) == expected[consumed // BATCH]


LENGTHS = (5 * BATCH, 5 * BATCH + 5, 6 * BATCH - 1)


@pytest.mark.parametrize("total", LENGTHS)
@pytest.mark.parametrize("steps", [5, 6, 12])
def test_data_on_which_the_shuffling_loader_depends_on_the_ranks_is_refused(
    total: int, steps: int
) -> None:
    # Its orders are as long as the micro-batches of all ranks divide; so are its epochs.
    for micro in (1, 2, 4):
        streams = {
            tuple(map(tuple, cyclic_stream(total, dp=dp, micro=micro, steps=steps)))
            for dp, other in DEALINGS
            if other == micro
        }
        if len(streams) > 1:
            with pytest.raises(ConfigError, match=f"the {total} of the data are no multiple"):
                loaders.check_orders(total, BATCH, steps * BATCH)


@pytest.mark.parametrize(
    ("total", "steps"), [(5 * BATCH, 12), (5 * BATCH + 5, 5), (6 * BATCH - 1, 5)]
)
def test_data_on_which_it_does_not_is_accepted(total: int, steps: int) -> None:
    loaders.check_orders(total, BATCH, steps * BATCH)
