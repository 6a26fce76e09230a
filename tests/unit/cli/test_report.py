import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation

from tenplex_megatron.cli.main import main
from tenplex_megatron.cli.report import _draw
from tenplex_megatron.elastic.report import read_runs, summarise_changes

LAYOUTS = ("TP2,PP2,DP2", "TP1,PP4,DP1", "TP1,PP1,DP3")
KILL = "rank 3 (device 1 of node b) ended with signal 9"
CAUSES = ("the job starts", "schedule: 4 devices after step 8", KILL)


def events(
    time: float,
    versions: tuple[int | None, ...],
    *,
    finish: int | None = 0,
    is_predicted: bool = False,
) -> list[dict[str, Any]]:
    """One start of the job: a generation per version."""
    found: list[dict[str, Any]] = []

    def add(generation: int, kind: str, **fields: object) -> None:
        at = time + len(found)
        event: dict[str, Any] = {"time": at, "generation": generation, "kind": kind, "node": "a"}
        found.append(event | fields)

    for number, version in enumerate(versions, start=1):
        layout, cause = LAYOUTS[number - 1], CAUSES[number - 1]
        told = {"reason": f"predicted {number} s per step"} if is_predicted else {}
        add(number, "decided", layout=layout, cause=cause, version=version, nodes=["a"], **told)
        for kind in ("started", "built", "imported", "first_step", "detected", "stopped"):
            add(number, kind)
        if is_predicted:
            add(number, "measured", layout=layout, steps=8, step_s=0.5, predicted_step_s=0.6)
        add(number, "moved", bytes_total=7_880_000, bytes_moved=5_650_000, bytes_lower_bound=0)
    if finish is not None:
        add(len(versions), "finished", code=finish, reason="rank 0 ended; device 1 is broken")
    return found


def run_folder(folder: Path, *starts: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event) for start in starts for event in start]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    rows = [{"step": n, "generation": 1, "losses": {"lm": 5 - n / 10}} for n in range(1, 10)]
    (folder / "losses.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two changes, after a start with another course."""
    return run_folder(tmp_path / "run", events(0, (None, 4)), events(1000, (None, 8, 9)))


def say(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def steps(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[int]:
    changes = json.loads(say(capsys, "--json", *arguments))["changes"]
    return [change["step"] for change in changes]


def test_the_newest_start_is_reported_unless_another_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps(capsys, folder) == [8, 9]
    assert steps(capsys, folder, "--run", "2") == [8, 9]
    assert steps(capsys, folder, "--run", "1") == [4]
    assert "start 2 of 2" in say(capsys, folder)


@pytest.mark.parametrize("number", ["0", "3"])
def test_a_start_that_is_not_there_is_wrong_input(
    folder: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    assert main(["report", str(folder), "--run", number]) == 2
    assert "--run: expected 1 to 2" in capsys.readouterr().err


def test_piped_a_change_is_one_line_with_everything(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (line,) = [line for line in say(capsys, folder).splitlines() if KILL in line]
    cells = re.split(" {2,}", line.strip())
    assert cells[:7] == ["9", LAYOUTS[1], LAYOUTS[2], "0", "7.88 MB", "5.65 MB", "0 B"]
    assert cells[-1] == KILL
    assert len(cells) == 15


@pytest.mark.parametrize("width", [100, 120])
def test_on_a_terminal_a_change_is_two_lines_that_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, *lines = say(capsys, folder, "--run", "2").splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith("after step 8: "))
    assert lines[number] == f"after step 8: {LAYOUTS[0]} -> {LAYOUTS[1]}; {CAUSES[1]}"
    assert lines[number + 1].split()[:3] == ["0", "7.88", "MB"]
    assert max(map(len, lines)) <= 100


def test_without_a_change_there_is_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say(capsys, run_folder(tmp_path, events(0, (None,)))) == "no change of layout\n"


def test_a_failed_job_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, events(0, (None,), finish=1))
    expected = "the job failed: rank 0 ended; device 1 is broken"
    assert say(capsys, run).splitlines() == ["no change of layout", expected]
    assert json.loads(say(capsys, run, "--json"))["failure"] == "rank 0 ended; device 1 is broken"


def test_a_start_without_a_step_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", events(0, (None,))[:1])
    (run / "losses.jsonl").unlink()
    say(capsys, run, "--out", tmp_path / "out")
    assert (tmp_path / "out/loss.png").is_file()


def test_no_dashed_line_crosses_a_label(folder: Path) -> None:
    run = read_runs([folder])[-1]
    changes = summarise_changes(run)
    (axes,) = _draw(run, changes, None).axes
    labels = [one for one in axes.texts if isinstance(one, Annotation)]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert len(labels) == len(dashed) == len(changes) == 2
    for label in labels:
        box = label.get_bbox_patch()
        assert box is not None
        assert box.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        assert label.get_zorder() > max(line.get_zorder() for line in dashed)


def test_what_was_predicted_stands_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path, events(0, (None, 8, 9), is_predicted=True))
    said = say(capsys, folder)
    line = "generation 2, {}: 0.5 s per step in 8 steps, predicted 0.6 s (+20 %)"
    assert line.format(LAYOUTS[1]) in said
    values = json.loads(say(capsys, folder, "--json"))
    assert [change["reason"] for change in values["changes"]] == [
        "predicted 2 s per step",
        "predicted 3 s per step",
    ]
    assert [steps["measured_s"] for steps in values["steps"]] == [0.5, 0.5, 0.5]
