"""What was measured changes what is predicted, and nothing it says can end a job."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.calibration import Calibration, measurements
from tenplex_megatron.elastic.messages import step_time_json
from tenplex_megatron.elastic.records import StepTime
from tests.unit.elastic.jobs import small_job

RULES = small_job(ElasticPolicy(layouts=("TP2,PP2",)))
DEVICES = {"a": (0, 1, 2, 3)}
LAYOUT = ParallelLayout(tp=2, pp=2)


def row(steps: int = 8, step_s: float = 1.0, layout: ParallelLayout = LAYOUT) -> StepTime:
    return StepTime("job", 1, layout, steps, step_s)


def write(run_dir: Path, *rows: StepTime) -> None:
    with (run_dir / "step_times.jsonl").open("a") as file:
        file.writelines(json.dumps(step_time_json(one)) + "\n" for one in rows)


def settled(calibration: Calibration) -> None:
    deadline = time.monotonic() + 30
    while calibration.cluster == RULES.cluster:
        calibration.look()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_generation_that_was_slow_makes_the_next_prediction_slower(run_dir: Path) -> None:
    calibration = Calibration(RULES, run_dir, "job")
    predicted_s = RULES.choose(DEVICES).best.step_s
    write(run_dir, row(step_s=10.0 * predicted_s))
    settled(calibration)
    fitted = replace(RULES, cluster=calibration.cluster)
    assert fitted.choose(DEVICES).best.step_s > 2.0 * predicted_s
    calibration.close()


def test_looking_never_waits(run_dir: Path) -> None:
    write(run_dir, *(row(8 << number) for number in range(3)))
    calibration = Calibration(RULES, run_dir, "job")
    calibration.look()
    assert calibration.cluster == RULES.cluster  # the fit is on its way
    settled(calibration)
    calibration.close()


@pytest.mark.parametrize(
    "useless",
    [row(steps=3), row(layout=ParallelLayout(pp=3)), row(layout=ParallelLayout(tp=3, pp=2))],
    ids=["few steps", "stages of 8 layers", "heads"],
)
def test_rows_that_say_nothing_are_passed_over(useless: StepTime) -> None:
    assert measurements(RULES, [useless]) == []
    assert len(measurements(RULES, [useless, row()])) == 1


def test_of_an_unknown_model_nothing_is_learned() -> None:
    unknown = replace(RULES, job=replace(RULES.job, model=None))
    assert measurements(unknown, [row()]) == []
