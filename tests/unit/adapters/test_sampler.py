"""One stream of samples, whatever deals it: at any layout, over passes, changes and uneven ends."""

import itertools
import logging
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tenplex_megatron.adapters.sampler import ElasticSampler
from tenplex_megatron.errors import ConfigError, LayoutError

BATCH = 24
"""Samples of a global batch: many numbers of ranks divide it."""
LENGTHS = [1, 2, 3, 5, 23, 24, 25, 47, 48, 49, 72, 100]


class Numbers(Dataset[int]):
    """Data whose samples are their own numbers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Counting:
    """What of an engine matters here: how many samples are done."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples

    def step(self, batch: int = BATCH) -> None:
        self.samples += batch


def stream(length: int, stop: int, *, seed: int = 0, shuffle: bool = True) -> list[int]:
    """The first samples of the stream, looked up directly."""
    sampler = ElasticSampler(length, seed=seed, shuffle=shuffle)
    return sampler.samples_at(np.arange(stop)).tolist()


def bound(
    length: int, engine: Counting, *, micro: int, dp: int = 1, rank: int = 0, seed: int = 0
) -> ElasticSampler:
    sampler = ElasticSampler(length, seed=seed)
    accumulation, rest = divmod(BATCH, micro * dp)
    assert not rest
    sampler.bind(
        micro=micro, accumulation=accumulation, rank=rank, dp=dp, consumed=lambda: engine.samples
    )
    return sampler


def forever(sampler: ElasticSampler) -> Iterator[list[int]]:
    """Pass after pass, as a training loop asks for them."""
    while True:
        yield from sampler.batches()


class Job:
    """A job in legs of different layouts; every leg starts from what the one before stored."""

    def __init__(self, length: int, *, seed: int = 0) -> None:
        self._length, self._seed = length, seed
        self._stored: dict[str, Any] | None = None
        self.dealt: list[int] = []
        """The samples of all global batches in order."""

    def run(self, dp: int, micro: int, steps: int) -> None:
        engine = Counting(self._stored["consumed"] if self._stored else 0)
        ranks = []
        for rank in range(dp):
            sampler = bound(self._length, engine, micro=micro, dp=dp, rank=rank, seed=self._seed)
            if self._stored:
                sampler.load_state_dict(self._stored)
            ranks.append(sampler)
        batches = [forever(sampler) for sampler in ranks]
        for _ in range(steps):
            for _, one in itertools.product(range(BATCH // (micro * dp)), batches):
                self.dealt += next(one)
            engine.step()
        states = [sampler.state_dict() for sampler in ranks]
        assert all(state == states[0] for state in states)
        self._stored = states[0]


def dealings() -> list[tuple[int, int]]:
    """Every (DP, micro-batch) that cuts a global batch evenly."""
    sizes = range(1, BATCH + 1)
    return [(dp, micro) for dp in sizes for micro in sizes if BATCH % (dp * micro) == 0]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_layout_deals_the_same_global_batches(length: int) -> None:
    for dp, micro in dealings():
        job = Job(length)
        job.run(dp, micro, steps=7)
        assert job.dealt == stream(length, 7 * BATCH), (dp, micro)


legs = st.lists(st.tuples(st.sampled_from(dealings()), st.integers(1, 9)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(length=st.integers(1, 200), seed=st.integers(0, 2**64), legs=legs)
def test_a_job_that_changes_layout_anywhere_reads_what_an_uninterrupted_one_reads(
    length: int, seed: int, legs: list[tuple[tuple[int, int], int]]
) -> None:
    job = Job(length, seed=seed)
    for (dp, micro), steps in legs:
        job.run(dp, micro, steps)
    steps = sum(steps for _, steps in legs)
    assert job.dealt == stream(length, steps * BATCH, seed=seed)


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_every_order_holds_every_sample_once(length: int, seed: int, epoch: int) -> None:
    positions = np.arange(length) + epoch * length
    found = ElasticSampler(length, seed=seed).samples_at(positions)
    assert sorted(found.tolist()) == list(range(length))
    unshuffled = ElasticSampler(length, seed=seed, shuffle=False).samples_at(positions)
    assert unshuffled.tolist() == list(range(length))


@pytest.mark.parametrize("length", range(1, 130))
def test_orders_hold_every_sample_once_at_every_small_length(length: int) -> None:
    for order in np.array(stream(length, 3 * length)).reshape(3, length):
        assert sorted(order.tolist()) == list(range(length))


@pytest.mark.parametrize(("length", "tries"), [(2, 2000), (3, 3000), (4, 6000), (5, 30000)])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int, tries: int) -> None:
    orders = np.array(stream(length, tries * length, seed=3)).reshape(tries, length)
    counts = Counter(map(tuple, orders.tolist()))
    kinds = math.factorial(length)
    assert len(counts) == kinds
    expected = tries / kinds
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert abs(chi_squared - (kinds - 1)) < 4 * math.sqrt(2 * (kinds - 1))


def test_neighbours_are_torn_apart_and_seeds_and_epochs_have_nothing_in_common() -> None:
    length = 10_000
    orders = [np.array(stream(length, 2 * length, seed=seed)) for seed in range(3)]
    columns = [part for order in orders for part in (order[:length], order[length:])]
    for column in columns:
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 0.05
    for one, other in itertools.combinations(columns, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
        # Two random orders agree in one place on average.
        assert np.count_nonzero(one == other) < 10


def test_the_order_is_the_one_of_earlier_releases() -> None:
    # A job that is resumed with a newer release must not see other samples.
    assert stream(10, 20) == [5, 8, 0, 2, 6, 7, 4, 9, 1, 3, 8, 2, 6, 9, 0, 3, 1, 4, 7, 5]
    far = ElasticSampler(10**8, seed=7).samples_at(np.arange(3) + 10**12)
    assert far.tolist() == [10290818, 67961518, 6401111]


@pytest.mark.parametrize("length", [10**8, 2**40])
def test_no_table_of_an_order_is_made(length: int) -> None:
    tracemalloc.start()
    sampler = bound(length, Counting(5 * length // 2), micro=4, dp=2)
    batches = iter(sampler.batches())
    dealt = [next(batches) for _ in range(2000)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20
    assert len(set(itertools.chain(*dealt))) == 4 * 2000


def steps_of_pass(sampler: ElasticSampler, engine: Counting) -> int:
    steps, rest = divmod(sum(map(len, sampler.batches())), BATCH)
    assert rest == 0
    engine.samples += steps * BATCH
    return steps


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("micro", [1, 4, 24])
def test_every_pass_has_as_many_steps_as_the_data_needs(length: int, micro: int) -> None:
    engine = Counting()
    sampler = bound(length, engine, micro=micro)
    needed = -(-length // BATCH)
    for number in range(5):
        assert sampler.epoch == number
        assert len(sampler) == needed * BATCH
        assert sampler.num_micro_batches == len(sampler.batches()) == needed * BATCH // micro
        assert steps_of_pass(sampler, engine) == needed


@pytest.mark.parametrize("done", range(9))
def test_the_first_pass_of_a_resumed_job_is_what_was_left_of_it(done: int) -> None:
    engine = Counting(done * BATCH)
    sampler = bound(4 * BATCH - 1, engine, micro=4)
    assert sampler.epoch == done // 4
    assert steps_of_pass(sampler, engine) == 4 - done % 4
    assert sampler.epoch == done // 4 + 1


LOADERS = {
    "no worker": {},
    "workers that run ahead": {"num_workers": 2, "prefetch_factor": 3},
    "workers that stay": {"num_workers": 1, "persistent_workers": True},
}


def loader_of(sampler: ElasticSampler, length: int, kind: str, micro: int) -> DataLoader[int]:
    """Both ways to hand a sampler over."""
    options: dict[str, Any] = dict(LOADERS[kind.partition(" | ")[0]])
    if kind.endswith("batches"):
        return DataLoader(Numbers(length), batch_sampler=sampler.batches(), **options)
    return DataLoader(Numbers(length), sampler=sampler, batch_size=micro, **options)


@pytest.mark.parametrize("form", ["samples", "batches"])
@pytest.mark.parametrize("kind", LOADERS)
def test_what_workers_fetched_ahead_does_not_count(kind: str, form: str) -> None:
    length, micro, engine = 7 * BATCH - 5, 6, Counting()
    sampler = bound(length, engine, micro=micro)
    loader = loader_of(sampler, length, f"{kind} | {form}", micro)
    assert len(loader) == 7 * BATCH // micro
    dealt: list[int] = []
    # Passes that are left after any number of steps, and whole ones.
    for steps in (1, 3, 2, 7, 7):
        batches = iter(loader)
        for _ in range(min(steps, 7 - engine.samples // BATCH % 7)):
            for _ in range(BATCH // micro):
                batch = next(batches)
                assert batch.shape == (micro,)
                dealt += batch.tolist()
            engine.step()
            assert sampler.state_dict()["consumed"] == len(dealt)
        del batches
    assert len(dealt) == engine.samples == (1 + 3 + 2 + 1 + 7) * BATCH
    assert dealt == stream(length, len(dealt))


def test_without_an_engine_passes_follow_each_other_and_a_left_one_begins_again() -> None:
    sampler = ElasticSampler(10)
    loader = DataLoader(Numbers(10), sampler=sampler, batch_size=4)
    dealt = [sample for _ in range(3) for batch in loader for sample in batch.tolist()]
    assert dealt == stream(10, 30)
    assert sampler.epoch == 3
    assert [next(iter(loader)).tolist() for _ in range(2)] == [stream(10, 34)[30:]] * 2


def test_a_state_is_what_the_next_start_needs() -> None:
    first = ElasticSampler(10, seed=5)
    first.load_state_dict({"length": 10, "seed": 5, "shuffle": True, "consumed": 23})
    assert first.state_dict() == {"length": 10, "seed": 5, "shuffle": True, "consumed": 23}
    assert list(first) == stream(10, 30, seed=5)[23:]


@pytest.mark.parametrize(("key", "value"), [("length", 9), ("seed", 1), ("shuffle", False)])
def test_a_state_of_other_data_is_refused(key: str, value: int) -> None:
    state = {**ElasticSampler(10).state_dict(), key: value}
    with pytest.raises(LayoutError, match=rf"samples of .*'{key}': {value}.*Keep data, seed"):
        ElasticSampler(10).load_state_dict(state)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_data_that_can_not_be_resumed_to_the_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="a Endless has no length"):
        ElasticSampler(Endless())  # type: ignore[arg-type]  # what a caller may get wrong
    with pytest.raises(ConfigError, match=r"0 samples .* expected at least one"):
        ElasticSampler([])
    with pytest.raises(ConfigError, match=r"seed -1: expected .* not negative"):
        ElasticSampler(10, seed=-1)


@pytest.mark.parametrize(
    ("micro", "accumulation", "rank", "dp"),
    [(0, 1, 0, 1), (1, 0, 0, 1), (1, 1, 2, 2), (1, 1, 0, 0)],
)
def test_a_deal_that_can_not_be_is_refused(
    micro: int, accumulation: int, rank: int, dp: int
) -> None:
    with pytest.raises(ConfigError, match="expected sizes of at least 1, and a rank below"):
        ElasticSampler(10).bind(
            micro=micro, accumulation=accumulation, rank=rank, dp=dp, consumed=lambda: 0
        )


def test_micro_batches_smaller_than_the_engines_are_noticed() -> None:
    engine = Counting()
    sampler = bound(100, engine, micro=6)
    batches = iter(DataLoader(Numbers(100), sampler=sampler, batch_size=3))
    for _ in range(BATCH // 6):
        next(batches)
    engine.step()
    for ask in (sampler.state_dict, lambda: next(iter(sampler))):
        with pytest.raises(ConfigError, match="engine has counted 24 samples, its sampler gave 12"):
            ask()


def test_an_engine_that_reads_other_data_is_noticed_after_its_first_step() -> None:
    engine = Counting(5 * BATCH)
    sampler = bound(100, engine, micro=6)
    sampler.state_dict()
    engine.step()
    with pytest.raises(ConfigError, match="has counted 144 samples, its sampler gave 0"):
        sampler.state_dict()


def test_a_rank_that_reads_no_data_is_no_mistake() -> None:
    engine = Counting()
    sampler = ElasticSampler(100)
    sampler.bind(
        micro=6, accumulation=1, rank=0, dp=1, consumed=lambda: engine.samples, reads=False
    )
    engine.step()
    assert sampler.state_dict()["consumed"] == BATCH


def test_a_look_at_the_data_within_a_pass_is_no_mistake() -> None:
    engine = Counting()
    sampler = bound(4 * BATCH, engine, micro=6)
    batches = iter(sampler.batches())
    fetched_ahead = list(batches)
    next(iter(sampler.batches()))
    for _ in range(len(fetched_ahead) * 6 // BATCH):
        engine.step()
        assert sampler.state_dict()["consumed"] == engine.samples


def test_micro_batches_larger_than_the_engines_are_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Counting()
    sampler = bound(4 * BATCH, engine, micro=6)
    loader = DataLoader(Numbers(4 * BATCH), sampler=sampler, batch_size=12)
    for number, _ in enumerate(loader, 1):
        if number % (BATCH // 6) == 0:
            engine.step()
    with caplog.at_level(logging.WARNING):
        next(iter(loader))
    assert "a pass begins at sample 48, but the one before gave all up to 96" in caplog.text


def test_batches_that_went_on_over_a_binding_are_refused() -> None:
    sampler = ElasticSampler(100)
    batches = iter(sampler)
    next(batches)
    sampler.bind(micro=2, accumulation=12, rank=0, dp=1, consumed=lambda: 0)
    with pytest.raises(ConfigError, match="iterated before its sampler was bound"):
        next(batches)
    # A look at the data before the engine exists harms nothing.
    assert [next(iter(sampler.batches())) for _ in range(2)] == [stream(100, 2)] * 2


def test_samples_reach_the_data_as_plain_numbers() -> None:
    (batch,) = itertools.islice(ElasticSampler(3).batches(), 1)
    assert [type(sample) for sample in batch] == [int]
    assert isinstance(next(iter(DataLoader(Numbers(3), sampler=ElasticSampler(3)))), torch.Tensor)
