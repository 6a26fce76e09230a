"""How do frontiers look, and how does the best time fall with devices?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tenplex_megatron.planner.cluster import ClusterProfile

__all__ = ["draw"]


def draw(pages: Sequence[Mapping[str, Any]], cluster: ClusterProfile, path: Path) -> None:
    """Time against memory; with several numbers of devices also the best time against them."""
    figure = Figure(figsize=(9 if len(pages) == 1 else 15, 5.5), layout="constrained")
    if len(pages) == 1:
        _draw_frontiers(figure.subplots(), pages, cluster)
    else:
        left, right = figure.subplots(1, 2)
        _draw_frontiers(left, pages, cluster)
        _draw_best(right, pages)
    figure.savefig(path, dpi=130)


def _draw_frontiers(
    axes: Axes, pages: Sequence[Mapping[str, Any]], cluster: ClusterProfile
) -> None:
    """Every frontier is a line, its fastest fitting point has a label."""
    for page in pages:
        points = page["points"]
        memory = [row["memory_bytes"] / 1e9 for row in points]
        seconds = [row["step_s"] for row in points]
        axes.plot(memory, seconds, marker="o", markersize=3, label=f"{page['devices']} devices")
        for row in points:
            if row["is_fastest"]:
                axes.annotate(
                    row["axes"],
                    (row["memory_bytes"] / 1e9, row["step_s"]),
                    textcoords="offset points",
                    xytext=(6, 6),
                    fontsize=8,
                )
    axes.axvline(cluster.memory_bytes / 1e9, color="tab:red", linestyle="--", label="memory")
    axes.set(xlabel="memory of the fullest device (GB)", ylabel="seconds per step")
    axes.set(xscale="log", yscale="log")
    axes.legend()


def _draw_best(axes: Axes, pages: Sequence[Mapping[str, Any]]) -> None:
    """The fastest that fits on every number of devices, and what twice as many should halve."""
    best = [(page["devices"], page["best_step_s"]) for page in pages if page["best_step_s"]]
    axes.set(xlabel="devices", ylabel="seconds per step of the fastest that fits")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if not best:
        return
    devices, seconds = zip(*best, strict=True)
    ideal = [seconds[0] * devices[0] / count for count in devices]
    axes.plot(devices, seconds, marker="o", label="fastest that fits")
    axes.plot(devices, ideal, linestyle=":", color="gray", label="perfect scaling")
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.legend()
