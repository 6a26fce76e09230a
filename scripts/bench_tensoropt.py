"""TensorOpt's experiment: the frontier of time against memory at 1, 2, 4, 8 and 16 devices.

Beside it stand data parallelism and the optimum of time alone, which a search with a single
objective finds. All costs are predictions for the cluster named in the table: no device is used.
(Setting: arXiv 2004.10856. Operators are split, replicated or partial sums; re-scheduling costs the
cheapest sequence of collectives.)
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table

from tenplex_megatron.config import load_profile
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.tensoropt.builders import mlp, transformer, vgg16
from tenplex_megatron.planner.tensoropt.network import Network, PricedNetwork, price
from tenplex_megatron.planner.tensoropt.search import search

ROOT = Path(__file__).resolve().parents[1]
# Wide enough for the table in a log file too.
console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)
GIB = 2.0**30
DEVICES = (1, 2, 4, 8, 16)
EPSILON = 0.01


def networks(*, quick: bool) -> list[Network]:
    """An MLP, VGG-16 and a transformer of 0.8 billion parameters, or a sixth of its layers."""
    model = ModelProfile(
        num_layers=2 if quick else 12,
        hidden_size=2048,
        num_heads=16,
        num_query_groups=16,
        head_size=128,
        ffn_size=8192,
        seq_length=2048,
        vocab_size=51200,
    )
    return [mlp(32768, [8192] * 7), vgg16(256), transformer(model, 32)]


@dataclass(frozen=True)
class Point:
    """What a strategy costs: peak memory of one device, and a step's time."""

    memory_gib: float
    time_ms: float

    def __str__(self) -> str:
        return f"{self.memory_gib:.2f} / {self.time_ms:.1f}"


@dataclass(frozen=True)
class Result:
    """What one network on one number of devices came to."""

    network: str
    devices: int
    operators: int
    configurations: int
    """Most configurations of one operator."""
    price_s: float
    search_s: float
    is_exact: bool
    frontier: list[tuple[float, float]]
    """Memory in GiB and time in ms."""
    smallest: Point
    fastest: Point
    """The optimum of time alone."""
    data_parallel: Point | None
    fastest_in_its_memory: Point | None
    """The fastest point that needs no more memory than data parallelism."""
    smallest_in_its_time: Point | None
    """The smallest point that takes no longer than data parallelism."""
    strategies: dict[str, dict[str, int]]
    """What the smallest and the fastest point choose, and how often."""


def main() -> int:
    """Track every network on every number of devices; print a table, draw a plot."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  .venv/bin/python scripts/bench_tensoropt.py --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a transformer of 2 layers, not 12")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out/tensoropt", help="folder of the plot (%(default)s)"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        default=ROOT / "configs/cluster/a100_selene.yaml",
        help="profile of the devices and links (%(default)s)",
    )
    given = parser.parse_args()
    try:
        cluster = load_profile(ClusterProfile, given.cluster)
    except ConfigError as error:
        parser.error(str(error))
    started = time.perf_counter()
    results = []
    for network in networks(quick=given.quick):
        found = [measure(network, num_devices, cluster) for num_devices in DEVICES]
        console.print(as_table(found, cluster))
        results += found
    given.out.mkdir(parents=True, exist_ok=True)
    plot = given.out / "tensoropt.png"
    draw(results, cluster, plot)
    seconds = time.perf_counter() - started
    console.print(f"{plot}; {seconds:.1f} s in all")
    if given.json:
        print(json.dumps(as_json(results, cluster, seconds)))
    return 0


def measure(network: Network, num_devices: int, cluster: ClusterProfile) -> Result:
    """The frontier, and what it is compared with."""
    priced, price_s = timed(lambda: price(network, num_devices, cluster))
    found, search_s = timed(lambda: search(priced, epsilon=EPSILON))
    frontier = found.frontier
    last = len(frontier) - 1

    def point(index: int | None) -> Point | None:
        return None if index is None else as_point(priced, found.strategy(index))

    data_parallel, in_memory, in_time = None, None, None
    try:
        strategy = priced.data_parallel()
    except ConfigError as error:
        console.print(f"{network.name} on {num_devices} devices: {error}")
    else:
        data_parallel = as_point(priced, strategy)
        memory, seconds = priced.cost(strategy)
        in_memory = point(frontier.fastest_within(memory))
        in_time = point(next((i for i, s in enumerate(frontier.time) if s <= seconds), None))
    return Result(
        network=network.name,
        devices=num_devices,
        operators=len(network.operators),
        configurations=max(map(len, priced.configurations.values())),
        price_s=price_s,
        search_s=search_s,
        is_exact=found.is_exact,
        frontier=[
            (memory / GIB, seconds * 1e3)
            for memory, seconds in zip(frontier.memory, frontier.time, strict=True)
        ],
        smallest=as_point(priced, found.strategy(0)),
        fastest=as_point(priced, found.strategy(last)),
        data_parallel=data_parallel,
        fastest_in_its_memory=in_memory,
        smallest_in_its_time=in_time,
        strategies={
            name: described(priced, found.strategy(index))
            for name, index in (("smallest", 0), ("fastest", last))
        },
    )


def as_point(priced: PricedNetwork, strategy: Mapping[str, int]) -> Point:
    """What a strategy costs."""
    memory, seconds = priced.cost(strategy)
    return Point(memory / GIB, seconds * 1e3)


def timed[T](compute: Callable[[], T]) -> tuple[T, float]:
    """The result, and the seconds it took."""
    started = time.perf_counter()
    return compute(), time.perf_counter() - started


def described(priced: PricedNetwork, strategy: Mapping[str, int]) -> dict[str, int]:
    """How many operators of a kind take which configuration: {"block#.mlp.up: out 4": 24}."""
    found: Counter[str] = Counter()
    for name, choice in strategy.items():
        way = priced.configurations[name][choice]
        ways = {
            dim or "repeated": priced.mesh.group_size(
                [a for a, other in enumerate(way) if other == dim]
            )
            for dim in dict.fromkeys(way)
        }
        splits = ", ".join(f"{dim} {count}" for dim, count in ways.items()) or "whole"
        found[f"{re.sub(r'\d+', '#', name)}: {splits}"] += 1
    return dict(found)


def as_table(results: list[Result], cluster: ClusterProfile) -> Table:
    """Memory and time of the points worth naming, a row for each number of devices.

    "As fast as it" is the point of least memory that takes no longer than data parallelism;
    "fastest" is also what a search for time alone comes to.
    """
    first = results[0]
    table = Table(
        title=f"{first.network}, {first.operators} operators on {cluster.name}: GiB a device / ms"
    )
    columns = ["least memory", "fastest", "data parallel", "as fast as it"]
    for column in ["devices", *columns, "points", "search s"]:
        table.add_column(column, justify="right")
    for result in results:
        points = [
            result.smallest,
            result.fastest,
            result.data_parallel,
            result.smallest_in_its_time,
        ]
        cells = ["-" if point is None else str(point) for point in points]
        seconds = f"{result.price_s + result.search_s:.2f}"
        table.add_row(str(result.devices), *cells, str(len(result.frontier)), seconds)
    return table


def draw(results: list[Result], cluster: ClusterProfile, path: Path) -> None:
    """Time against memory, one panel for each network, one line for each number of devices."""
    by_network = [list(group) for _, group in groupby(results, key=lambda r: r.network)]
    # A figure without pyplot is drawn by Agg, with no display and no global state.
    figure = Figure(figsize=(5.5 * len(by_network), 4.5))
    panels = figure.subplots(1, len(by_network), squeeze=False)
    for panel, group in zip(panels[0], by_network, strict=True):
        for result in group:
            memory, seconds = zip(*result.frontier, strict=True)
            # Between two points the smaller one is the best there is.
            [line] = panel.step(
                memory, seconds, where="post", marker=".", markersize=3, linewidth=1
            )
            line.set_label(f"{result.devices} devices")
            marks = (("x", result.data_parallel), ("*", result.fastest))
            for marker, mark in marks:
                if mark is not None:
                    panel.plot(mark.memory_gib, mark.time_ms, marker, color=line.get_color(), ms=9)
        panel.axvline(cluster.memory_bytes / GIB, color="grey", linestyle="--", linewidth=1)
        panel.set(xscale="log", yscale="log", title=group[0].network)
        panel.set(xlabel="peak memory per device, GiB", ylabel="predicted time per step, ms")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.legend(title="x data parallel, * fastest", fontsize=7, title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def as_json(results: list[Result], cluster: ClusterProfile, seconds: float) -> dict[str, Any]:
    """All numbers."""
    return {
        "cluster": cluster.name,
        "epsilon": EPSILON,
        "seconds": seconds,
        "results": [asdict(result) for result in results],
    }


if __name__ == "__main__":
    sys.exit(main())
