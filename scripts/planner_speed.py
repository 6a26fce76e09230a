#!/usr/bin/env python
"""Is the planner exact, and how long does it think?

Exactness: on random operator graphs the tracked frontier is that of all strategies, found the plain
way, and every point unrolls to a strategy that costs exactly what it says; in random worlds of a
few devices the search misses no strategy of Megatron's that is best under some memory limit.

Speed: seconds of processor time, the best of several runs; the first is with empty caches.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tenplex_megatron.config import load_profile
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import Columns, Strategies
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import evaluate, search
from tenplex_megatron.planner.space import Scope, strategies
from tenplex_megatron.planner.tracking import track
from tenplex_megatron.testing.every_strategy import (
    every_strategy,
    missed,
    predicted,
    random_world,
)
from tenplex_megatron.testing.graphs import Draw, brute_force

ROOT = Path(__file__).parents[1]
SCOPE = Scope(recompute=("none", "full"))
GPT3_BATCH, TRILLION_BATCH = 1536, 3072
LIMITS_S = {"layouts": 0.3, "gpt3_175b": 2.0, "replanning": 0.2}
"""What is promised, in the order of the table."""


def measure(*, quick: bool) -> dict[str, Any]:
    """All of it as plain values; `quick` takes fewer runs, graphs and sizes."""
    gpt3, trillion = (_model(name) for name in ("gpt3_175b", "gpt_1t"))
    cluster = load_profile(ClusterProfile, ROOT / "configs/cluster/a100_selene.yaml")
    runs = 3 if quick else 9
    return {
        # First, so that its first run has empty caches.
        "gpt3_175b": _timed(lambda: _search(gpt3, cluster, 1024, GPT3_BATCH), runs),
        "layouts": _layouts(gpt3, cluster, runs),
        "replanning": _replanning(gpt3, cluster, runs),
        "growth": _growth(gpt3, trillion, cluster, quick=quick),
        "exactness": {
            "graphs": _exact_graphs(50 if quick else 500),
            "megatron": _exact_worlds(10 if quick else 200),
        },
    }


# ---- speed ----------------------------------------------------------------------------------


def _model(name: str) -> ModelProfile:
    return load_profile(ModelProfile, ROOT / f"configs/model/{name}.yaml")


def _timed(run: Callable[[], int], runs: int) -> dict[str, Any]:
    """Seconds of several runs, which return how many strategies they saw."""
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        count = run()
        seconds.append(time.process_time() - begin)
    return {
        "strategies": count,
        "first_s": seconds[0],
        "best_s": min(seconds),
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
    }


def _search(model: ModelProfile, cluster: ClusterProfile, devices: int, batch: int) -> int:
    found = search(model, cluster, devices=devices, global_batch_size=batch, scope=SCOPE)
    assert found.frontier()
    return len(found)


def _layouts(model: ModelProfile, cluster: ClusterProfile, runs: int) -> dict[str, Any]:
    """10,000 strategies to their frontier, from values and from columns."""
    listed = strategies(
        model, devices=1024, devices_per_node=8, global_batch_size=GPT3_BATCH, scope=SCOPE
    )
    some = listed[:: len(listed) // 10_000][:10_000]
    columns = Strategies(Columns.of(some))

    def run(found: Sequence[Any]) -> int:
        return len(found) if evaluate(model, cluster, found).frontier() else 0

    return {
        **_timed(lambda: run(some), runs),
        "from_columns": _timed(lambda: run(columns), runs),
    }


def _replanning(model: ModelProfile, cluster: ClusterProfile, runs: int) -> dict[str, Any]:
    """One node of 1,024 devices is lost; the search before the loss is not counted."""
    seconds = []
    for _ in range(runs):
        _search(model, cluster, 1024, GPT3_BATCH)
        found = _timed(lambda: _search(model, cluster, 1016, GPT3_BATCH), 1)
        seconds.append(found["best_s"])
    return {
        "strategies": found["strategies"],
        "first_s": seconds[0],
        "best_s": min(seconds),
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
    }


def _growth(
    gpt3: ModelProfile, trillion: ModelProfile, cluster: ClusterProfile, *, quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """Seconds by number of devices, and by number of layers."""
    runs = 1 if quick else 3
    devices = [512, 1024] if quick else [8 << step for step in range(12)]
    layers = [8, 64] if quick else [8, 16, 32, 48, 64, 96, 128]
    huge = [3072] if quick else [512, 1024, 2048, 3072, 4096, 8192, 16384]

    def point(model: ModelProfile, count: int, batch: int) -> dict[str, Any]:
        found = _timed(lambda: _search(model, cluster, count, batch), runs)
        return {
            "devices": count,
            "layers": model.num_layers,
            "strategies": found["strategies"],
            "seconds": found["best_s"],
        }

    return {
        "devices": [point(gpt3, count, GPT3_BATCH) for count in devices],
        "layers": [point(replace(gpt3, num_layers=count), 1024, GPT3_BATCH) for count in layers],
        "trillion": [point(trillion, count, TRILLION_BATCH) for count in huge],
    }


# ---- exactness ------------------------------------------------------------------------------


def _exact_graphs(count: int) -> dict[str, int]:
    """How many random graphs were tracked, and how many of them wrong."""
    wrong = points = 0
    for seed in range(count):
        draw = Draw(seed, highest=(4, 30, 10**9)[seed % 3], impossible=0.05 * (seed % 7 == 0))
        graph = draw.any_graph()
        tracked = track(graph, method="elimination")
        front = tracked.frontier
        found = front.memory.tolist(), front.time.tolist()
        costs = [graph.cost(tracked.strategy(index)) for index in range(len(front))]
        points += len(costs)
        wrong += found != brute_force(graph) or costs != list(zip(*found, strict=True))
    return {"graphs": count, "points": points, "wrong": wrong}


def _exact_worlds(count: int) -> dict[str, int]:
    """How many strategies of small worlds there are, and under how many limits the best is missed.

    A limit is the memory of a strategy on the frontier of all.
    """
    totals = {"worlds": count, "strategies": 0, "limits": 0, "missed": 0}
    for seed in range(count):
        model, cluster, scope, arguments = random_world(seed)
        everything = list(every_strategy(model, scope, arguments))
        best = Frontier.of(*predicted(model, cluster, everything))
        found = search(model, cluster, scope=scope, **arguments)
        places = found.frontier()
        front = Frontier.of(found.memory_bytes[places], found.step_s[places])
        totals["strategies"] += len(everything)
        totals["limits"] += len(best)
        totals["missed"] += missed(best, front) + missed(front, best)
    return totals


# ---- faces ----------------------------------------------------------------------------------


def text(measured: dict[str, Any]) -> str:
    """The measurements as lines."""
    lines = []
    for name, limit in LIMITS_S.items():
        row = measured[name]
        lines.append(
            f"{name:12} {row['strategies']:7d} strategies: best {row['best_s']:.3f} s, median "
            f"{row['median_s']:.3f}, worst {row['worst_s']:.3f}, first {row['first_s']:.3f} "
            f"(at most {limit:g})"
        )
    columns = measured["layouts"]["from_columns"]
    lines.append(
        f"{'from columns':12} {columns['strategies']:7d} strategies: best {columns['best_s']:.3f} s"
    )
    for name, rows in measured["growth"].items():
        lines += [
            f"{name:12} {row['devices']:6d} devices, {row['layers']:4d} layers: "
            f"{row['seconds']:.3f} s for {row['strategies']} strategies"
            for row in rows
        ]
    graphs, worlds = measured["exactness"]["graphs"], measured["exactness"]["megatron"]
    lines.append(
        f"exact: {graphs['graphs'] - graphs['wrong']} of {graphs['graphs']} random graphs "
        f"({graphs['points']} points); {worlds['limits'] - worlds['missed']} of "
        f"{worlds['limits']} memory limits in {worlds['worlds']} small worlds of "
        f"{worlds['strategies']} strategies"
    )
    return "\n".join(lines)


def draw(growth: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Seconds against devices and against layers."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, label in (("devices", "GPT-3 175B"), ("trillion", "1T parameters")):
        rows = growth[name]
        left.plot(
            [row["devices"] for row in rows],
            [row["seconds"] for row in rows],
            marker="o",
            label=label,
        )
    rows = growth["layers"]
    right.plot(
        [row["layers"] for row in rows],
        [row["seconds"] for row in rows],
        marker="o",
        label="GPT-3's layers, 1,024 devices",
    )
    left.set(xlabel="devices", ylabel="seconds of a search")
    left.set_xscale("log", base=2)
    right.set(xlabel="layers")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=130)


def main() -> int:
    """Measure, print, and draw where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs, graphs and sizes")
    parser.add_argument("--json", action="store_true", help="everything, as one line")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="growth of the search")
    given = parser.parse_args()
    measured = measure(quick=given.quick)
    print(json.dumps(measured) if given.json else text(measured))
    if given.plot is not None:
        draw(measured["growth"], given.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
