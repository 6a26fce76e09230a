from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.records import StepTime
from tenplex_megatron.elastic.step_times import StepClock, read_step_times
from tests.unit.elastic.test_control import spec

IDENTITY = spec(Path()).identity
UNKNOWN = '{"identity": "", "generation": 2, "layout": {"of": 3}, "steps": 8, "step_s": 1}'
ENDLESS = '{"identity": "", "generation": 2, "layout": {"tp": 3}, "steps": 8, "step_s": Infinity}'


def run(folder: Path, generation: int, *seconds: float) -> None:
    times = accumulate((0.0, *seconds))
    clock = StepClock(replace(spec(folder), generation=generation), clock=lambda: next(times))
    for _ in range(len(seconds) + 1):
        clock.step()


def test_a_row_has_the_median_without_the_first_steps(run_dir: Path) -> None:
    run(run_dir, 3, 1.0, 2.0, 2.0, 30.0, 7.0)
    layout = spec(run_dir).layout
    assert read_step_times(run_dir, IDENTITY) == (StepTime(IDENTITY, 3, layout, 4, 2.0),)


def test_the_last_row_of_every_generation_counts(run_dir: Path) -> None:
    run(run_dir, 1, *[1.0] * 20)
    run(run_dir, 2, *[3.0] * 8)
    found = [(row.generation, row.steps, row.step_s) for row in read_step_times(run_dir, IDENTITY)]
    assert found == [(1, 16, 1.0), (2, 8, 3.0)]


def test_the_first_step_says_nothing(run_dir: Path) -> None:
    assert read_step_times(run_dir, IDENTITY) == ()
    run(run_dir, 1)
    assert read_step_times(run_dir, IDENTITY) == ()


@pytest.mark.parametrize(
    "torn", ['{"generation": 2, "lay', "[]", '{"generation": 2}', UNKNOWN, ENDLESS]
)
def test_a_torn_line_costs_only_itself(run_dir: Path, torn: str) -> None:
    run(run_dir, 1, *[1.0] * 6)
    with (run_dir / "step_times.jsonl").open("a") as file:
        file.write(torn + "\n")
    assert [row.generation for row in read_step_times(run_dir, IDENTITY)] == [1]
    assert isinstance(read_step_times(run_dir, IDENTITY)[0].layout, ParallelLayout)


def test_another_training_under_the_same_name_says_nothing(run_dir: Path) -> None:
    run(run_dir, 1, *[1.0] * 6)
    assert read_step_times(run_dir, IDENTITY)
    assert read_step_times(run_dir, "another") == ()
