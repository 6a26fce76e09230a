"""What would make the loss curve another one is refused, with the numbers and the flag."""

from dataclasses import replace
from pathlib import Path

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.generation import GenerationSpec
from tenplex_megatron.elastic.records import Source
from tenplex_megatron.elastic.report import read_run
from tests.end_to_end.megatron_jobs import Job

CYCLIC = ("--dataloader-type=cyclic", "--no-data-sharding")
OVERRIDE = "--override-opt_param-scheduler"


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ((), ("--global-batch-size=24",), "--global-batch-size: the snapshot was taken with 12,"),
        # Orders of the cyclic loader hold whole micro-batches.
        (CYCLIC, ("--micro-batch-size=2",), "--micro-batch-size: the snapshot was taken with 1,"),
        # The data has 31 thousand samples, and the order of two epochs is drawn at once.
        (
            (),
            ("--train-iters=4000", OVERRIDE),
            "--train-iters: this run asks the data for 48000 samples,",
        ),
    ],
)
def test_what_would_deal_other_batches_is_refused_with_both_numbers(
    tmp_path: Path,
    store_directory: Path,
    dataset: Path,
    *,
    before: tuple[str, ...],
    now: tuple[str, ...],
    message: str,
) -> None:
    second = started_again(Job(tmp_path / "job", store_directory / "job", dataset, 2, before), *now)
    assert second.generation(spec_of(second, 2), [ParallelLayout()]) == [1]
    assert message in second.errors(2)


def test_a_longer_training_over_the_same_pass_goes_on(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    first = Job(tmp_path / "job", store_directory / "job", dataset, 2)
    second = started_again(first, "--train-iters=4", OVERRIDE)
    assert second.generation(spec_of(second, 2), [ParallelLayout()]) == [0], second.errors(2)
    run = read_run([second.folder])
    assert sorted(run.losses) == [1, 2, 3, 4]
    assert second.samples(run)[4] == tuple(range(36, 48))


def started_again(first: Job, *flags: str) -> Job:
    """A job whose first generation trained to its end, with further flags for the second."""
    first.run([("DP2", 2)])
    return replace(first, flags=(*first.flags, *flags))


def spec_of(job: Job, number: int) -> GenerationSpec:
    """A generation of one rank that trains to the end; the second goes on from step 2."""
    source = Source(2, 1, 2, {0: "here", 1: "here"}) if number > 1 else None
    return job.spec(number, ParallelLayout(), 2, source=source, last=True)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("cyclic", "add --no-data-sharding"),
        ("external", "--dataloader-type external: how the script's own loader deals samples"),
    ],
)
def test_a_loader_that_would_deal_other_samples_to_other_ranks_is_refused(
    tmp_path: Path, store_directory: Path, dataset: Path, *, loader: str, message: str
) -> None:
    flags = (f"--dataloader-type={loader}",)
    job = Job(tmp_path / "job", store_directory / "job", dataset, 2, flags)
    job.folder.mkdir(mode=0o700)
    assert job.generation(spec_of(job, 1), [ParallelLayout()]) == [1]
    assert message in job.errors(1)


def test_unsharded_cyclic_batches_hold_the_same_samples_in_every_layout(
    tmp_path: Path, store_directory: Path, dataset: Path
) -> None:
    flags = (*CYCLIC, "--use-distributed-optimizer")
    plain = Job(tmp_path / "plain", store_directory / "plain", dataset, 4, flags)
    elastic = Job(tmp_path / "elastic", store_directory / "elastic", dataset, 4, flags)
    expected = plain.run([("DP2", 4)])
    found = elastic.run([("DP2", 2), ("DP3", 4)])
    assert max(abs(found.losses[step] - expected.losses[step]) for step in range(1, 5)) <= 2e-5
