"""`tenplex report`: what the changes of a run cost, as a table, as JSON and as a plot."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tenplex_megatron.elastic.report import (
    PHASES,
    ChangeReport,
    Run,
    largest_difference,
    read_run,
    read_samples,
    summarise_changes,
    unequal_tensors,
)

__all__ = ["build_parser", "build_report", "report"]

_EPILOG = """examples:
  tenplex report /tmp/tenplex-0/my-job
  tenplex report out/demo/elastic --baseline out/demo/uninterrupted --out out/demo
"""


def report(arguments: Sequence[str]) -> int:
    """Print the table of changes; write report.json and loss.png where asked."""
    given = build_parser().parse_args(arguments)
    elastic = read_run(given.run)
    baseline = read_run([given.baseline]) if given.baseline else None
    changes = summarise_changes(elastic)
    values = build_report(elastic, changes, baseline)
    if baseline is not None:
        values |= _compare_samples(given.run[0], elastic, given.baseline, baseline)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "report.json").write_text(json.dumps(values, indent=1) + "\n")
        _plot(given.out / "loss.png", elastic, changes, baseline)
    if given.json:
        print(json.dumps(values))
    else:
        _print_table(changes)
        _print_summary(values, given.out)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The command's own options."""
    parser = argparse.ArgumentParser(
        prog="tenplex report",
        description="What every change of layout of a run cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="+", help="run folder of each node")
    parser.add_argument("--baseline", type=Path, help="run folder of an uninterrupted run")
    parser.add_argument("--out", type=Path, help="folder for report.json and loss.png")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def build_report(
    elastic: Run, changes: Sequence[ChangeReport], baseline: Run | None
) -> dict[str, Any]:
    """The report as plain values."""
    values: dict[str, Any] = {
        "changes": [change.to_json() for change in changes],
        "elastic": {"losses": {str(step): loss for step, loss in elastic.losses.items()}},
    }
    unequal = unequal_tensors(elastic)
    if unequal is not None:
        values["state_bit_equal"] = not unequal
        values["unequal_tensors"] = list(unequal)
    if baseline is not None:
        losses = {str(step): loss for step, loss in baseline.losses.items()}
        values["uninterrupted"] = {"losses": losses}
        values["max_abs_loss_difference"] = largest_difference(baseline.losses, elastic.losses)
    return values


def _compare_samples(
    folder: Path, elastic: Run, baseline_folder: Path, baseline: Run
) -> dict[str, Any]:
    if not list(baseline_folder.glob("samples-*.jsonl")):
        return {}
    sizes = {
        event["batch_size"] for event in baseline.events if event["kind"] in ("ready", "imported")
    }
    batch_size = int(sizes.pop())
    expected = read_samples(baseline_folder, baseline, batch_size=batch_size)
    found = read_samples(folder, elastic, batch_size=batch_size)
    return {"sample_order_equal": found == expected, "global_batches_compared": len(expected)}


def _print_table(changes: Sequence[ChangeReport]) -> None:
    table = Table(title="changes of layout")
    for name in ("after step", "from", "to", "cause", "steps lost", "held", "moved", "least"):
        table.add_column(name, overflow="fold")
    for name in (*PHASES, "total"):
        table.add_column(f"{name.replace('_', ' ')} s", justify="right")
    for change in changes:
        total = sum(change.seconds.values())
        sizes = (change.bytes_total, change.bytes_moved, change.bytes_lower_bound)
        table.add_row(
            str(change.step),
            str(change.source),
            str(change.target),
            change.cause,
            str(change.steps_lost),
            *(f"{nbytes / 1e6:.2f} MB" for nbytes in sizes),
            *(f"{change.seconds[name]:.2f}" for name in PHASES),
            f"{total:.2f}",
        )
    console = Console()
    Console(width=max(console.width, 160)).print(table)


def _print_summary(values: Mapping[str, Any], out: Path | None) -> None:
    if "max_abs_loss_difference" in values:
        steps = len(values["uninterrupted"]["losses"])
        print(
            "largest absolute loss difference to the uninterrupted run: "
            f"{values['max_abs_loss_difference']:.3g} over {steps} steps"
        )
    if "sample_order_equal" in values:
        equal = "equal" if values["sample_order_equal"] else "NOT EQUAL"
        print(f"samples of {values['global_batches_compared']} global batches, in order: {equal}")
    if "state_bit_equal" in values:
        changed = ", ".join(values["unequal_tensors"])
        print(f"masters and moments after planned changes: {changed or 'equal bit for bit'}")
    if out is not None:
        print(f"written: {out / 'report.json'}, {out / 'loss.png'}")


def _plot(path: Path, elastic: Run, changes: Sequence[ChangeReport], baseline: Run | None) -> None:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if baseline is not None:
        steps, losses = zip(*sorted(baseline.losses.items()), strict=True)
        axes.plot(steps, losses, color="0.6", linewidth=5, label="uninterrupted")
    steps, losses = zip(*sorted(elastic.losses.items()), strict=True)
    axes.plot(steps, losses, color="tab:blue", linewidth=1.5, marker=".", label="elastic")
    top = max(losses)
    for number, change in enumerate(changes):
        axes.axvline(change.step + 0.5, color="tab:red", linewidth=0.8, linestyle="--")
        text = f"{change.source}\n→ {change.target}\n{change.cause}"
        axes.annotate(
            text, (change.step + 0.6, top - number * 0.12 * (top - min(losses))),
            fontsize=7, va="top", color="tab:red",
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("loss")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=130)
