"""`tenplex plan`: what would a change of layout move?  A dry run; no tensor is touched.

With --from the layout to go to is asked for as well, and all is predicted: see `what_if`.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tenplex_megatron.adapters.registry import argument_adapter
from tenplex_megatron.cli.counts import count
from tenplex_megatron.cli.describe import Describer, Script
from tenplex_megatron.cli.plan_text import print_plan
from tenplex_megatron.cli.stored import StoredJob, find_jobs
from tenplex_megatron.cli.what_if import build_parser as build_what_if_parser
from tenplex_megatron.config import load_policy
from tenplex_megatron.core.codec import region_to_json
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import Job, allowed_layouts, check_layout
from tenplex_megatron.planner.placement import pick_devices, place_ranks
from tenplex_megatron.store.selection import WorldVersion, select_version

__all__ = ["build_parser", "plan", "plan_values"]

_USAGE = """tenplex plan [options] SOURCE TARGET [options] script [flags]
       tenplex plan --from LAYOUT --gpus N --cluster C (--model FILE | -- FLAGS ...)"""
_DESCRIPTION = """Shows what a change of layout would move, without moving anything.

Between two layouts (SOURCE TARGET script): exactly.  Every rank of a layout is built once by the
training script itself, without a GPU and without filling memory; the script is left before it
trains.

On other devices (--from, --gpus or --lost): predicted.  Which layout would the job get, how fast
is it, what does going there move, and when has that paid off?  Its options follow at the end."""
_EPILOG = """examples:
  between two layouts:
    tenplex plan TP2,PP2,DP2 TP1,PP4,DP1 --nodes 2 pretrain_gpt.py --num-layers 8 ...
  from what a job has stored, onto one node:
    tenplex plan /dev/shm/tenplex-0/my-job TP1,PP4 --to-nodes 1 pretrain_gpt.py --num-layers 8 ...
  every transfer, as JSON:
    tenplex plan TP2,DP2 TP4 --json --moves pretrain_gpt.py --num-layers 8 ...

exit codes: 0 there is a plan, 2 wrong input or nobody holds what is needed.
"""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where state comes from: described, or stored."""

    layout: ParallelLayout
    nodes: Mapping[int, str]
    collection: TensorCollection | None
    text: str


def plan(arguments: Sequence[str]) -> int:
    """Print the plan between two layouts."""
    given = build_parser().parse_args(arguments)
    started = time.monotonic()
    script = Script(
        framework=given.framework,
        path=given.script,
        argv=tuple(given.flags),
        is_module=given.module,
    )
    target = ParallelLayout.parse(given.target)
    source = _read_source(given.source, given.nodes)
    names = _target_nodes(source, given.to_nodes or given.nodes)
    topology = Topology(source.nodes, _place(target, names))
    found, target_state = _describe(given, script, source, target)
    described = time.monotonic()
    result = plan_reshard(found, target_state, topology)
    values: dict[str, Any] = {
        "source": source.text,
        "target": str(target),
        **plan_values(result, found),
        "seconds": {
            "describe": round(described - started, 3),
            "plan": round(time.monotonic() - described, 3),
        },
    }
    if given.moves:
        values["moves"] = list(_moves(result))
    if given.json:
        print(json.dumps(values))
    else:
        print_plan(values)
    return 0


def plan_values(found: ReshardPlan, source: TensorCollection) -> dict[str, Any]:
    """A plan in plain values."""
    topology = found.topology
    between: Counter[tuple[str, str]] = Counter()
    needed: Counter[int] = Counter()
    for transfer in found.transfers:
        ends = topology.source_nodes[transfer.source_rank], topology.target_nodes
        between[ends[0], ends[1][transfer.target_rank]] += found.nbytes(transfer)
        needed[transfer.target_rank] += found.nbytes(transfer)
    sent, received = found.sent_by_rank, found.received_by_rank
    return {
        "bytes": {
            "state": source.total_bytes,
            "needed": found.bytes_total,
            "local": found.bytes_total - found.bytes_moved,
            "moved": found.bytes_moved,
            "lower_bound": found.bytes_lower_bound,
        },
        "transfers": len(found.transfers),
        "transfers_between_nodes": sum(1 for _ in found.remote()),
        "nodes": [
            {"source": ends[0], "target": ends[1], "bytes": nbytes}
            for ends, nbytes in sorted(between.items())
        ],
        "sent_by_node": found.sent_by_node,
        "ranks": [
            {
                "rank": rank,
                "node": node,
                "needed": needed[rank],
                "received": received[rank],
                "sent": sent[rank],
            }
            for rank, node in topology.target_nodes.items()
        ],
        "created_boxes": len(found.created),
        "unused_tensors": list(found.unused),
    }


def _moves(found: ReshardPlan) -> list[dict[str, Any]]:
    nodes = found.topology
    return [
        {
            "target_rank": one.target_rank,
            "target_node": nodes.target_nodes[one.target_rank],
            "tensor": one.tensor,
            "region": region_to_json(one.region),
            "bytes": found.nbytes(one),
            "source_rank": one.source_rank,
            "source_node": nodes.source_nodes[one.source_rank],
            "sender_rank": None if one.is_local else one.sender_rank,
        }
        for one in found.transfers
    ]


def _describe(
    given: argparse.Namespace, script: Script, source: _Source, target: ParallelLayout
) -> tuple[TensorCollection, TensorCollection]:
    """Source and target; the framework builds what is not stored."""
    built = [target] if source.collection else [source.layout, target]
    adapter = argument_adapter(script.framework)
    job = Job(model=adapter.profile(script.argv, is_rough=True), base=adapter.strategy(script.argv))
    for layout in built:
        # Refuses in an instant what the framework would refuse after it is imported.
        check_layout(job, layout)
    allowed = [source.layout, target]
    if given.elastic_policy is not None:
        devices = max(layout.world_size for layout in allowed)
        layouts = load_policy(given.elastic_policy).layouts
        allowed += allowed_layouts(replace(job, layouts=layouts), devices)
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar:
        ranks = sum(layout.world_size for layout in built)
        task = bar.add_task("importing the framework", total=ranks)

        def on_rank() -> None:
            bar.update(task, advance=1, description="building ranks")

        with Describer(script, allowed, timeout_s=given.timeout, on_rank=on_rank) as describer:
            found = source.collection or describer.describe(source.layout)
            stored: Mapping[str, TensorSpec] = found.tensors
            return found, describer.describe(target, stored)


def _read_source(text: str, nodes: int | None) -> _Source:
    path = Path(text)
    if path.is_dir():
        jobs = find_jobs(path)
        if len(jobs) > 1:
            names = ", ".join(job.job for job in jobs)
            raise ConfigError(f"{path}: holds several jobs ({names}); name the folder of one")
        return _stored_source(path, jobs[0])
    if "/" in text:
        raise ConfigError(f"{path}: no such folder")
    layout = ParallelLayout.parse(text)
    return _Source(layout, _place(layout, _default_nodes(nodes or 1)), None, str(layout))


def _stored_source(path: Path, job: StoredJob) -> _Source:
    inventories = {node: store.examine().snapshots for node, store in job.nodes.items()}
    chosen = select_version(inventories, lambda _: ()).chosen
    if chosen is None:
        raise ConfigError(f"{path}: no version of which every rank is here; see tenplex inspect")
    layout = ParallelLayout.from_json(chosen.layout)
    text = f"step {chosen.version} of {job.job} in {layout}"
    return _Source(layout, chosen.nodes, _stored_collection(job, chosen), text)


def _stored_collection(job: StoredJob, chosen: WorldVersion) -> TensorCollection:
    specs: list[TensorSpec] = []
    holdings: list[tuple[int, Box]] = []
    for node in sorted(set(chosen.nodes.values())):
        reader = job.nodes[node].reader(chosen.version, generation=chosen.generation)
        specs.extend(reader.specs.values())
        holdings.extend(
            (rank, stored.box)
            for rank in reader.ranks
            if chosen.nodes[rank] == node
            for stored in reader.boxes(rank)
        )
        reader.close()
    return TensorCollection.build(specs, holdings)


def _target_nodes(source: _Source, count: int | None) -> tuple[str, ...]:
    """The source's nodes, fewer or more of them."""
    known = tuple(sorted(set(source.nodes.values())))
    wanted = len(known) if count is None else count
    more = [f"new{number}" for number in range(wanted - len(known))]
    return (*known[:wanted], *more)


def _default_nodes(count: int) -> tuple[str, ...]:
    return tuple(f"node{number}" for number in range(count))


def _place(layout: ParallelLayout, nodes: Sequence[str]) -> dict[int, str]:
    """The node of every rank, as an agent with enough devices on every node would place it."""
    if len(nodes) > layout.world_size:
        raise ConfigError(f"{layout}: {layout.world_size} ranks can't use {len(nodes)} nodes")
    free = {node: tuple(range(layout.world_size)) for node in nodes}
    ranks = place_ranks(layout, pick_devices(free, layout.world_size))
    return {rank: node for rank, (node, _) in enumerate(ranks)}


def build_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="tenplex plan",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=f"{_EPILOG}\non other devices:\n\n{build_what_if_parser().format_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="layout, or the folder of a job's or a node's snapshots")
    add("target", metavar="TARGET", help="layout, such as TP1,PP4,DP2")
    add("--nodes", type=count, metavar="N", help="nodes of a source layout (default 1)")
    add("--to-nodes", type=count, metavar="N", help="nodes of the target (default: the source's)")
    add("--framework", choices=("megatron",), default="megatron", help="what the script trains on")
    add(
        "--elastic-policy",
        type=Path,
        metavar="YAML",
        help="policy of the job: pads the vocabulary for every layout it allows, as the job does "
        "(default: for these two layouts)",
    )
    add("--moves", action="store_true", help="also every transfer")
    add("--json", action="store_true", help="one JSON object")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds per rank (default 600)")
    add("-m", "--module", action="store_true", help="the script is a module's name")
    add("script", help="the training script")
    add("flags", nargs=argparse.REMAINDER, help="its flags, without those of a layout")
    return parser
