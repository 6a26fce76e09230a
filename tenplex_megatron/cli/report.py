"""`tenplex report`: what the changes of a run cost, as a table, as JSON and as a plot."""

import argparse
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from tenplex_megatron.cli.plan_text import megabytes
from tenplex_megatron.elastic.report import (
    PHASES,
    ChangeReport,
    Run,
    failure,
    largest_difference,
    read_runs,
    read_samples,
    summarise_changes,
    summarise_steps,
    unequal_tensors,
)
from tenplex_megatron.errors import ConfigError

__all__ = ["build_parser", "build_report", "report"]

_EPILOG = """examples:
  tenplex report /tmp/tenplex-0/my-job
  tenplex report /tmp/tenplex-0/my-job --run 1
  tenplex report out/demo/elastic --baseline out/demo/uninterrupted --out out/demo

A job started again under its name writes into the same folder; the newest start is reported unless
--run names another. The step of a change is the one after which training resumed: after a failure,
that of the snapshot. Piped, the text has one line per change.
"""
_LABEL_WIDTH = 60
_LABEL_ROWS = 8


def report(arguments: Sequence[str]) -> int:
    """Print the table of changes; write report.json and loss.png where asked."""
    given = build_parser().parse_args(arguments)
    runs = read_runs(given.run)
    number = len(runs) if given.number is None else given.number
    if not 1 <= number <= len(runs):
        raise ConfigError(f"--run: expected 1 to {len(runs)}, got {number}")
    elastic = runs[number - 1]
    baseline = read_runs([given.baseline])[-1] if given.baseline else None
    changes = summarise_changes(elastic)
    values = {"run": number, "runs": len(runs), "failure": failure(elastic)}
    values |= build_report(elastic, changes, baseline)
    if baseline is not None:
        values |= _compare_samples(given.run[0], elastic, given.baseline, baseline)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "report.json").write_text(json.dumps(values, indent=1) + "\n")
        _draw(elastic, changes, baseline).savefig(given.out / "loss.png", dpi=130)
    if given.json:
        print(json.dumps(values))
    else:
        _print_text(values, elastic, changes, given.out)
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
    parser.add_argument(
        "--run",
        dest="number",
        type=int,
        metavar="N",
        help="which start of the job, 1 the first (default: the newest)",
    )
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
        "steps": [asdict(steps) for steps in summarise_steps(elastic)],
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


def _print_text(
    values: Mapping[str, Any], run: Run, changes: Sequence[ChangeReport], out: Path | None
) -> None:
    """Two lines per change on a terminal; one, unwrapped, where the text goes to a program."""
    if values["runs"] > 1:
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.events[0]["time"]))
        origin = f"went on after step {run.start_step}" if run.start_step else "began at step 1"
        print(
            f"start {values['run']} of {values['runs']} of this job, {begun}, {origin}; "
            "--run N shows another"
        )
    console = Console()
    if not changes:
        generations = {event["generation"] for event in run.events if event["kind"] == "decided"}
        tried = " led to a finished step" if len(generations) > 1 else ""
        print(f"no change of layout{tried}")
    elif console.is_terminal:
        _print_changes(changes, console.width)
    else:
        _print_lines(changes)
    for steps in summarise_steps(run):
        text = (
            f"generation {steps.generation}, {steps.layout}: {steps.measured_s:.3g} s per step in "
            f"{steps.steps} steps"
        )
        if steps.predicted_s is not None:
            error = 100.0 * (steps.predicted_s / steps.measured_s - 1.0)
            text += f", predicted {steps.predicted_s:.3g} s ({error:+.0f} %)"
        print(text)
    if values["failure"] is not None:
        print(f"the job failed: {values['failure']}")
    _print_summary(values, out)


_COLUMNS = (
    "steps lost", "bytes held", "bytes moved", "least possible",
    *(f"{name.replace('_', ' ')} s" for name in (*PHASES, "total")),
)  # fmt: skip


def _numbers(change: ChangeReport) -> list[str]:
    sizes = (change.bytes_total, change.bytes_moved, change.bytes_lower_bound)
    seconds = [*(change.seconds[name] for name in PHASES), sum(change.seconds.values())]
    return [
        str(change.steps_lost),
        *(megabytes(nbytes) for nbytes in sizes),
        *(f"{value:.2f}" for value in seconds),
    ]


def _print_changes(changes: Sequence[ChangeReport], width: int) -> None:
    rows = [name.split() for name in _COLUMNS]
    depth = max(map(len, rows))
    heads = [[""] * (depth - len(words)) + words for words in rows]
    lines = _aligned([*zip(*heads, strict=True), *map(_numbers, changes)])
    print("changes of layout: the step after which training resumed, from -> to, cause")
    for line in lines[:depth]:
        print(f"  {line}")
    for change, line in zip(changes, lines[depth:], strict=True):
        title = f"after step {change.step}: {change.source} -> {change.target}; {change.cause}"
        print(textwrap.fill(title, max(width, 40), subsequent_indent="    "))
        if change.reason:
            indent = "    "
            print(
                textwrap.fill(
                    change.reason, max(width, 40), initial_indent=indent, subsequent_indent=indent
                )
            )
        print(f"  {line}")


def _print_lines(changes: Sequence[ChangeReport]) -> None:
    rows = [("resumed after step", "from", "to", *_COLUMNS, "cause")]
    for change in changes:
        cause = " ".join(change.cause.split())
        layouts = (str(change.source), str(change.target))
        rows.append((str(change.step), *layouts, *_numbers(change), cause))
    for line, row in zip(_aligned([row[:-1] for row in rows]), rows, strict=True):
        print(f"{line}  {row[-1]}")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


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


def _draw(elastic: Run, changes: Sequence[ChangeReport], baseline: Run | None) -> Figure:
    """Both loss curves; a dashed line and a label per change, behind the curves."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if baseline is not None and baseline.losses:
        steps, losses = zip(*sorted(baseline.losses.items()), strict=True)
        axes.plot(steps, losses, color="0.6", linewidth=5, label="uninterrupted", zorder=3)
    if elastic.losses:
        steps, losses = zip(*sorted(elastic.losses.items()), strict=True)
        axes.plot(steps, losses, "tab:blue", linewidth=1.5, marker=".", label="elastic", zorder=3.5)
        axes.legend(loc="lower left")
    low, top = min(elastic.losses.values(), default=0), max(elastic.losses.values(), default=1)
    for number, change in enumerate(changes):
        axes.axvline(change.step + 0.5, color="tab:red", linewidth=0.8, linestyle="--", zorder=1)
        cause = textwrap.shorten(change.cause, _LABEL_WIDTH, placeholder=" ...")
        axes.annotate(
            f"{change.source}\n→ {change.target}\n{cause}",
            (change.step + 0.6, top - number % _LABEL_ROWS * (top - low) / _LABEL_ROWS),
            fontsize=7, va="top", color="tab:red", zorder=2,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("loss")
    return figure
