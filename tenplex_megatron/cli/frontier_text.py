"""What does `tenplex frontier` print of its pages?"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from tenplex_megatron.planner.cluster import ClusterProfile

__all__ = ["print_page", "print_summary"]


def print_page(
    console: Console, page: Mapping[str, Any], cluster: ClusterProfile, *, top: int
) -> None:
    """The frontier for one number of devices, fastest first, with flags to paste."""
    limit = cluster.memory_bytes / 1e9
    console.print(
        f"{page['devices']} devices of {cluster.name}: {page['searched']} strategies in "
        f"{page['seconds']:.2f} s, {page['fitting']} fit {limit:.4g} GB",
        style="bold",
    )
    fitting = [row for row in page["points"] if row["fits"]]
    if not fitting:
        short = (page["least_memory_bytes"] - cluster.memory_bytes) / 1e9
        console.print(f"  nothing fits; the smallest is {short:.4g} GB short")
        return
    shown = fitting[-top:][::-1]
    table = Table("", "s/step", "GB", "tokens/s/device", "SP", "ZeRO", "recompute")
    table.add_column("layout", no_wrap=True)
    table.add_column("layers of the stages")
    for number, row in enumerate(shown, 1):
        table.add_row(
            str(number),
            f"{row['step_s']:.4g}",
            f"{row['memory_bytes'] / 1e9:.4g}",
            f"{row['tokens_per_s_per_device']:.0f}",
            "yes" if row["sequence_parallel"] else "",
            str(row["zero_stage"]),
            _recomputed(row),
            row["axes"],
            _stages(row["stage_layers"]),
        )
    console.print(table)
    if len(fitting) > top:
        console.print(f"{len(fitting) - top} slower and smaller ones: --top {len(fitting)}")
    for number, row in enumerate(shown, 1):
        console.print(f"{number}: {row['flags']}", soft_wrap=True)


def print_summary(console: Console, pages: Sequence[Mapping[str, Any]]) -> None:
    """The best of every number of devices."""
    table = Table("devices", "s/step", "speedup", "GB", "recompute")
    table.add_column("layout", no_wrap=True)
    table.add_column("layers of the stages")
    for page in pages:
        best = [row for row in page["points"] if row["is_fastest"]]
        if not best:
            table.add_row(str(page["devices"]), "does not fit")
        for row in best:
            table.add_row(
                str(page["devices"]),
                f"{row['step_s']:.4g}",
                f"{page['speedup']:.4g}",
                f"{row['memory_bytes'] / 1e9:.4g}",
                _recomputed(row),
                row["axes"],
                _stages(row["stage_layers"]),
            )
    console.print("the fastest that fits", style="bold")
    console.print(table)


def _recomputed(row: Mapping[str, Any]) -> str:
    """What a strategy recomputes.

    >>> _recomputed({"recompute": "full", "recompute_layers": 3})
    '3 per stage'
    """
    names = {"none": "", "selective": "attention", "full": "all"}
    layers = row["recompute_layers"]
    return names[row["recompute"]] if layers is None else f"{layers} per stage"


def _stages(layers: Sequence[int] | None) -> str:
    """Layers of stages, the same ones next to each other counted.

    >>> _stages([3, 4, 4, 4, 3])
    '3 4x3 3'
    """
    runs = [(size, len(list(run))) for size, run in groupby(layers or ())]
    return " ".join(f"{size}x{count}" if count > 1 else str(size) for size, count in runs)
