"""What would make the loss curve another one is refused, with the numbers and the flag."""

from dataclasses import replace
from pathlib import Path

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import WRONG_INPUT, Source
from tests.end_to_end.megatron_jobs import Job

CYCLIC = ("--dataloader-type=cyclic", "--no-data-sharding")


@pytest.mark.parametrize(
    ("loader", "flag", "message"),
    [
        ((), "--global-batch-size=24", "--global-batch-size: the snapshot was taken with 12,"),
        # Orders of the cyclic loader hold whole micro-batches.
        (CYCLIC, "--micro-batch-size=2", "--micro-batch-size: the snapshot was taken with 1,"),
    ],
)
def test_what_would_deal_other_batches_is_refused_with_both_numbers(
    tmp_path: Path,
    store_directory: Path,
    dataset: Path,
    *,
    loader: tuple[str, ...],
    flag: str,
    message: str,
) -> None:
    first = Job(tmp_path / "job", store_directory / "job", dataset, 2, loader)
    first.run([("DP2", 2)])
    second = replace(first, flags=(*loader, flag, "--lr-decay-iters=20"))
    layout = ParallelLayout()
    spec = second.spec(2, layout, 2, source=Source(2, 1, 2, {0: "here", 1: "here"}), last=True)
    assert second.generation(spec, [layout]) == [1]
    assert message in second.errors(2)


def test_a_loader_that_deals_by_rank_is_refused_with_the_flag_that_helps(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    job = Job(tmp_path / "job", store_directory / "job", dataset, 2, ("--dataloader-type=cyclic",))
    job.folder.mkdir(mode=0o700)
    layout = ParallelLayout()
    spec = job.spec(1, layout, 2, source=None, last=True)
    assert WRONG_INPUT not in job.generation(spec, [layout])
    assert "add --no-data-sharding" in job.errors(1)


def test_unsharded_cyclic_batches_hold_the_same_samples_in_every_layout(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    flags = (*CYCLIC, "--use-distributed-optimizer")
    plain = Job(tmp_path / "plain", store_directory / "plain", dataset, 4, flags)
    elastic = Job(tmp_path / "elastic", store_directory / "elastic", dataset, 4, flags)
    expected = plain.run([("DP2", 4)])
    found = elastic.run([("DP2", 2), ("DP3", 4)])
    assert max(abs(found.losses[step] - expected.losses[step]) for step in range(1, 5)) <= 2e-5
