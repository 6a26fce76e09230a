from pathlib import Path

import pytest

from tenplex_megatron.config import ElasticPolicy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.control import (
    PlannedChange,
    StepControl,
    ask,
    fresh_folder,
    read_accepted,
)
from tenplex_megatron.elastic.generation import ENVIRONMENT_VARIABLE, GenerationSpec
from tenplex_megatron.elastic.records import Source


def spec(folder: Path, *, gpus: int = 8, version: int | None = None) -> GenerationSpec:
    return GenerationSpec(
        job="j",
        identity="i",
        generation=2,
        cause="c",
        layout=ParallelLayout(tp=2, pp=2, dp=2),
        gpus=gpus,
        node="a",
        nodes=("a", "b"),
        store=folder,
        policy=folder / "p.yaml",
        rundir=folder,
        control=folder,
        source=None if version is None else Source(version, 1, 2, {0: "a", 1: "b"}),
        times={"event": 1.5},
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def control(folder: Path, schedule: dict[int, int], **where: int) -> StepControl:
    return StepControl(spec(folder, **where), ElasticPolicy(schedule=schedule), clock=Clock())


def test_the_schedule_speaks_after_its_step_only(tmp_path: Path) -> None:
    steps = control(tmp_path, {3: 4})
    answers = [steps.pending(step) for step in range(1, 6)]
    assert answers == [
        None,
        None,
        PlannedChange(4, 3, "schedule: 4 devices after step 3"),
        None,
        None,
    ]


def test_an_entry_that_is_fulfilled_already_is_passed_over(tmp_path: Path) -> None:
    assert control(tmp_path, {3: 4}, gpus=4).pending(3) is None


def test_an_entry_is_not_repeated_by_the_generation_it_led_to(tmp_path: Path) -> None:
    steps = control(tmp_path, {3: 4}, gpus=8, version=3)
    assert [steps.pending(step) for step in (4, 5)] == [None, None]


def test_an_entry_is_due_again_after_the_job_fell_behind_it(tmp_path: Path) -> None:
    assert control(tmp_path, {3: 4}, version=2).pending(3) is not None


def test_skipped_steps_do_not_hide_an_entry(tmp_path: Path) -> None:
    answer = control(tmp_path, {3: 4, 5: 2}).pending(7)
    assert answer is not None
    assert answer.gpus == 2


def test_a_request_is_found_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    clock = Clock()
    steps = StepControl(spec(tmp_path), ElasticPolicy(), clock=clock)
    assert steps.pending(1) is None
    ask(tmp_path, '{"gpus": 4, "cause": "request", "request": "r"}')
    clock.now = 0.05
    assert steps.pending(2) is None
    clock.now = 0.1
    assert steps.pending(3) == PlannedChange(4, 3, "request", "r")


def test_the_agent_reads_what_rank_0_accepted(tmp_path: Path) -> None:
    assert read_accepted(tmp_path, "a") is None
    control(tmp_path, {}).accept(PlannedChange(4, 3, "request", "r"))
    change = read_accepted(tmp_path, "a")
    assert change is not None
    assert (change.kind, change.gpus, change.step, change.request) == ("planned", 4, 3, "r")


def test_a_generation_reaches_the_worker_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (None, 6):
        sent = spec(tmp_path, version=version)
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, sent.to_json())
        assert GenerationSpec.from_environment() == sent
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert GenerationSpec.from_environment() is None


def test_a_generation_obeys_nothing_an_earlier_job_was_told(tmp_path: Path) -> None:
    folder = fresh_folder(tmp_path / "generation-2")
    ask(folder, '{"gpus": 4, "cause": "request", "request": "1"}')
    (folder / "accepted.json").write_text('{"gpus": 4, "step": 5, "cause": "x", "time": 0}')
    assert fresh_folder(folder) == folder
    assert read_accepted(folder, "a") is None
    assert not list(folder.iterdir())
