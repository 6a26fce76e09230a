"""Calculon gets the same rows in its own words; its numbers need a checkout in CALCULON_DIR."""

import os
from pathlib import Path

import bench_planner
import calculon_side
import pytest
import yaml
from planner_score import Split
from published_rows import Row, read_rows

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TABLES = yaml.load(bench_planner.TABLES.read_text(), Loader=LOADER)["tables"]
ROWS: list[Row] = [
    row
    for name in ("vtrain_single_node_a100", "vtrain_multi_node_a100")
    for row in read_rows(name, TABLES[name])[0]
]


def test_every_device_has_a_place_and_groups_in_a_node_use_its_network() -> None:
    for row in ROWS:
        said = calculon_side.execution(row)
        tp, dp, pp = (said[f"{axis}_par"] for axis in ("tensor", "data", "pipeline"))
        assert tp * dp * pp == said["num_procs"] == row.strategy.layout.world_size
        nets = [said[f"{axis}_par_net"] for axis in ("tensor", "data", "pipeline")]
        assert nets == [int(tp > 8), int(tp * dp > 8), int(tp * dp * pp > 8)]
        model = calculon_side.application(row)
        assert model["attn_heads"] * model["attn_size"] == model["hidden"]


def test_a_folder_without_calculon_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CALCULON_DIR", str(tmp_path))
    with pytest.raises(SystemExit):
        bench_planner.main(["--quick", "--csv", str(tmp_path / "rows.csv")])
    assert f"expected a checkout of Calculon, got {tmp_path}" in capsys.readouterr().err


@pytest.mark.skipif("CALCULON_DIR" not in os.environ, reason="needs Calculon in CALCULON_DIR")
def test_one_factor_is_right_for_a_row_that_calibrates_itself() -> None:
    row = ROWS[0]
    found, scored = calculon_side.compare(Path(os.environ["CALCULON_DIR"]), [Split([row], [row])])
    assert "one factor" in found["system"]
    assert scored.predicted_s == pytest.approx([row.step_s])
