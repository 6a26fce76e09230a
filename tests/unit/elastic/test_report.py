import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.report import (
    failure,
    read_run,
    read_runs,
    read_samples,
    summarise_changes,
)
from tenplex_megatron.errors import ConfigError

START = "the job starts"
ONE, TWO = "TP1,PP1,DP1", "TP1,PP1,DP2"


def decided(
    time: float, generation: int, layout: str, *, cause: str = START, **fields: object
) -> list[dict[str, Any]]:
    """What the two nodes say about a generation."""
    event: dict[str, Any] = {
        "generation": generation,
        "kind": "decided",
        "layout": layout,
        "cause": cause,
    }
    event |= {"nodes": ["a", "b"], "version": None} | fields
    return [{"time": time, "node": "a"} | event, {"time": time + 0.1, "node": "b"} | event]


def marks(time: float, generation: int, *kinds: str) -> list[dict[str, Any]]:
    return [
        {"time": time + number, "generation": generation, "kind": kind, "node": "a"}
        for number, kind in enumerate(kinds)
    ]


def finished(time: float, generation: int, code: int, *nodes: str, reason: str = "") -> list[Any]:
    event: dict[str, Any] = {"time": time, "generation": generation, "kind": "finished"}
    return [event | {"node": node, "code": code, "reason": reason} for node in nodes]


BEGIN = ("started", "built", "imported", "first_step")


def one_start(time: float, first: int, *, version: int | None = None) -> list[dict[str, Any]]:
    """A start that is killed once and finishes."""
    step = (version or 0) + 2
    return [
        *decided(time, first, TWO, version=version),
        *marks(time + 1, first, *BEGIN, "killed", "detected", "stopped"),
        *decided(time + 8, first + 1, ONE, cause="a kill", version=step),
        *marks(time + 9, first + 1, *BEGIN),
        *finished(time + 13, first + 1, 0, "a", "b"),
    ]


def rows(generation: int, steps: Iterable[int], loss: float) -> list[dict[str, Any]]:
    return [{"step": s, "generation": generation, "losses": {"lm": loss + s}} for s in steps]


def write(folder: Path, name: str, lines: Iterable[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder


@pytest.mark.parametrize("second", [1, 3], ids=["numbers begin again", "numbers go on"])
def test_each_start_of_a_job_has_its_own_changes(tmp_path: Path, second: int) -> None:
    version = 4 if second == 3 else None
    write(tmp_path, "events.jsonl", one_start(0, 1) + one_start(1000, second, version=version))
    begun = version or 0
    write(tmp_path, "losses.jsonl", [*rows(1, range(1, 4), 0), *rows(2, range(3, 5), 0)])
    later = range(begun + 1, begun + 5)
    write(tmp_path, "losses.jsonl", rows(second, later[:3], 100) + rows(second + 1, later[2:], 100))
    runs = read_runs([tmp_path])
    for run, step in zip(runs, (2, begun + 2), strict=True):
        (change,) = summarise_changes(run)
        assert (change.source, change.target) == (
            ParallelLayout.parse(TWO),
            ParallelLayout.parse(ONE),
        )
        assert (change.step, change.steps_lost, change.cause) == (step, 1, "a kill")
        assert sum(change.seconds.values()) == 7
    assert runs[0].losses == {step: step for step in range(1, 5)}
    kept = {step: step for step in range(1, begun + 1)}
    assert runs[1].losses == kept | {step: 100 + step for step in later}


def test_a_folder_with_one_start_is_read_like_a_whole_course(tmp_path: Path) -> None:
    write(tmp_path, "events.jsonl", one_start(0, 1))
    write(tmp_path, "losses.jsonl", rows(1, range(1, 4), 0) + rows(2, range(3, 5), 0))
    (run,) = read_runs([tmp_path])
    assert run == read_run([tmp_path])


def test_a_start_that_ends_before_its_first_generation_counts(tmp_path: Path) -> None:
    reason = "schedule.3: no layout"
    write(tmp_path, "events.jsonl", one_start(0, 1) + finished(100, 0, 2, "a", "b", reason=reason))
    write(tmp_path, "events.jsonl", one_start(200, 3, version=4))
    runs = read_runs([tmp_path])
    assert [failure(run) for run in runs] == [None, reason, None]
    assert [len(summarise_changes(run)) for run in runs] == [1, 0, 1]


def test_a_node_that_the_others_gave_up_is_no_start(tmp_path: Path) -> None:
    events = one_start(0, 1)
    write(tmp_path, "events.jsonl", events + finished(20, 0, 1, "c", reason="waited 300 s"))
    (run,) = read_runs([tmp_path])
    assert failure(run) is None


def test_another_set_of_nodes_is_another_start(tmp_path: Path) -> None:
    first, (_, other) = decided(0, 1, TWO)[:1], decided(100, 1, TWO, nodes=["b", "c"])
    write(tmp_path, "events.jsonl", [*first, other])
    assert len(read_runs([tmp_path])) == 2


def test_losses_go_past_a_start_that_finished_no_step(tmp_path: Path) -> None:
    failed = [*decided(0, 1, TWO), *finished(5, 1, 1, "a", reason="broken")]
    write(tmp_path, "events.jsonl", failed + one_start(100, 1))
    write(tmp_path, "losses.jsonl", rows(1, range(1, 3), 0))
    first, second = read_runs([tmp_path])
    assert (failure(first), first.losses) == ("broken", {})
    assert second.losses == {1: 1, 2: 2}


@pytest.mark.parametrize("second", [1, 2], ids=["numbers begin again", "numbers go on"])
def test_samples_are_those_of_the_start(tmp_path: Path, second: int) -> None:
    version = 2 if second == 2 else None
    for start, number in ((0, 1), (100, second)):
        events = decided(start, number, ONE, version=version if start else None)
        write(tmp_path, "events.jsonl", [*events, *marks(start + 1, number, *BEGIN)])
    begun = version or 0
    steps = range(begun + 1, begun + 3)
    write(tmp_path, "losses.jsonl", rows(1, range(1, 4), 0) + rows(second, steps, 0))
    write(tmp_path, "samples-0001-00000.jsonl", [[0, [1]], [1, [2]], [2, [3]]])
    name = f"samples-{second:04d}-00000.jsonl"
    write(tmp_path, name, [[begun, [11]], [begun + 1, [12]]])
    first, newest = (read_samples(tmp_path, run, batch_size=1) for run in read_runs([tmp_path]))
    assert first == {1: (1,), 2: (2,), 3: (3,)}
    kept = {1: (1,), 2: (2,)} if version else {}
    assert newest == kept | {begun + 1: (11,), begun + 2: (12,)}


def test_a_folder_without_events_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run folder"):
        read_runs([tmp_path])
