"""How far are the planner's predictions from published measurements, and how good its choices?

Reads tables in the format of tests/golden/measured_tables.yaml; tables it has no reader for are
named, and so are rows it can't read. "Not fitted" uses the profile in configs/cluster as it is; the
others calibrate it on rows that are then left out of the score: another model's rows, a few rows
drawn with fixed seeds, or one parameter on all rows but one. The profiles of A100, B200, GH200 and
H100 were set with the shipped tables in view, so only other rows are an independent check. Memory
is never fitted.

The last line is JSON: {"tables": {name: {"rows", "time_error_pct", "memory_error_pct",
"regret_pct", "spearman", "unread", ...}}, "speed"}. A table of several kinds of runs holds the same
for each of them under "by_<column>". The CSV has one line per time or memory scored, in seconds or
bytes. CALCULON_DIR may name a checkout of github.com/calculon-ai/calculon to compare with.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import calculon_side
import numpy as np
import planner_speed
import yaml
from planner_score import (
    Floats,
    Rows,
    Scored,
    Splits,
    drawn,
    one_model_out,
    one_row_out,
    sentence,
    spread,
    unfitted,
)
from published_rows import READERS, Fields, Row, read_rows

from tenplex_megatron.config import load_profile
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.memory.predict import predict_memory
from tenplex_megatron.planner.timing.calibrate import CONSTANTS, Constant, calibrate
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests/golden/measured_tables.yaml"
CSV = ROOT / "out/planner/rows.csv"
HEADER = (
    *("table", "quantity", "draw", "row", "layers", "hidden", "seq", "layout"),
    *("global_batch_size", "measured", "predicted", "error_pct", "contradiction"),
)
DRAWS = 5
SHOWN = 3
"""Causes for which rows can't be read on the screen; JSON names all, with their rows."""
RATE = [constant for constant in CONSTANTS if constant.name == "gemm_efficiency"]


@dataclass(frozen=True)
class Plan:
    """How one table is predicted."""

    cluster: str
    how: str = "not fitted"
    splits: Splits = unfitted
    constants: Sequence[Constant] = CONSTANTS
    """What calibration moves."""
    kinds: str | None = None
    """What the kinds of rows are, which are also scored one by one."""
    beside_calculon: bool = False


PLANS: Mapping[str, Plan] = {
    "megatron_sc21_table1": Plan("a100_selene"),
    "megatron_sc21_table2_zero3_vs_ptdp": Plan("a100_selene", kinds="scheme"),
    "megatron_readme_gpt3_175b_1024": Plan("a100_selene"),
    "vtrain_multi_node_a100": Plan(
        "a100_vtrain", "one model left out", one_model_out, beside_calculon=True
    ),
    "vtrain_single_node_a100": Plan(
        "a100_vtrain", "24 rows calibrate", drawn(24), beside_calculon=True
    ),
    "simumax_b200_time_and_memory": Plan(
        "b200", "one parameter from the others of its kind", one_row_out, RATE, kinds="kind"
    ),
    "sailor_gh200_time_and_memory": Plan("gh200", "3 rows calibrate", drawn(3)),
    "megatron_functional_test_memory": Plan("h100"),
    "nemo_24_07_h100_fp8_pretrain": Plan("h100", "profile set on these rows"),
    "mlperf_v3_0_gpt3_175b_h100_fp8": Plan("h100", "profile set on these rows"),
    "megatron_bridge_performance": Plan("h100"),
}
assert PLANS.keys() == READERS.keys()


class Prediction(NamedTuple):
    """One scored number: seconds of a step, or bytes on a rank."""

    quantity: str
    row: Row
    measured: float
    predicted: float
    draw: int


def score(
    plan: Plan, rows: Rows, draws: int, calculon: Path | None = None
) -> tuple[dict[str, Any], list[Prediction]]:
    """Everything said about rows, and the predictions behind it."""
    cluster = load_profile(ClusterProfile, ROOT / "configs/cluster" / f"{plan.cluster}.yaml")

    def predict(calibrating: Rows, scored: Rows) -> Floats:
        seen = [row.measurement for row in calibrating]
        fitted = calibrate(cluster, seen, plan.constants) if seen else cluster
        candidates = Candidates.of_pairs([(row.model, row.strategy) for row in scored])
        return predict_times(fitted, candidates).step_s

    result: dict[str, Any] = {"cluster": plan.cluster, "how": plan.how, "rows": len(rows)}
    found = []
    if timed := [row for row in rows if row.step_s is not None]:
        splits = list(plan.splits(timed, draws))
        scored = Scored.of(splits, predict)
        result |= scored.summary()
        found += as_predictions("time", scored)
        if plan.beside_calculon and calculon is not None:
            result["calculon"], theirs = calculon_side.compare(calculon, splits)
            found += as_predictions("time by Calculon", theirs)
    memory = list(memories(cluster, rows))
    if memory:
        errors = [100.0 * (each.predicted / each.measured - 1.0) for each in memory]
        result["memory_error_pct"] = spread(np.array(errors))
    return result, found + memory


def as_predictions(quantity: str, scored: Scored) -> list[Prediction]:
    """The predictions of times."""
    return [
        Prediction(quantity, row, row.measurement.step_s, predicted, draw)
        for row, predicted, draw in zip(scored.rows, scored.predicted_s, scored.draws, strict=True)
    ]


def memories(cluster: ClusterProfile, rows: Rows) -> Iterator[Prediction]:
    """The memory of rows that say it."""
    for row in rows:
        if row.memory_bytes is not None:
            found = predict_memory(row.model, cluster, row.strategy)
            predicted = found.stages[-1].total if row.is_last_rank else found.peak_bytes
            yield Prediction("memory", row, row.memory_bytes, predicted, 0)


def score_table(
    name: str, table: Fields, draws: int, calculon: Path | None
) -> tuple[dict[str, Any], list[Prediction]]:
    """Everything said about a table, its kinds of runs one by one too."""
    plan = PLANS[name]
    rows, unread = read_rows(name, table)
    result, found = score(plan, rows, draws, calculon)
    result["unread"] = unread
    if plan.kinds:
        kinds = dict.fromkeys(row.kind for row in rows)
        result[f"by_{plan.kinds}"] = {
            kind: score(plan, [row for row in rows if row.kind == kind], draws)[0] for kind in kinds
        }
    return result, found


def write_csv(path: Path, tables: Mapping[str, list[Prediction]]) -> None:
    """One line per scored number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for name, predictions in tables.items():
            for quantity, row, measured, predicted, draw in predictions:
                model, chosen = row.model, row.strategy
                what = row.name, model.num_layers, model.hidden_size, model.seq_length
                where = str(chosen.layout), chosen.global_batch_size
                error = f"{100 * (predicted / measured - 1):.2f}"
                numbers = f"{measured:.6g}", f"{predicted:.6g}", error
                writer.writerow(
                    [name, quantity, draw, *what, *where, *numbers, row.contradiction or ""]
                )


def show(name: str, result: Fields) -> None:
    """One table for a person."""
    print(f"{name} ({result['rows']} rows, {result['cluster']}, {result['how']})")
    if "time_error_pct" in result:
        print(f"   {sentence(result)}")
    if "time_error_pct_without_contradictions" in result:
        sound = result["time_error_pct_without_contradictions"]
        print(f"   time  mean {sound['mean']:.2f}  max {sound['max']:.2f} % without rows whose")
        print("   " + "; ".join(result["contradictions"]))
    if "calculon" in result:
        theirs = result["calculon"]
        print(f"   Calculon ({theirs['system']}): {sentence(theirs)}")
    if "memory_error_pct" in result:
        error = result["memory_error_pct"]
        text = "  ".join(f"{key} {error[key]:.2f}" for key in ("mean", "median", "max", "lowest"))
        print(f"   memory of {error['rows']:.0f} rows  {text} %")
    for key, parts in result.items():
        if key.startswith("by_"):
            for kind, part in parts.items():
                print(f"   {kind}: {sentence(part)}")
    if result["unread"]:
        causes = sorted(result["unread"].items(), key=lambda cause: -len(cause[1]))
        shown = "; ".join(f"{why} (row {numbers[0]})" for why, numbers in causes[:SHOWN])
        print(f"   {sum(len(numbers) for _, numbers in causes)} rows not read: {shown}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=Path, default=TABLES, help="YAML (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    parser.add_argument("--quick", action="store_true", help="one draw of calibration rows, not 5")
    parser.add_argument("--csv", type=Path, default=CSV, help="errors per row (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="growth of the search")
    options = parser.parse_args(arguments)
    say: Callable[[str], None] = (lambda _: None) if options.json else print
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tables = yaml.load(options.tables.read_text(encoding="utf-8"), Loader=loader)["tables"]
    folder = os.environ.get("CALCULON_DIR")
    calculon = Path(folder) if folder else None
    if calculon is None:
        say("Calculon is not compared: CALCULON_DIR names no checkout of it.")
    elif not (calculon / "calculon/llm").is_dir():
        parser.error(f"CALCULON_DIR: expected a checkout of Calculon, got {calculon}")
    results, predictions = {}, {}
    for name in [name for name in PLANS if name in tables]:
        results[name], predictions[name] = score_table(
            name, tables[name], 1 if options.quick else DRAWS, calculon
        )
        if not options.json:
            show(name, results[name])
    others = [name for name in tables if name not in PLANS]
    write_csv(options.csv, predictions)
    measured = planner_speed.measure(quick=options.quick)
    say(f"tables without a reader: {', '.join(others) or 'none'}")
    say(f"errors per row: {options.csv}")
    say(planner_speed.text(measured))
    if options.plot is not None:
        planner_speed.draw(measured["growth"], options.plot)
    print(json.dumps({"tables": results, "unread_tables": others, "speed": measured}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
