"""The live state of a DeepSpeed engine goes from any stage and world to any other, bit for bit."""

import itertools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from check_deepspeed import (
    PRELOAD,
    Check,
    Report,
    all_checks,
    difference_of,
    reason_of,
    run_check,
)
from deepspeed_models import Job
from deepspeed_worlds import Outcome, run_sources, run_targets

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.testing.spawn import run_ranks
from tests.dist.deepspeed_bodies import boxes_beside_deepspeed, refusal_of, snapshot_within_window

QUICK = {check.title: check for check in all_checks(quick=True)}
# What these two have on top is covered by "BF16 optimizer" and the test of kinds, in less time.
LONGER = ("ZeRO bf16", "ZeRO fp16")


@pytest.fixture(scope="module", autouse=True)
def warm_fork_server() -> Iterator[None]:
    """Ranks are forked from a process that has imported DeepSpeed; the server of others ends."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    server = forkserver._forkserver  # type: ignore[attr-defined]  # no public way to end it
    server._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()
    yield
    server._stop()


def zero(stage: int, world: int, **more: object) -> Job:
    return Job(ParallelLayout(dp=world, zero_stage=stage), **more)


def assert_exact(report: Report) -> None:
    assert not report.failed, report.failed


def test_the_quick_check_has_every_pair_of_stages_and_every_pair_of_worlds() -> None:
    layouts = [(a.layout, b.layout) for a, b in QUICK["ZeRO fp32"].pairs]
    assert len(layouts) == 16
    assert len({(a.zero_stage, b.zero_stage) for a, b in layouts}) == 16
    assert len({(a.dp, b.dp) for a, b in layouts}) == 16
    (full,) = (check for check in all_checks(quick=False) if check.title == "ZeRO fp32")
    assert len(set(full.pairs)) == 256


def test_a_check_says_which_tensors_and_losses_differ() -> None:
    source = Outcome({"a": 1, "b": 2, "c": 3}, (1.0, 2.0))
    target = Outcome({"a": 1, "b": 3, "d": 4}, (1.5,))
    assert reason_of(source, target) == "3 of 4 tensors differ: b, c, d"
    assert reason_of(source, source) is None
    assert difference_of(source, target) == 0.5


@pytest.mark.parametrize("title", [title for title in QUICK if title not in LONGER])
def test_every_pair_of_the_quick_check_is_exact(title: str, store_directory: Path) -> None:
    assert_exact(run_check(QUICK[title], store_directory))


@pytest.mark.parametrize(
    ("optimizer", "precision", "tolerance", "steps"),
    [
        ("sgd", "fp32", 2e-5, 5),
        ("amsgrad", "fp32", 2e-5, 5),
        ("adamw", "fp16", 0.02, 1),
    ],
)
def test_every_optimizer_and_precision_goes_to_every_stage(
    optimizer: str, precision: str, tolerance: float, steps: int, store_directory: Path
) -> None:
    kind = {"optimizer": optimizer, "precision": precision}
    sources = [zero(0, 2, **kind), zero(1, 2, **kind), zero(3, 2, **kind)]
    targets = [zero(stage, 1, **kind) for stage in range(4)]
    pairs = tuple(itertools.product(sources, targets))
    assert_exact(run_check(Check("kinds", pairs, tolerance, steps), store_directory))


def test_a_job_with_dropout_goes_on_bit_for_bit_where_the_world_stays(
    store_directory: Path,
) -> None:
    source, target = zero(1, 2, dropout=0.2), zero(2, 2, dropout=0.2)
    trained = run_ranks(run_sources, 2, 120.0, store_directory, [source])[0][0]
    resumed = run_ranks(run_targets, 2, 120.0, store_directory, [(source, target)], 5)[0][0]
    assert resumed == trained


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_box_is_what_deepspeed_says_of_the_whole_tensor(stage: int, precision: str) -> None:
    job = zero(stage, 3, precision=precision)
    assert run_ranks(boxes_beside_deepspeed, 3, 120.0, job) == [[], [], []]


def test_an_export_within_an_accumulation_window_is_refused_and_possible_after_it() -> None:
    message, step = run_ranks(snapshot_within_window, 1, 120.0, zero(1, 1))[0]
    assert message.startswith("a snapshot was asked for after 1 of 2 micro-batches of step 2")
    assert step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing", "nothing"),
        ("no optimizer", "the engine has no optimizer"),
        ("random_ltd", "random_ltd: it keeps state of its own that is not carried"),
        ("autocast", "torch_autocast in float16: it keeps state of its own"),
        ("nvme", "ZeRO stage 3 offloads to NVMe"),
        ("stranger", "a parameter of shape (3,) is trained but is not one of the engine's module"),
        ("mpu", "the model is split over 2 ranks by an mpu of its own"),
        ("sequences", "sequences are split over 2 ranks, and no layout says so"),
        ("client", "ranks of the snapshot disagree on client"),
        ("batch", "the snapshot was taken with 24, this run has 12"),
        ("group", "was not one group in the snapshot"),
    ],
)
def test_what_can_not_go_on_is_said(change: str, message: str) -> None:
    assert message in run_ranks(refusal_of, 1, 120.0, change)[0]
