"""`tenplex frontier`: which strategies are worth running, from the smallest to the fastest?"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.config import load_profile
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.search import Evaluated, search
from tenplex_megatron.planner.space import RECOMPUTES, Scope
from tenplex_megatron.planner.strategy import Recompute

__all__ = ["build_parser", "frontier"]

_LEAST_WIDTH = 110
_EPILOG = """examples:
  tenplex frontier --model configs/model/gpt3_175b.yaml --gpus 1024 --global-batch-size 1536 \\
      --cluster configs/cluster/a100_selene.yaml --plot frontier.png
  tenplex frontier --cluster configs/cluster/h100.yaml --gpus 1:64 --global-batch-size 512 \\
      -- --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
      --vocab-size 51200
"""


def frontier(arguments: Sequence[str]) -> int:
    """Search and print: one table per number of devices."""
    given = build_parser().parse_args(arguments)
    model = _model(given.model, given.flags)
    cluster = load_profile(ClusterProfile, given.cluster)
    # Fused attention keeps no scores that could be computed again.
    recompute: tuple[Recompute, ...] = RECOMPUTES if given.no_flash else ("none", "full")
    scope = Scope(precision=given.precision, is_flash=not given.no_flash, recompute=recompute)
    pages = []
    for devices in _device_counts(given.gpus):
        started = time.monotonic()
        found = search(
            model,
            cluster,
            devices=devices,
            global_batch_size=given.global_batch_size,
            micro_batch_sizes=given.micro_batch_sizes,
            scope=scope,
        )
        pages.append(_page(found, cluster, devices, model, time.monotonic() - started))
    if given.plot is not None:
        _plot(pages, cluster, given.plot)
    if given.json:
        print(json.dumps({"cluster": cluster.name, "frontiers": pages}))
        return 0
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for page in pages:
        _print(console, page, cluster, top=given.top)
    if given.plot is not None:
        console.print(f"written: {given.plot}")
    return 0


def _model(path: Path | None, flags: Sequence[str]) -> ModelProfile:
    if (path is None) == (not flags):
        raise ConfigError(
            "the model: expected --model FILE or Megatron's flags after --, got "
            + ("both" if flags else "neither")
        )
    return MegatronArguments().profile(flags) if path is None else load_profile(ModelProfile, path)


def _device_counts(text: str) -> list[int]:
    """`N`, or `N:M` for every doubling of N up to M.

    >>> _device_counts("8"), _device_counts("1:6")
    ([8], [1, 2, 4, 6])
    """
    first, colon, last = text.partition(":")
    if not first.isdigit() or (colon and not last.isdigit()) or int(first) < 1:
        raise ConfigError(f"--gpus: expected N or N:M with N from 1, got {text!r}")
    low, high = int(first), int(last or first)
    if high < low:
        raise ConfigError(f"--gpus: expected the smaller number first, got {text!r}")
    doublings = [low << step for step in range((high // low).bit_length())]
    return [*doublings, *([high] if doublings[-1] < high else [])]


def _page(
    found: Evaluated,
    cluster: ClusterProfile,
    devices: int,
    model: ModelProfile,
    seconds: float,
) -> dict[str, Any]:
    """Plain values of one frontier; what does not fit is there too, and marked."""
    fastest = found.fastest(cluster.memory_bytes)
    rows = [_row(found, index, cluster, model) for index in found.frontier()]
    for row in [row for row in rows if row["fits"]][-1:]:
        row["is_fastest"] = True  # a frontier gets faster as it grows
    return {
        "devices": devices,
        "searched": len(found),
        "fitting": len(fastest),
        "seconds": seconds,
        "points": rows,
    }


def _row(
    found: Evaluated, index: int, cluster: ClusterProfile, model: ModelProfile
) -> dict[str, Any]:
    strategy = found.strategies[index]
    step_s, memory = float(found.step_s[index]), float(found.memory_bytes[index])
    tokens = strategy.global_batch_size * model.seq_length / step_s
    return {
        "layout": str(strategy.layout),
        "devices": strategy.layout.world_size,
        "sequence_parallel": strategy.sequence_parallel,
        "zero_stage": strategy.zero_stage,
        "recompute": strategy.recompute,
        "step_s": step_s,
        "memory_bytes": memory,
        "fits": memory <= cluster.memory_bytes,
        "tokens_per_s_per_device": tokens / strategy.layout.world_size,
        "is_fastest": False,
        "flags": " ".join(MegatronArguments().strategy_arguments(strategy)),
    }


def _print(console: Console, page: Mapping[str, Any], cluster: ClusterProfile, *, top: int) -> None:
    limit = cluster.memory_bytes / 1e9
    console.print(
        f"{page['devices']} devices of {cluster.name}: {page['searched']} strategies in "
        f"{page['seconds']:.2f} s, {page['fitting']} fit {limit:.4g} GB",
        style="bold",
    )
    fitting = [row for row in page["points"] if row["fits"]]
    if not fitting:
        smallest = min(page["points"], key=lambda row: row["memory_bytes"], default=None)
        if smallest is None:
            console.print("  no strategy runs; check heads, layers and batch")
        else:
            console.print(
                f"  nothing fits; the smallest, {smallest['layout']}, needs "
                f"{smallest['memory_bytes'] / 1e9:.4g} GB"
            )
        return
    shown = fitting[-top:][::-1]
    table = Table("", "s/step", "GB", "tokens/s/device", "SP", "ZeRO", "recompute")
    table.add_column("layout", no_wrap=True)
    for number, row in enumerate(shown, 1):
        table.add_row(
            str(number),
            f"{row['step_s']:.4g}",
            f"{row['memory_bytes'] / 1e9:.4g}",
            f"{row['tokens_per_s_per_device']:.0f}",
            "yes" if row["sequence_parallel"] else "",
            str(row["zero_stage"]),
            row["recompute"],
            row["layout"],
        )
    console.print(table)
    if len(fitting) > top:
        console.print(f"{len(fitting) - top} slower and smaller ones: --top {len(fitting)}")
    for number, row in enumerate(shown, 1):
        console.print(f"{number}: {row['flags']}", soft_wrap=True)


def _plot(pages: Sequence[Mapping[str, Any]], cluster: ClusterProfile, path: Path) -> None:
    """Time against memory; every frontier is a line, its fastest fitting point has a label."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for page in pages:
        points = page["points"]
        memory = [row["memory_bytes"] / 1e9 for row in points]
        seconds = [row["step_s"] for row in points]
        axes.plot(memory, seconds, marker="o", markersize=3, label=f"{page['devices']} devices")
        for row in points:
            if row["is_fastest"]:
                axes.annotate(
                    row["layout"],
                    (row["memory_bytes"] / 1e9, row["step_s"]),
                    textcoords="offset points",
                    xytext=(6, 6),
                    fontsize=8,
                )
    axes.axvline(cluster.memory_bytes / 1e9, color="tab:red", linestyle="--", label="memory")
    axes.set(xlabel="memory of the fullest device (GB)", ylabel="seconds per step")
    axes.set(xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=130)


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """The options of `tenplex frontier`."""
    parser = argparse.ArgumentParser(
        prog="tenplex frontier",
        description="Predicts time and memory of every strategy Megatron offers for a model on a "
        "number of devices, and prints those that no other one beats in both.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="a profile, see configs/model")
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="FILE", help="see configs/cluster"
    )
    parser.add_argument(
        "--gpus", required=True, metavar="N[:M]", help="devices; N:M for every doubling of N"
    )
    parser.add_argument("--global-batch-size", type=int, required=True, metavar="B")
    parser.add_argument(
        "--micro-batch-sizes",
        type=_sizes,
        default=[1, 2, 4, 8],
        metavar="B,...",
        help="to be tried (default 1,2,4,8)",
    )
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16", "fp8"), default="bf16")
    parser.add_argument("--no-flash", action="store_true", help="attention keeps its scores")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows shown (default 10)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="time against memory")
    parser.add_argument("--json", action="store_true", help="everything, as one line")
    parser.add_argument("flags", nargs="*", help="Megatron's flags of the model, after --")
    return parser
