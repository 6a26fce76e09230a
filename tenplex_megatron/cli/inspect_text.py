"""How are snapshots and checkpoints shown to a person, also on a narrow terminal?

Where the text goes to a program, every row is one line, however long.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tenplex_megatron.cli.plan_text import megabytes

__all__ = ["print_checkpoint", "print_job", "spans"]

_NARROW = 76
_UNWRAPPED = 1_000_000
"""Columns; more than any name has."""


def print_job(job: Mapping[str, Any]) -> None:
    """Everything about a job's snapshots."""
    console = _console()
    console.print(f"[bold]{escape(job['job'])}[/bold]  {megabytes(job['bytes'])}")
    for node, folder in job["nodes"].items():
        console.print(f"  {node}: {folder}", markup=False)
    if not job["versions"]:
        console.print("no version is held here")
    elif console.width < _NARROW:
        for version in job["versions"]:
            _print_narrow(console, version)
    else:
        console.print(_version_table(console, job["versions"]))
    if job["newest_complete"] is None and job["versions"]:
        console.print("no version has all of its ranks here", style="yellow")
    if "tensors" in job:
        held = job["tensors_of"]
        title = f"tensors of step {held['version']}, generation {held['generation']}"
        _print_tensors(console, title, job["tensors"], ("regions", "holders"))
    _print_damage(console, job["damaged_files"], job["versions"])
    console.print(_verdict(job))


def print_checkpoint(values: Mapping[str, Any]) -> None:
    """Everything about a checkpoint."""
    console = _console()
    console.print(f"torch_dist checkpoint {values['path']}", markup=False, style="bold")
    console.print(
        f"{values['tensor_count']} tensors in {values['chunk_count']} chunks, "
        f"{megabytes(values['bytes'])}; {values['objects']} other objects; "
        f"{len(values['files'])} data files, "
        f"{megabytes(sum(values['files'].values()))}"
    )
    if "tensors" in values:
        _print_tensors(console, "tensors", values["tensors"], ("chunks",))
    _print_damage(console, values["damaged_files"], ())
    console.print(
        "its metadata was unpickled, which can run code: inspect only checkpoints you trust",
        style="yellow",
    )
    if values["sound"]:
        console.print("all data files are as long as the metadata says; their bytes were not read")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNWRAPPED)


def _table(console: Console) -> Table:
    return Table() if console.is_terminal else Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _version_table(console: Console, versions: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(console)
    for name in ("step", "gen.", "layout", "ranks held", "state", "bytes", "digests"):
        right = name in ("step", "gen.", "bytes")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for version in versions:
        table.add_row(
            str(version["version"]),
            str(version["generation"]),
            version["layout"],
            _holders(version),
            _state(version),
            megabytes(version["bytes"]),
            version["digests"],
            style="red" if version["problems"] else None,
        )
    return table


def _print_narrow(console: Console, version: Mapping[str, Any]) -> None:
    style = "red" if version["problems"] else None
    console.print(
        f"step {version['version']}, generation {version['generation']}: {version['layout']}",
        style=style,
    )
    console.print(f"  ranks {_holders(version)}", markup=False)
    console.print(
        f"  {_state(version)}, {megabytes(version['bytes'])}, digests {version['digests']}"
    )


def _holders(version: Mapping[str, Any]) -> str:
    """The ranks of every node.

    >>> _holders({"ranks": {"0": ["a"], "1": ["a"], "2": ["b"]}})
    '0-1 on a, 2 on b'
    """
    nodes: dict[str, list[int]] = {}
    for rank, names in version["ranks"].items():
        for name in names:
            nodes.setdefault(name, []).append(int(rank))
    return ", ".join(f"{spans(ranks)} on {node}" for node, ranks in sorted(nodes.items()))


def spans(numbers: Sequence[int]) -> str:
    """Numbers with runs joined.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2 5 7-8'
    """
    texts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        ends = dict.fromkeys((members[0], members[-1]))
        texts.append("-".join(map(str, ends)))
    return " ".join(texts)


def _state(version: Mapping[str, Any]) -> str:
    committed = "committed" if version["committed"] else "finished"
    if version["complete"]:
        return f"{committed}, complete"
    return f"{committed}, no ranks {spans(version['missing_ranks'])}"


def _print_tensors(
    console: Console, title: str, tensors: Iterable[Mapping[str, Any]], counts: Sequence[str]
) -> None:
    console.print(title, markup=False, style="italic")
    table = _table(console)
    table.add_column("name", overflow="fold")
    table.add_column("shape")
    for name in ("bytes", *counts):
        table.add_column(name, justify="right")
    for tensor in tensors:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        numbers = (tensor[name] for name in counts)
        table.add_row(
            escape(tensor["name"]),
            f"{shape} {tensor['dtype']}",
            megabytes(tensor["bytes"]),
            *(str(len(value) if isinstance(value, list) else value) for value in numbers),
        )
    console.print(table)


def _print_damage(
    console: Console,
    files: Iterable[Mapping[str, Any]],
    versions: Iterable[Mapping[str, Any]],
) -> None:
    for file in files:
        reason = str(file["reason"]).removeprefix(f"{file['file']}: ")
        console.print(f"damaged: {file['file']}: {reason}", style="red", markup=False)
    for version in versions:
        for problem in version["problems"]:
            console.print(f"damaged: {problem}", style="red", markup=False)


def _verdict(job: Mapping[str, Any]) -> str:
    if not job["sound"]:
        return "[red]not sound[/red]"
    if not job["verified"]:
        return "indexes are sound; digests were not read, use --verify"
    return "[green]sound[/green]"
