"""`tenplex inspect`: what do snapshots or a checkpoint hold, and is every byte sound?"""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tenplex_megatron.cli.checkpoint import METADATA_FILE, checkpoint_values, find_checkpoint
from tenplex_megatron.cli.inspect_text import print_checkpoint, print_job
from tenplex_megatron.cli.stored import StoredJob, find_jobs, layout_text
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import Inventory
from tenplex_megatron.store.selection import WorldVersion, world_versions
from tenplex_megatron.store.shared import SnapshotStore, default_root

__all__ = ["build_parser", "inspect", "job_values"]

_VERIFY_BELOW_BYTES = 1_000_000_000
_DESCRIPTION = f"""Shows what a folder of snapshots holds: a node's, a job's or the root folder.
Digests are verified when less than {_VERIFY_BELOW_BYTES / 1e9:g} GB is held, or with --verify.

PATH may also be a torch_dist checkpoint of Megatron (with a {METADATA_FILE} file). That file is
unpickled, which can run any code its author put there: name only checkpoints you trust."""
_EPILOG = """examples:
  tenplex inspect                            everything under the default root
  tenplex inspect --job my-job --tensors
  tenplex inspect /dev/shm/tenplex-0/my-job/node0 --verify --json
  tenplex inspect checkpoints/iter_0000100   a checkpoint you trust

A version is finished when this node's ranks have written all of it, and committed when the ranks of
all nodes have: that is what a job goes on from.

exit codes: 0 sound, 1 something is damaged, 2 wrong input.
"""


def inspect(arguments: Sequence[str]) -> int:
    """Print what is held; 1 when something is damaged."""
    given = build_parser().parse_args(arguments)
    # What is damaged is part of the answer here.
    logging.getLogger("tenplex_megatron.store").setLevel(logging.ERROR)
    path: Path = given.path or default_root()
    if given.job:
        path /= given.job
    checkpoint = find_checkpoint(path)
    if checkpoint is not None:
        values = checkpoint_values(checkpoint, with_tensors=given.tensors)
    else:
        jobs = [
            job_values(job, verify=given.verify, with_tensors=given.tensors)
            for job in find_jobs(path)
        ]
        sound = all(job["sound"] for job in jobs)
        values = {"kind": "snapshots", "path": str(path), "sound": sound, "jobs": jobs}
    if given.json:
        print(json.dumps(values))
    elif checkpoint is not None:
        print_checkpoint(values)
    else:
        for job in values["jobs"]:
            print_job(job)
    return 0 if values["sound"] else 1


def job_values(
    job: StoredJob, *, verify: bool | None = None, with_tensors: bool = False
) -> dict[str, Any]:
    """What the nodes of a job hold, in plain values.

    Args:
        job: the stores of its nodes.
        verify: read every byte; None: when there are few enough.
        with_tensors: describe the tensors of the newest complete version.
    """
    inventories = {node: store.examine() for node, store in job.nodes.items()}
    damaged = [
        {"node": node, "file": file.path, "reason": file.reason}
        for node, inventory in inventories.items()
        for file in inventory.damaged
    ] + [entry for node, store in job.nodes.items() for entry in _quarantined(node, store)]
    versions = world_versions({node: held.snapshots for node, held in inventories.items()})
    total = sum(one.nbytes for inventory in inventories.values() for one in inventory.snapshots)
    verifies = total < _VERIFY_BELOW_BYTES if verify is None else verify
    rows = [_version_values(job, inventories, version, verifies) for version in versions]
    complete = [version for version in versions if version.complete and not version.contradictions]
    newest = next(iter(complete or versions), None)
    values: dict[str, Any] = {
        "job": job.job,
        "identity": job.identity,
        "nodes": {node: str(store.directory) for node, store in job.nodes.items()},
        "bytes": total,
        "sound": not damaged and not any(row["problems"] for row in rows),
        "verified": verifies,
        "versions": rows,
        "damaged_files": damaged,
        "newest_complete": complete[0].version if complete else None,
    }
    if with_tensors and newest is not None:
        values["tensors_of"] = {"version": newest.version, "generation": newest.generation}
        values["tensors"] = _tensor_values(job, newest)
    return values


def _version_values(
    job: StoredJob, inventories: Mapping[str, Inventory], version: WorldVersion, verifies: bool
) -> dict[str, Any]:
    nbytes = sum(
        one.nbytes
        for inventory in inventories.values()
        for one in inventory.snapshots
        if (one.generation, one.version) == (version.generation, version.version)
    )
    problems = list(version.contradictions)
    if verifies:
        for node in _nodes(version):
            problems.extend(_problems(job.nodes[node], version))
    return {
        "version": version.version,
        "generation": version.generation,
        "layout": layout_text(version.layout),
        "world_size": version.world_size,
        "ranks": {str(rank): list(nodes) for rank, nodes in version.holders.items()},
        "committed": version.committed,
        "complete": version.complete,
        "missing_ranks": list(version.missing),
        "bytes": nbytes,
        "digests": ("damaged" if problems else "ok") if verifies else "not read",
        "problems": problems,
    }


def _problems(store: SnapshotStore, version: WorldVersion) -> tuple[str, ...]:
    """Sentences about damage in what a node holds of a version."""
    try:
        reader = store.reader(version.version, generation=version.generation)
        problems = reader.problems()
        reader.close()
    except StoreError as error:
        problems = (str(error),)
    # A running job may have begun to overwrite the version; its index is removed before that.
    return problems if not problems or _still_there(store, version) else ()


def _still_there(store: SnapshotStore, version: WorldVersion) -> bool:
    ranks = {
        one.rank
        for one in store.examine().snapshots
        if (one.generation, one.version) == (version.generation, version.version)
    }
    here = store.directory.name
    return ranks == {rank for rank, nodes in version.holders.items() if here in nodes}


def _quarantined(node: str, store: SnapshotStore) -> list[dict[str, str]]:
    """Indexes of ranks that a job found damaged and took out of use."""
    reason = "its data was found damaged while it was read, and was taken out of use"
    found = sorted(store.directory.glob("gen-*/rank-*.damaged"))
    return [{"node": node, "file": str(path), "reason": reason} for path in found]


def _tensor_values(job: StoredJob, version: WorldVersion) -> list[dict[str, Any]]:
    specs: dict[str, TensorSpec] = {}
    regions: dict[str, set[object]] = {}
    holders: dict[str, set[int]] = {}
    for node in _nodes(version):
        try:
            reader = job.nodes[node].reader(version.version, generation=version.generation)
        except StoreError:
            continue  # named among the problems of the version
        specs.update(reader.specs)
        for rank in reader.ranks:
            for box in reader.boxes(rank):
                regions.setdefault(box.tensor, set()).add(box.region)
                holders.setdefault(box.tensor, set()).add(rank)
        reader.close()
    return [
        {
            "name": name,
            "shape": list(specs[name].shape),
            "dtype": specs[name].dtype,
            "padded": specs[name].padded,
            "bytes": specs[name].nbytes,
            "regions": len(regions[name]),
            "holders": sorted(holders[name]),
        }
        for name in sorted(regions)
    ]


def _nodes(version: WorldVersion) -> list[str]:
    return sorted({node for nodes in version.holders.values() for node in nodes})


def build_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="tenplex inspect",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", type=Path, nargs="?", metavar="PATH", help=f"folder (default: {default_root()})"
    )
    parser.add_argument("--job", help="job whose folder is in PATH")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read every byte and compare digests, or do not",
    )
    parser.add_argument(
        "--tensors", action="store_true", help="also the tensors of the newest complete version"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser
