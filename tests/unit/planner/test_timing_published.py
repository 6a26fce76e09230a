"""Published iterations: predictions may not drift from what was measured."""

import csv
import json
from pathlib import Path
from typing import Any

import bench_planner
import pytest
import yaml

TABLES: dict[str, Any] = yaml.load(
    bench_planner.TABLES.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
)["tables"]


def run(folder: Path, patch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """What the script's last line says."""
    lines: list[str] = []
    patch.delenv("CALCULON_DIR", raising=False)
    # How fast the planner is has its own test.
    patch.setattr(bench_planner.planner_speed, "measure", lambda **_: {"growth": []})
    patch.setattr(bench_planner.planner_speed, "text", lambda _: "")
    patch.setattr("builtins.print", lines.append)
    assert bench_planner.main(["--quick", "--csv", str(folder / "rows.csv"), *arguments]) == 0
    patch.undo()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    tables: dict[str, Any] = run(folder, pytest.MonkeyPatch(), "--json")["tables"]
    return tables


@pytest.mark.parametrize(
    ("table", "part", "statistic", "most"),
    [
        ("megatron_sc21_table1", None, "mean", 6),
        ("megatron_sc21_table1", None, "max", 12),
        ("megatron_sc21_table2_zero3_vs_ptdp", "by_scheme/ptdp", "mean", 6),
        ("megatron_sc21_table2_zero3_vs_ptdp", "by_scheme/ptdp", "max", 12),
        ("megatron_sc21_table2_zero3_vs_ptdp", "by_scheme/zero3", "mean", 12),
        ("megatron_readme_gpt3_175b_1024", None, "max", 12),
        ("vtrain_multi_node_a100", None, "mean", 9),
        ("vtrain_multi_node_a100", None, "median", 7),
        ("vtrain_single_node_a100", None, "mean", 8),
        ("simumax_b200_time_and_memory", None, "mean", 5),
        ("simumax_b200_time_and_memory", "by_kind/dense", "mean", 5),
        ("mlperf_v3_0_gpt3_175b_h100_fp8", None, "mean", 8),
    ],
)
def test_predicted_times_are_near_the_measured(
    report: dict[str, Any], table: str, part: str | None, statistic: str, most: float
) -> None:
    found = report[table]
    for key in part.split("/") if part else ():
        found = found[key]
    assert found["time_error_pct"][statistic] <= most


def test_predicted_memory_is_near_the_measured(report: dict[str, Any]) -> None:
    b200 = report["simumax_b200_time_and_memory"]["memory_error_pct"]
    assert b200["mean"] <= 1.2
    assert b200["max"] <= 3
    assert b200["lowest"] >= -2.5
    assert report["megatron_functional_test_memory"]["memory_error_pct"]["mean"] <= 8


def test_a_row_whose_memory_contradicts_its_batch_is_told_apart(report: dict[str, Any]) -> None:
    sailor = report["sailor_gh200_time_and_memory"]
    assert len(sailor["contradictions"]) == 1
    assert sailor["time_error_pct_without_contradictions"]["mean"] <= 8


def test_choosing_by_prediction_costs_little(report: dict[str, Any]) -> None:
    single = report["vtrain_single_node_a100"]
    assert single["regret_pct"]["mean"] <= 5.5
    assert single["regret_pct"]["top3_mean"] <= 1.5
    assert single["spearman"] >= 0.94
    assert report["vtrain_multi_node_a100"]["regret_pct"]["max"] <= 5


def test_every_scored_number_has_its_line(report: dict[str, Any], folder: Path) -> None:
    counted = sum(
        table[key]["rows"]
        for table in report.values()
        for key in ("time_error_pct", "memory_error_pct")
        if key in table
    )
    with (folder / "rows.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == counted


def test_every_row_is_read_or_named(report: dict[str, Any]) -> None:
    for name, table in report.items():
        named = sum(map(len, table["unread"].values()))
        assert table["rows"] + named == len(TABLES[name]["rows"])


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("name", bench_planner.PLANS)
def test_few_rows_of_one_table_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    table = TABLES[name] | {"rows": TABLES[name]["rows"][:count]}
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"tables": {name: table}}))
    found = run(tmp_path, monkeypatch, "--tables", str(path))["tables"]
    assert list(found) == [name]
    unread = sum(map(len, found[name]["unread"].values()))
    assert found[name]["rows"] + unread == len(table["rows"])


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("tp", 3, "TP3,PP2,DP2"),
        ("hidden", "wide", "TypeError"),
        ("mbs", 0, "micro batch size"),
        ("iter_ms", -1, "seconds of -0.001"),
        ("iter_ms", None, "TypeError"),
    ],
)
def test_a_row_that_says_nonsense_is_named_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: object, said: str
) -> None:
    name = "vtrain_single_node_a100"
    table = TABLES[name] | {"rows": [list(row) for row in TABLES[name]["rows"][:4]]}
    table["rows"][1][table["columns"].index(column)] = value
    path = tmp_path / "tables.yaml"
    path.write_text(yaml.safe_dump({"tables": {name: table, "unknown": {}}}))
    found = run(tmp_path, monkeypatch, "--tables", str(path))
    assert found["unread_tables"] == ["unknown"]
    assert found["tables"][name]["rows"] == 3
    ((why, numbers),) = found["tables"][name]["unread"].items()
    assert said in why
    assert numbers == [2]


def test_rows_that_calibrate_are_never_scored() -> None:
    rows, _ = bench_planner.read_rows("vtrain_multi_node_a100", TABLES["vtrain_multi_node_a100"])
    for name, plan in bench_planner.PLANS.items():
        splits = list(plan.splits(rows, 3))
        assert splits, name
        for split in splits:
            assert not {id(row) for row in split.calibrating} & {id(row) for row in split.scored}
