"""How is a plan shown to a person?"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tenplex_megatron.core.collection import join_names
from tenplex_megatron.core.region import Region

__all__ = ["megabytes", "new_table", "print_plan"]

_MOST_RANKS = 32


def megabytes(nbytes: int) -> str:
    """Bytes in the unit a person reads.

    >>> megabytes(2_500_000), megabytes(7_000_000_000)
    ('2.50 MB', '7.00 GB')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def print_plan(values: Mapping[str, Any]) -> None:
    """The summary, bytes between nodes, bytes per new rank, and moves where there are any."""
    console = Console(highlight=False)
    console.print(f"{values['source']} -> {values['target']}", style="bold")
    for line in _summary(values):
        console.print(f"  {line}")
    console.print(_node_table(values))
    if len(values["ranks"]) <= _MOST_RANKS:
        console.print(_rank_table(values))
    if "moves" in values:
        console.print(_move_table(values))
    seconds = values["seconds"]
    console.print(f"built in {seconds['describe']:.1f} s, planned in {seconds['plan']:.2f} s")


def _summary(values: Mapping[str, Any]) -> list[str]:
    sizes, between = values["bytes"], values["transfers_between_nodes"]
    sender, sent = max(values["sent_by_node"].items(), key=lambda item: item[1])
    peak = max(values["ranks"], key=lambda row: row["received"])
    lines = [
        f"state, once              {megabytes(sizes['state'])}",
        f"needed by all new ranks  {megabytes(sizes['needed'])}",
        f"copied within nodes      {megabytes(sizes['local'])}",
        f"moved between nodes      {megabytes(sizes['moved'])}",
        f"least that must move     {megabytes(sizes['lower_bound'])}",
        f"busiest sender           {sender}: {megabytes(sent)}",
        f"peak receive             rank {peak['rank']}: {megabytes(peak['received'])}",
        f"transfers                {values['transfers']}, {between} of them between nodes",
    ]
    if values["created_boxes"]:
        lines.append(f"padding made anew        {values['created_boxes']} boxes")
    if values["unused_tensors"]:
        lines.append(f"left behind              {join_names(values['unused_tensors'], limit=2)}")
    return lines


def new_table(title: str, *columns: str) -> Table:
    """Text to the left, and what follows a '>' to the right."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table


def _node_table(values: Mapping[str, Any]) -> Table:
    table = new_table("between nodes", "snapshot on", "to ranks on", ">bytes")
    for row in values["nodes"]:
        stays = row["source"] == row["target"]
        table.add_row(
            row["source"], f"{row['target']}{' (stays)' if stays else ''}", megabytes(row["bytes"])
        )
    return table


def _rank_table(values: Mapping[str, Any]) -> Table:
    table = new_table("new ranks", ">rank", "node", ">needs", ">receives", ">sends")
    for row in values["ranks"]:
        sizes = (megabytes(row[name]) for name in ("needed", "received", "sent"))
        table.add_row(str(row["rank"]), row["node"], *sizes)
    return table


def _move_table(values: Mapping[str, Any]) -> Table:
    table = new_table(
        "transfers", ">to rank", "tensor", "region", ">bytes", ">from old", "on", "by"
    )
    for row in values["moves"]:
        start, stop = row["region"]
        by = "copy" if row["sender_rank"] is None else f"rank {row['sender_rank']}"
        table.add_row(
            str(row["target_rank"]),
            row["tensor"],
            str(Region(tuple(start), tuple(stop))),
            megabytes(row["bytes"]),
            str(row["source_rank"]),
            row["source_node"],
            by,
        )
    return table
