"""The main job, as the README shows it: four layouts, one killed rank, the same loss curve."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, str(ROOT / "scripts/demo.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found


def sizes(layout: dict[str, Any]) -> tuple[int, int, int]:
    return layout["tp"], layout["pp"], layout["dp"]


def test_losses_and_samples_are_those_of_the_uninterrupted_run(report: dict[str, Any]) -> None:
    assert report["max_abs_loss_difference"] <= 2e-5
    assert report["sample_order_equal"] is True
    assert report["uninterrupted"]["losses"].keys() == report["elastic"]["losses"].keys()
    assert report["state_bit_equal"] is True


def test_the_job_changes_every_axis_loses_a_rank_and_grows_back(report: dict[str, Any]) -> None:
    changes = report["changes"]
    assert [sizes(change["from"]) for change in changes] == [(2, 2, 2), (1, 4, 1), (1, 1, 3)]
    assert [sizes(change["to"]) for change in changes] == [(1, 4, 1), (1, 1, 3), (2, 2, 2)]
    planned, killed, grown = changes
    assert planned["steps_lost"] == grown["steps_lost"] == 0
    assert "signal 9" in killed["cause"]
    assert killed["steps_lost"] <= 3


def test_bytes_counted_at_the_receivers_are_the_least_possible(report: dict[str, Any]) -> None:
    for change in report["changes"]:
        assert change["bytes_moved"] == change["bytes_lower_bound"] <= change["bytes_total"]
    assert any(change["bytes_moved"] > 0 for change in report["changes"])


def test_every_phase_is_measured(report: dict[str, Any]) -> None:
    for change in report["changes"]:
        seconds = change["seconds"]
        phases = {"detect", "stop", "start", "build", "import", "first_step"}
        assert seconds.keys() == phases | {"total"}
        assert seconds["total"] == pytest.approx(sum(seconds[name] for name in phases))


def test_every_choice_has_its_reason_and_stands_beside_what_was_measured(
    report: dict[str, Any],
) -> None:
    assert all(change["reason"].startswith("predicted ") for change in report["changes"])
    assert all("move between nodes" in change["reason"] for change in report["changes"])
    assert [steps["layout"] for steps in report["steps"]] == [
        "TP2,PP2,DP2",
        "TP1,PP4,DP1",
        "TP1,PP1,DP3",
        "TP2,PP2,DP2",
    ]
    assert all(steps["measured_s"] > 0 and steps["predicted_s"] > 0 for steps in report["steps"])
