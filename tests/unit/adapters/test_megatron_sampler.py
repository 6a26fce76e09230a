"""Megatron's own loaders deal the same global batches at any layout, or the job is refused.

The versions that were read: megatron-core 0.19.2.
"""

import argparse
import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

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


LENGTH = 16
TEXTS = {"large": 240, "small": 100}
"""Samples that one epoch of a text holds: its tokens over `LENGTH`."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexed data of documents of all lengths."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    for name, samples in TEXTS.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        left = samples * LENGTH + 1
        while left:
            length = min(left, int(random.integers(1, 10 * LENGTH)))
            builder.add_document(torch.from_numpy(random.integers(0, 30_000, length)), [length])
            left -= length
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


type Data = Sequence[dict[str, torch.Tensor]]


def built(texts: Path, asked: int, blend: dict[str, float], *, deferred: bool = False) -> Data:
    """Megatron's own training data, for `asked` samples."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    paths = [str(texts / name) for name in blend]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend_per_split=[(paths, list(blend.values()) if len(blend) > 1 else None), None, None],
        path_to_cache=str(texts / "cache"),
        tokenizer=MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null-text"}, vocab_size=30_000
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        fast_cache_load=deferred,
        defer_npy_index_mmap=deferred,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [asked, 0, 0], lambda: True, config).build()[0]


def order(data: Sequence[object], asked: int, loader: str = "single") -> str:
    args = argparse.Namespace(
        dataloader_type=loader,
        train_samples=asked,
        phase_transition_iterations=None,
        iteration=0,
    )
    return str(loaders.order_of(args, data)["digest"])


@pytest.mark.parametrize(
    "blend", [{"large": 1.0}, {"large": 0.5, "small": 0.5}, {"large": 0.8, "small": 0.2}]
)
def test_an_order_counts_as_the_same_exactly_where_the_samples_before_are(
    texts: Path, blend: dict[str, float]
) -> None:
    asked = (60, 160, 240, 260, 320, 380, 480, 490)
    data = {number: built(texts, number, blend) for number in asked}
    samples = {
        number: [data[number][i]["tokens"].numpy().tobytes() for i in range(number)]
        for number in asked
    }
    found = set()
    for fewer, more in itertools.combinations(asked, 2):
        goes_on = samples[more][:fewer] == samples[fewer]
        is_same = order(data[fewer], fewer) == order(data[more], more)
        assert is_same == goes_on, (fewer, more)
        found.add(goes_on)
    assert found == {True, False}


def test_twice_the_samples_of_one_epoch_and_a_half_come_in_another_order(texts: Path) -> None:
    # One epoch holds all samples of the short training, the long one mixes two.
    short, long = (built(texts, asked, {"large": 1.0}) for asked in (160, 320))
    shared = sum(
        np.array_equal(short[i]["tokens"].numpy(), long[i]["tokens"].numpy()) for i in range(160)
    )
    assert shared < 16
    assert order(short, 160) != order(long, 320)


def test_a_loader_that_shuffles_all_there_is_depends_on_how_much_there_is(texts: Path) -> None:
    blend = {"large": 0.8, "small": 0.2}
    fewer, more = (built(texts, asked, blend) for asked in (60, 160))
    assert order(fewer, 60) == order(more, 160)
    assert order(fewer, 60, "cyclic") != order(more, 160, "cyclic")


def test_an_index_that_is_read_when_it_is_used_tells_the_same_order(texts: Path) -> None:
    blend = {"large": 0.8, "small": 0.2}
    expected = order(built(texts, 160, blend), 160)
    assert order(built(texts, 160, blend, deferred=True), 160) == expected


def test_data_that_orders_its_samples_in_its_own_way_must_stay_as_it_is(texts: Path) -> None:
    from megatron.core.datasets.megatron_dataset import MegatronDataset

    class Other(MegatronDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
            return {}

    def other(asked: int) -> Other:
        return like(texts, Other, asked)

    assert order(other(160), 160) == order(other(160), 160) != order(other(161), 161)
    plain = [list(range(length)) for length in (160, 160, 161)]
    assert order(plain[0], 160) == order(plain[1], 320) != order(plain[2], 320)


def test_conversations_come_in_one_order_however_many_are_asked_for(texts: Path) -> None:
    from megatron.training.datasets.sft_dataset import SFTDataset

    assert order(like(texts, SFTDataset, 160), 160) == order(like(texts, SFTDataset, 900), 900)


def like[T](texts: Path, kind: type[T], asked: int) -> T:
    """Another kind of data set over the same documents."""
    place = vars(built(texts, 160, {"large": 1.0}))
    rest = (place["indices"], asked, place["index_split"], place["config"])
    return kind(place["dataset"], None, *rest)
