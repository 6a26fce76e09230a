"""How far are the planner's predictions from published measurements, and how good its choices?

Reads tables in the format of tests/golden/measured_tables.yaml. "Not fitted" uses the profile in
configs/cluster as it is; the others calibrate it on rows that are then left out of the score
(another model's rows, or a few rows drawn with fixed seeds), or one parameter on all rows. The
profiles of A100, B200, GH200 and H100 were set with the shipped tables in view, so only other rows
are an independent check.
"""

import argparse
import csv
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from published_rows import Fields, Row, gpt, h100, sailor, sc21_table1, sc21_table2, simumax, vtrain

from tenplex_megatron.config import load_profile
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.calibrate import CONSTANTS, calibrate
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests/golden/measured_tables.yaml"
LEAST_COMPETING = 4
"""Layouts of one model, GPU count and batch that make a group in which a choice is scored."""

type Floats = NDArray[np.float64]
type Rows = Sequence[Row]


@dataclass
class Scored:
    """Predictions of one table, one line per row and draw of calibration rows."""

    rows: list[Row] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)

    def add(self, rows: Rows, predicted_s: Floats, draw: int = 0) -> None:
        """More scored rows."""
        self.rows.extend(rows)
        self.predicted_s.extend(predicted_s.tolist())
        self.draws.extend([draw] * len(rows))


def predict(cluster: ClusterProfile, rows: Rows) -> Floats:
    """Step times of rows."""
    pairs = [(row.measurement.model, row.measurement.strategy) for row in rows]
    return predict_times(cluster, Candidates.of_pairs(pairs)).step_s


def unfitted(cluster: ClusterProfile, rows: Rows, _draws: int) -> Scored:
    """The profile as it is."""
    scored = Scored()
    scored.add(rows, predict(cluster, rows))
    return scored


def leave_one_model_out(cluster: ClusterProfile, rows: Rows, _draws: int) -> Scored:
    """Each model with constants from the rows of the others; one model alone stays unfitted."""
    scored = Scored()
    for model in dict.fromkeys(row.measurement.model for row in rows):
        others = [row.measurement for row in rows if row.measurement.model != model]
        fitted = calibrate(cluster, others) if others else cluster
        own = [row for row in rows if row.measurement.model == model]
        scored.add(own, predict(fitted, own))
    return scored


def one_parameter(cluster: ClusterProfile, rows: Rows, _draws: int) -> Scored:
    """The matrix products' efficiency fitted to all rows."""
    constants = [constant for constant in CONSTANTS if constant.name == "gemm_efficiency"]
    fitted = calibrate(cluster, [row.measurement for row in rows], constants)
    scored = Scored()
    scored.add(rows, predict(fitted, rows))
    return scored


def drawn(count: int) -> Callable[[ClusterProfile, Rows, int], Scored]:
    """`count` rows calibrate, the rest is scored; again for every seed."""

    def run(cluster: ClusterProfile, rows: Rows, draws: int) -> Scored:
        scored = Scored()
        for seed in range(draws):
            order = np.random.default_rng(seed).permutation(len(rows)).tolist()
            few = min(count, len(rows) // 2)
            own = [rows[i].measurement for i in order[:few]]
            fitted = calibrate(cluster, own) if own else cluster
            rest = [rows[i] for i in sorted(order[few:])]
            scored.add(rest, predict(fitted, rest), seed)
        return scored

    return run


@dataclass(frozen=True)
class Plan:
    """How one table is read and predicted."""

    cluster: str
    row: Callable[[Fields], Row | None]
    predict: Callable[[ClusterProfile, Rows, int], Scored]
    how: str
    only: Fields = field(default_factory=dict)


PLANS: dict[str, tuple[str, Plan]] = {
    "megatron_sc21_table1": (
        "megatron_sc21_table1",
        Plan("a100_selene", sc21_table1, unfitted, "not fitted"),
    ),
    "megatron_sc21_table2_zero3_vs_ptdp": (
        "megatron_sc21_table2_zero3_vs_ptdp",
        Plan("a100_selene", sc21_table2, unfitted, "not fitted"),
    ),
    "megatron_sc21_table2_ptdp": (
        "megatron_sc21_table2_zero3_vs_ptdp",
        Plan("a100_selene", sc21_table2, unfitted, "not fitted", {"scheme": "ptdp"}),
    ),
    "megatron_sc21_table2_zero3": (
        "megatron_sc21_table2_zero3_vs_ptdp",
        Plan("a100_selene", sc21_table2, unfitted, "not fitted", {"scheme": "zero3"}),
    ),
    "vtrain_multi_node_a100": (
        "vtrain_multi_node_a100",
        Plan("a100_vtrain", vtrain, leave_one_model_out, "one model left out"),
    ),
    "vtrain_single_node_a100": (
        "vtrain_single_node_a100",
        Plan("a100_vtrain", vtrain, drawn(24), "24 rows calibrate"),
    ),
    "simumax_b200_time_and_memory": (
        "simumax_b200_time_and_memory",
        Plan("b200", simumax, one_parameter, "one parameter"),
    ),
    "sailor_gh200_time_and_memory": (
        "sailor_gh200_time_and_memory",
        Plan("gh200", sailor, drawn(3), "3 rows calibrate"),
    ),
    "nemo_24_07_h100_fp8_pretrain": (
        "nemo_24_07_h100_fp8_pretrain",
        Plan("h100", h100, unfitted, "profile set on these rows"),
    ),
    "mlperf_v3_0_gpt3_175b_h100_fp8": (
        "mlperf_v3_0_gpt3_175b_h100_fp8",
        Plan("h100", h100, unfitted, "profile set on these rows"),
    ),
}


def spread(errors_pct: Floats) -> dict[str, float]:
    """Mean, median, 90th percentile and maximum of absolute errors."""
    size = np.abs(errors_pct)
    return {
        "rows": len(size),
        "mean": float(size.mean()),
        "median": float(np.median(size)),
        "p90": float(np.percentile(size, 90)),
        "max": float(size.max()),
    }


def ranks(values: Floats) -> Floats:
    """Ranks with ties shared."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[places], dtype=np.float64)


def choices(scored: Scored) -> dict[str, Any]:
    """What choosing by prediction costs in groups of competing layouts, and how well it ranks."""
    members: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(scored.rows):
        members.setdefault((scored.draws[index], *row.group), []).append(index)
    regret, top3, spearman = [], [], []
    for indices in members.values():
        if len(indices) < LEAST_COMPETING:
            continue
        predicted = np.array([scored.predicted_s[i] for i in indices])
        measured = np.array([scored.rows[i].measurement.step_s for i in indices])
        order = np.argsort(predicted, kind="stable")
        regret.append(100.0 * (measured[order[0]] / measured.min() - 1.0))
        top3.append(100.0 * (measured[order[:3]].min() / measured.min() - 1.0))
        spearman.append(float(np.corrcoef(ranks(predicted), ranks(measured))[0, 1]))
    if not regret:
        return {}
    return {
        "groups": len(regret),
        "regret_pct": {
            "mean": float(np.mean(regret)),
            "max": float(np.max(regret)),
            "top3_mean": float(np.mean(top3)),
        },
        "spearman": float(np.mean(spearman)),
    }


def memory_errors(cluster: ClusterProfile, rows: Rows) -> Floats | None:
    """Relative errors of the peak memory in percent; None where nothing was measured."""
    measured = [row for row in rows if row.memory_bytes is not None]
    if not measured:
        return None
    predict_memory = importlib.import_module(
        "tenplex_megatron.planner.memory.predict"
    ).predict_memory
    errors = []
    for row in measured:
        found = predict_memory(row.measurement.model, cluster, row.measurement.strategy)
        errors.append(100.0 * (found.peak_bytes / row.memory_bytes - 1.0))
    return np.array(errors)


def score(plan: Plan, rows: Rows, draws: int) -> tuple[Scored, dict[str, Any]]:
    """Everything said about one table."""
    cluster = load_profile(ClusterProfile, ROOT / "configs/cluster" / f"{plan.cluster}.yaml")
    scored = plan.predict(cluster, rows, draws)
    measured = np.array([row.measurement.step_s for row in scored.rows])
    errors = 100.0 * (np.array(scored.predicted_s) / measured - 1.0)
    result: dict[str, Any] = {
        "cluster": plan.cluster,
        "how": plan.how,
        "rows": len(rows),
        "time_error_pct": spread(errors),
        **choices(scored),
    }
    sound = np.array([row.contradiction is None for row in scored.rows])
    if not sound.all():
        result["time_error_pct_without_contradictions"] = spread(errors[sound])
        result["contradictions"] = sorted({row.contradiction for row in rows if row.contradiction})
    memory = memory_errors(cluster, rows)
    result["memory_error_pct"] = None if memory is None else spread(memory)
    return scored, result


def read_rows(table: Fields, plan: Plan) -> list[Row]:
    """The rows of a table that the plan can read."""
    found = []
    for values in table["rows"]:
        fields = dict(zip(table["columns"], values, strict=True))
        fields.setdefault("seq", table.get("seq"))
        if all(fields[key] == value for key, value in plan.only.items()):
            row = plan.row(fields)
            if row is not None:
                found.append(row)
    return found


def speed(count: int) -> dict[str, float]:
    """Seconds to predict the step times of `count` layouts of GPT-3 175B, columns included."""
    cluster = load_profile(ClusterProfile, ROOT / "configs/cluster/a100_selene.yaml")
    model = gpt(96, 12288, 96, seq=2048)
    axes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 3), range(1, 1 + count // 60))
    strategies = [
        Strategy(
            layout=ParallelLayout(tp=tp, pp=pp, vpp=vpp, dp=dp, micro_batch_size=1),
            global_batch_size=1536,
            zero_stage=1,
        )
        for tp, pp, vpp, dp in axes
    ]
    start = time.perf_counter()
    predict_times(cluster, Candidates.of(model, strategies))
    return {"layouts": len(strategies), "seconds": time.perf_counter() - start}


def write_csv(path: Path, tables: Mapping[str, Scored]) -> None:
    """One line per scored row: what was measured, predicted, and the error."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        header = ["table", "draw", "layers", "hidden", "seq", "layout", "global_batch_size"]
        writer.writerow([*header, "measured_s", "predicted_s", "error_pct", "contradiction"])
        for name, scored in tables.items():
            for row, predicted, draw in zip(
                scored.rows, scored.predicted_s, scored.draws, strict=True
            ):
                model, chosen = row.measurement.model, row.measurement.strategy
                measured = row.measurement.step_s
                where = model.num_layers, model.hidden_size, model.seq_length, str(chosen.layout)
                error = f"{100 * (predicted / measured - 1):.2f}"
                seconds = f"{measured:.6g}", f"{predicted:.6g}", error
                why = row.contradiction or ""
                writer.writerow([name, draw, *where, chosen.global_batch_size, *seconds, why])


def show(name: str, result: Fields) -> None:
    """One table for a person."""
    error = result["time_error_pct"]
    text = f"{name} ({result['rows']} rows, {result['cluster']}, {result['how']})\n   time"
    text += "".join(f"  {key} {error[key]:.2f}" for key in ("mean", "median", "p90", "max")) + " %"
    if "time_error_pct_without_contradictions" in result:
        sound = result["time_error_pct_without_contradictions"]
        text += f"; mean {sound['mean']:.2f} max {sound['max']:.2f} % without the row whose "
        text += "; ".join(result["contradictions"])
    if result["memory_error_pct"]:
        memory = result["memory_error_pct"]
        text += f"\n   memory  mean {memory['mean']:.2f}  max {memory['max']:.2f} %"
    if "regret_pct" in result:
        regret = result["regret_pct"]
        text += f"\n   choice in {result['groups']} groups: regret mean {regret['mean']:.2f} max "
        text += f"{regret['max']:.2f} top-3 {regret['top3_mean']:.2f} %, Spearman "
        text += f"{result['spearman']:.3f}"
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all scores."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="measured tables, YAML")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    parser.add_argument("--quick", action="store_true", help="one draw of calibration rows, not 5")
    parser.add_argument("--csv", type=Path, help="write one line per scored row")
    options = parser.parse_args(arguments)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tables = yaml.load(options.tables.read_text(encoding="utf-8"), Loader=loader)["tables"]
    results, scored = {}, {}
    for name, (source, plan) in PLANS.items():
        rows = read_rows(tables[source], plan) if source in tables else []
        if not rows:
            continue
        scored[name], results[name] = score(plan, rows, 1 if options.quick else 5)
        if not options.json:
            show(name, results[name])
    if options.csv:
        write_csv(options.csv, scored)
    took = speed(1000 if options.quick else 10000)
    if not options.json:
        print(f"{took['layouts']} layouts predicted in {took['seconds']:.3f} s")
    print(json.dumps({"tables": results, "speed": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
