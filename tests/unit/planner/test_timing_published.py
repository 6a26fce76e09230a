"""Published iterations: predictions may not drift from what was measured."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_planner", SCRIPTS / "bench_planner.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["bench_planner"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(SCRIPTS))
    lines: list[str] = []
    patch.setattr("builtins.print", lines.append)
    rows = tmp_path_factory.mktemp("bench") / "rows.csv"
    assert load_bench().main(["--quick", "--json", "--csv", str(rows)]) == 0
    patch.undo()
    tables: dict[str, Any] = json.loads(lines[-1])["tables"]
    counted = sum(table["time_error_pct"]["rows"] for table in tables.values())
    assert len(rows.read_text().splitlines()) == counted + 1
    return tables


@pytest.mark.parametrize(
    ("table", "statistic", "most"),
    [
        ("megatron_sc21_table1", "mean", 6),
        ("megatron_sc21_table1", "max", 12),
        ("megatron_sc21_table2_ptdp", "mean", 6),
        ("megatron_sc21_table2_ptdp", "max", 12),
        ("megatron_sc21_table2_zero3", "mean", 12),
        ("vtrain_multi_node_a100", "mean", 9),
        ("vtrain_multi_node_a100", "median", 7),
        ("vtrain_single_node_a100", "mean", 8),
        ("simumax_b200_time_and_memory", "mean", 5),
        ("mlperf_v3_0_gpt3_175b_h100_fp8", "mean", 8),
    ],
)
def test_predicted_times_are_near_the_measured(
    report: dict[str, Any], table: str, statistic: str, most: float
) -> None:
    assert report[table]["time_error_pct"][statistic] <= most


def test_a_row_whose_memory_contradicts_its_batch_is_told_apart(report: dict[str, Any]) -> None:
    sailor = report["sailor_gh200_time_and_memory"]
    assert len(sailor["contradictions"]) == 1
    assert sailor["time_error_pct_without_contradictions"]["mean"] <= 10


def test_choosing_by_prediction_costs_little(report: dict[str, Any]) -> None:
    single = report["vtrain_single_node_a100"]
    assert single["regret_pct"]["mean"] <= 5.5
    assert single["regret_pct"]["top3_mean"] <= 2.5
    assert single["spearman"] >= 0.94
    assert report["vtrain_multi_node_a100"]["regret_pct"]["max"] <= 5
