"""Scripts build this generation's layout, whatever they say; what would be lost is refused."""

from functools import partial
from pathlib import Path

import pytest

from tenplex_megatron.testing.spawn import run_ranks
from tests.dist.deepspeed_scripts import (
    SCRIPTS,
    losses_seen,
    partitioned,
    said_of,
    stages_built,
    steps_of_named_model,
    teacher_weights,
)

TIMEOUT_S = 60


pytestmark = pytest.mark.usefixtures("deepspeed_fork_server")


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_would_be_lost_or_another_training_is_refused(name: str) -> None:
    (said,) = run_ranks(said_of, 1, TIMEOUT_S, name, "DP1")
    assert SCRIPTS[name][1] in said


def test_a_model_with_a_method_of_an_engines_name_is_seen() -> None:
    assert run_ranks(steps_of_named_model, 1, TIMEOUT_S) == [[1, 2, 3]]


def test_the_loss_of_a_step_is_its_mean_whoever_divides_by_the_accumulation() -> None:
    ((first, *others),) = run_ranks(losses_seen, 1, TIMEOUT_S)
    assert first != 0
    assert others == pytest.approx([first, first])


@pytest.mark.parametrize("trains", [False, True], ids=["no optimizer", "an optimizer"])
def test_a_teacher_keeps_its_checkpoint_where_a_snapshot_follows(
    tmp_path: Path, *, trains: bool
) -> None:
    before, after = (
        run_ranks(partial(teacher_weights, follows=follows, trains=trains), 1, TIMEOUT_S, tmp_path)
        for follows in (False, True)
    )
    assert before == after


@pytest.mark.parametrize(("layout", "stages"), [("PP1,DP2", 1), ("PP2,DP1", 2)])
def test_a_pipeline_has_the_stages_of_the_layout(layout: str, stages: int) -> None:
    assert run_ranks(stages_built, 2, TIMEOUT_S, layout) == [[stages] * 3] * 2


@pytest.mark.parametrize(
    ("layout", "stage", "is_cut"),
    [("DP2", 3, True), ("DP2,ZERO1", 3, False), ("DP2,ZERO3", 3, True)],
)
def test_weights_are_cut_as_they_are_made_if_the_layout_says_so(
    layout: str, stage: int, *, is_cut: bool
) -> None:
    assert run_ranks(partitioned, 2, TIMEOUT_S, layout, stage) == [[is_cut, True, is_cut]] * 2
