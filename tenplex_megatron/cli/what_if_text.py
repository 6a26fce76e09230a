"""How is what a job would get on other devices shown to a person?"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from tenplex_megatron.cli.plan_text import megabytes, new_table

__all__ = ["print_answer"]

_LEAST_WIDTH = 110
_MOST_ROWS = 8


def print_answer(values: Mapping[str, Any]) -> None:
    """Before and after, what moves where, what it is worth, and what else there was."""
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    left = f"{values['devices']} of {values['gpus']} {values['cluster']} devices"
    console.print(
        f"{values['from_layout']} -> {values['layout']} on {left}", style="bold", soft_wrap=True
    )
    for name, text in _lines(values).items():
        console.print(f"  {name:<15} {text}", soft_wrap=True)
    if not values["stays"]:
        _print_nodes(console, values)
    _print_runners_up(console, values)
    console.print(f"flags: {values['flags']}", soft_wrap=True)
    console.print(f"answered in {values['seconds']:.2f} s")


def _lines(values: Mapping[str, Any]) -> dict[str, str]:
    step, before = values["step_s"], values["from_step_s"]
    limit = values["memory_limit_bytes"] / 1e9
    lines = {}
    if values["missing_bytes"] >= 1:
        lines["CHECKPOINT"] = (
            f"needed: {megabytes(round(values['missing_bytes']))} lie on no node with a new rank "
            f"(lost: {_shortened(values['lost_nodes']) or 'none'})"
        )
    lines |= {
        "lost": _shortened(values["lost"]) or "nothing the job used",
        "step": f"{before:.4g} s -> {step:.4g} s ({step / before - 1:+.1%})",
        "peak memory": f"{values['from_memory_bytes'] / 1e9:.4g} GB -> "
        f"{values['memory_bytes'] / 1e9:.4g} GB per device, of {limit:.4g} GB",
        "choices": f"{_choices(values, 'from_')} -> {_choices(values, '')}",
    }
    if values["stays"]:
        lines["change"] = f"none: {values['reason']}"
    else:
        lines["bytes"] = (
            f"{megabytes(round(values['moved_bytes']))} between nodes, "
            f"{megabytes(round(values['within_bytes']))} inside them"
        )
        lines["pause"] = (
            f"{values['pause_s']:.3g} s: {values['restart_s']:.3g} s of restart, "
            f"{values['move_s']:.3g} s for {_DIRECTIONS[values['slowest_direction']]} "
            f"{values['slowest_node']}"
        )
    if values["baseline"] is not None:
        lines["pays off"] = _payoff(values)
    if values["batch_note"]:
        lines["note"] = values["batch_note"]
    return lines


_DIRECTIONS = {"arriving": "what reaches", "leaving": "what leaves", "within": "copies inside"}
_BASELINES = {
    "stay": "going on as it is",
    "fewer replicas": "the same with fewer replicas",
    "runner-up": "the runner-up",
}


def _choices(values: Mapping[str, Any], prefix: str) -> str:
    parts = [f"micro-batch {values[f'{prefix}micro_batch_size']}"]
    parts.append(f"ZeRO {values[f'{prefix}zero_stage']}")
    if values[f"{prefix}sequence_parallel"]:
        parts.append("SP")
    if values[f"{prefix}recompute"] != "none":
        layers = values[f"{prefix}recompute_layers"]
        some = "" if layers is None else f", {layers} layers a stage"
        parts.append(f"recompute {values[f'{prefix}recompute']}{some}")
    return ", ".join(parts)


def _payoff(values: Mapping[str, Any]) -> str:
    kind = values["baseline_kind"]
    other = f"{_BASELINES[kind]}, {values['baseline']}"
    steps, overtaken = values["pays_off_after_steps"], values["overtaken_after_steps"]
    compared = (
        f"{values['step_s']:.4g} s per step instead of {values['baseline_step_s']:.4g} s, "
        f"a pause of {values['pause_s']:.3g} s instead of {values['baseline_pause_s']:.3g} s"
    )
    if steps is None:
        when = "never"
    elif steps:
        seconds = values["pause_s"] + steps * values["step_s"]
        when = f"after {steps} step{'s' * (steps > 1)} ({seconds:.0f} s)"
    elif overtaken:
        when = f"for the first {overtaken} steps"
    else:
        when = "at once"
    return f"{when}, against {other}: {compared}"


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_ROWS} more" if len(names) > _MOST_ROWS else ""
    return ", ".join(names[:_MOST_ROWS]) + more


def _print_nodes(console: Console, values: Mapping[str, Any]) -> None:
    nodes = sorted(
        values["nodes"], key=lambda row: -max(row["arriving_bytes"], row["leaving_bytes"])
    )
    found = new_table("busiest nodes", "node", ">ranks", ">arrives", ">leaves", ">stays inside")
    for row in nodes[:_MOST_ROWS]:
        sizes = (row[f"{name}_bytes"] for name in ("arriving", "leaving", "within"))
        found.add_row(row["node"], str(row["ranks"]), *(megabytes(round(n)) for n in sizes))
    console.print(found)
    if values["links"]:
        links = (
            f"{row['source']} to {row['target']} {megabytes(round(row['bytes']))}"
            for row in values["links"][:_MOST_ROWS]
        )
        console.print(f"busiest links: {', '.join(links)}", soft_wrap=True)
    hidden = len(nodes) - _MOST_ROWS, len(values["links"]) - _MOST_ROWS
    if max(hidden) > 0:
        console.print(f"{len(nodes)} nodes and {len(values['links'])} links in all: --json")


def _print_runners_up(console: Console, values: Mapping[str, Any]) -> None:
    if not values["runners_up"]:
        return
    columns = ("layout", "", ">s/step", ">GB", ">moved", ">pause", "why not")
    found = new_table("runners-up", *columns)
    for row in values["runners_up"]:
        found.add_row(
            row["layout"],
            _choices(row, ""),
            f"{row['step_s']:.4g}",
            f"{row['memory_bytes'] / 1e9:.4g}",
            megabytes(round(row["moved_bytes"])),
            f"{row['pause_s']:.3g} s",
            row["why_not"],
        )
    console.print(found)
