"""The live state of a DeepSpeed engine goes from any stage and world to any other, bit for bit."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from check_deepspeed import (
    Check,
    Report,
    all_checks,
    difference_of,
    reason_of,
    run_check,
)
from deepspeed_engines import OPTIMIZERS, build
from deepspeed_models import BATCH, Job
from deepspeed_worlds import Outcome, prepare_rank, run_sources, run_targets, train

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.testing.spawn import run_ranks
from tests.dist.deepspeed_bodies import (
    boxes_beside_deepspeed,
    first_samples,
    refusals,
    scales_around_a_checkpoint,
    snapshot_within_window,
    unlike_fresh_masters,
)

QUICK = {check.title: check for check in all_checks(quick=True)}
# What these two have on top is covered by "BF16 optimizer" and the tests below, in less time.
LONGER = ("ZeRO bf16", "ZeRO fp16")


pytestmark = pytest.mark.usefixtures("deepspeed_fork_server")


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
    scaled = replace(source, scale=(2.0, 1, 0))
    assert reason_of(source, scaled) == "loss scale (2.0, 1, 0) instead of ()"
    assert difference_of(source, target) == 0.5


@pytest.mark.parametrize("title", [title for title in QUICK if title not in LONGER])
def test_every_pair_of_the_quick_check_is_exact(title: str, store_directory: Path) -> None:
    assert_exact(run_check(QUICK[title], store_directory))


def test_the_quick_check_has_every_optimizer_from_every_stage_and_to_every_stage() -> None:
    pairs = QUICK["optimizers"].pairs
    assert {a.optimizer for a, b in pairs if a.optimizer == b.optimizer} == OPTIMIZERS.keys()
    for side in zip(*pairs, strict=True):
        assert {job.layout.zero_stage for job in side} == {0, 1, 2, 3}


def test_half_precision_goes_to_every_stage(store_directory: Path) -> None:
    sources = [zero(stage, 2, precision="fp16") for stage in (0, 1, 3)]
    targets = [zero(stage, 1, precision="fp16") for stage in range(4)]
    pairs = tuple(itertools.product(sources, targets))
    assert_exact(run_check(Check("kinds", pairs, 0.02, 1), store_directory))


def test_sixteen_bit_masters_keep_the_state_of_every_optimizer(store_directory: Path) -> None:
    # Without ZeRO DeepSpeed takes a step at its start; numbers of that step travel too.
    stages = {"nadam": (0, 1), "asgd": (1, 0), "rprop": (2, 0), "damped-sgd": (0, 3)}
    pairs = tuple(
        (
            zero(one, 2, precision="bf16", optimizer=name),
            zero(other, 3, precision="bf16", optimizer=name),
        )
        for name, (one, other) in stages.items()
    )
    assert_exact(run_check(Check("bf16 optimizers", pairs, 0.02, 1), store_directory))


def unlike_without_elasticity(rank: int, jobs: list[Job]) -> list[str]:
    """Jobs whose first losses are others once their state is described."""
    from tenplex_megatron.adapters.deepspeed.state import DeepSpeedState

    prepare_rank(rank)
    wrong = []
    for job in jobs:
        plain, elastic = build(job, seed=1), build(job, seed=1)
        DeepSpeedState(elastic)
        if train(plain, 3) != train(elastic, 3):
            wrong.append(job.name)
    return wrong


def test_the_first_steps_are_those_of_a_job_that_is_not_elastic() -> None:
    kinds = (("damped-sgd", 1), ("damped-sgd", 3), ("asgd", 2), ("rprop", 3), ("nadam", 0))
    jobs = [zero(stage, 1, optimizer=optimizer) for optimizer, stage in kinds]
    assert run_ranks(unlike_without_elasticity, 1, 120.0, jobs) == [[]]


def test_sixteen_bit_pipelines_go_to_each_other(store_directory: Path) -> None:
    kind = {"model": "pipeline", "precision": "bf16"}
    one, other = (Job(ParallelLayout(pp=2, zero_stage=stage), **kind) for stage in (0, 1))
    check = Check("pipelines", ((one, other), (other, one)), 0.02, 1)
    assert_exact(run_check(check, store_directory))


def test_words_that_are_cut_unevenly_go_to_other_cuts(store_directory: Path) -> None:
    shapes = ({"tp": 2, "zero_stage": 1}, {"tp": 4, "zero_stage": 3}, {"zero_stage": 0})
    jobs = [Job(ParallelLayout(**shape), model="vocabulary") for shape in shapes]
    pairs = tuple(itertools.pairwise(jobs))
    assert_exact(run_check(Check("vocabulary", pairs), store_directory))


def test_samplers_follow_the_axes_of_the_layout() -> None:
    job = Job(ParallelLayout(tp=2, dp=2, zero_stage=1), model="split")
    first, same, second, same_again = run_ranks(first_samples, 4, 120.0, job)
    assert (first, second) == (same, same_again)
    assert sorted(first + second) == list(range(BATCH))


def test_a_job_with_dropout_goes_on_bit_for_bit_where_the_world_stays(
    store_directory: Path,
) -> None:
    source, target = zero(1, 2, dropout=0.2), zero(2, 2, dropout=0.2)
    trained = run_ranks(run_sources, 2, 120.0, store_directory, [source])
    resumed = run_ranks(run_targets, 2, 120.0, store_directory, [(source, target)], 5)
    assert resumed == trained
    assert trained[0][0].streams != trained[1][0].streams


@pytest.mark.parametrize("world", [2, 3])
def test_every_fresh_weight_is_its_master_in_its_type(world: int) -> None:
    kinds = [(stage, options) for stage in (1, 2) for options in ("", "round-robin", "aligned")]
    jobs = [
        zero(stage, world, precision=precision, options=options)
        for stage, options in [*kinds, (3, "")]
        for precision in ("fp32", "bf16")
    ]
    jobs.append(zero(1, world, precision="bf16-fp32-grads"))
    assert run_ranks(unlike_fresh_masters, world, 120.0, jobs) == [[]] * world


def test_other_configurations_of_zero_go_to_each_other(store_directory: Path) -> None:
    robin = [zero(stage, world, options="round-robin") for stage, world in ((1, 2), (2, 3))]
    offloaded = [zero(stage, 2, options="offloaded") for stage in (1, 2, 3)]
    pairs = (
        (robin[0], zero(1, 3, options="round-robin")),
        (robin[1], zero(2, 2, options="round-robin")),
        (zero(2, 2, options="round-robin"), zero(0, 1)),
        (robin[0], zero(2, 3, options="aligned")),
        (zero(1, 2, options="aligned"), zero(3, 3)),
        *((one, zero(3, 3, options="offloaded")) for one in offloaded),
        *((zero(3, 2), one) for one in offloaded[:2]),
    )
    assert_exact(run_check(Check("configurations", pairs), store_directory))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_box_is_what_deepspeed_says_of_the_whole_tensor(stage: int, precision: str) -> None:
    job = zero(stage, 3, precision=precision)
    assert run_ranks(boxes_beside_deepspeed, 3, 120.0, job) == [[], [], []]


def test_the_loss_scale_is_that_of_a_loaded_checkpoint(tmp_path: Path) -> None:
    saved, before, loaded = run_ranks(scales_around_a_checkpoint, 1, 120.0, tmp_path)[0]
    assert saved == loaded != before


def test_an_export_within_an_accumulation_window_is_refused_and_possible_after_it() -> None:
    message, step = run_ranks(snapshot_within_window, 1, 120.0, zero(1, 1))[0]
    assert message.startswith("a snapshot was asked for after 1 of 2 micro-batches of step 2")
    assert step == 2


REFUSALS = {
    "nothing": "nothing",
    "no optimizer": "the engine has no optimizer",
    "random_ltd": "random_ltd: it keeps state of its own that is not carried",
    "autocast": "torch_autocast in float16: it keeps state of its own",
    "nvme": "ZeRO stage 3 offloads to NVMe",
    "partial offload": "offload_optimizer.ratio is 0.5",
    "transposed": "frozen: a tensor of shape (5, 7) has strides (1, 5)",
    "expanded": "block.scale: a tensor of shape (7,) has strides (0,)",
    "moved": "a parameter of shape (1,) has left the memory that DeepSpeed keeps its group in",
    "sharded": "adapted: its base weight is split over 2 ranks",
    "stranger": "a parameter of shape (3,) is trained but is not one of the engine's module",
    "mpu": "the model is split over 2 ranks by an mpu of its own",
    "sequences": "sequences are split over 2 ranks, and no layout says so",
    "batch": "the snapshot was taken with 24, this run has 12",
    "group": "was not one group in the snapshot",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return run_ranks(refusals, 1, 120.0, list(REFUSALS))[0]


@pytest.mark.parametrize("change", REFUSALS)
def test_what_can_not_go_on_is_said(change: str, said: dict[str, str]) -> None:
    assert REFUSALS[change] in said[change]
