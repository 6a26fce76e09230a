"""How does a job that plain torchrun started get its layout and its state?

Without an agent of ours nothing changes while the job runs; but at every start, also after a
restart by torchrun, the layout follows from the policy and the number of ranks, and the state from
the newest complete snapshot.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore

from tenplex_megatron import cpu
from tenplex_megatron.adapters.registry import argument_adapter
from tenplex_megatron.config import ElasticPolicy, load_policy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic import session
from tenplex_megatron.elastic.generation import ENVIRONMENT_VARIABLE, GenerationSpec
from tenplex_megatron.elastic.membership import Source
from tenplex_megatron.elastic.requests import default_run_dir, owner_only_folder
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import allowed_layouts, choose
from tenplex_megatron.store.base import RankSnapshot
from tenplex_megatron.store.selection import WorldVersion, select_version
from tenplex_megatron.store.shared import SnapshotStore, default_root, node_directory

__all__ = ["install_under_torchrun"]

logger = logging.getLogger(__name__)

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def install_under_torchrun(policy_path: Path) -> None:
    """Append layout flags to `sys.argv` and hook the framework of this process.

    Raises:
        ConfigError: torchrun's variables are missing, or no layout uses exactly these ranks.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"--elastic-policy: {', '.join(missing)} not set; start the script with torchrun or "
            "`tenplex run`"
        )
    policy = load_policy(policy_path)
    if policy.device == "cpu":
        cpu.install()
    adapter = argument_adapter(policy.framework)
    argv = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    limits = adapter.limits(argv)
    layout = choose(world_size, limits, policy.layouts).layout
    if layout.world_size != world_size:
        raise ConfigError(
            f"{world_size} ranks: the best layout the policy allows, {layout}, uses "
            f"{layout.world_size}; start as many ranks, or use `tenplex run`"
        )
    spec = _spec(policy_path, policy, layout, adapter.identity(argv))
    os.environ[ENVIRONMENT_VARIABLE] = spec.to_json()
    allowed = allowed_layouts(limits, policy.layouts, world_size)
    sys.argv += adapter.device_arguments(policy.device)
    sys.argv += adapter.layout_arguments(argv, layout, allowed)
    session.install(spec)


def _spec(
    policy_path: Path, policy: ElasticPolicy, layout: ParallelLayout, identity: str
) -> GenerationSpec:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = run_id if run_id != "none" else Path(sys.argv[0]).stem
    node = f"node{os.environ['GROUP_RANK']}"
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    directory = policy.snapshot.directory
    path = node_directory(Path(directory) if directory else default_root(), job, node)
    inventories = _exchange(node, SnapshotStore(path, job, identity).create().inventory())
    chosen = select_version(inventories, lambda _: ()).chosen
    seen = [held.generation for held in sum(map(tuple, inventories.values()), ())]
    run_dir = owner_only_folder(default_run_dir(job))
    generation = max(seen, default=0) + 1
    return GenerationSpec(
        job=job,
        identity=identity,
        generation=generation,
        cause="torchrun started",
        layout=layout,
        gpus=layout.world_size,
        node=node,
        nodes=tuple(f"node{rank // per_node}" for rank in range(layout.world_size)),
        store=path,
        policy=policy_path.resolve(),
        rundir=run_dir,
        control=owner_only_folder(run_dir / "nodes" / node / f"generation-{generation}"),
        source=_source(chosen),
    )


def _source(chosen: WorldVersion | None) -> Source | None:
    if chosen is None:
        return None
    return Source(chosen.version, chosen.generation, chosen.world_size, chosen.nodes)


def _exchange(node: str, mine: Sequence[RankSnapshot]) -> Mapping[str, Sequence[RankSnapshot]]:
    """What every node's store holds, through the store that torchrun already runs."""
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    if nodes == 1:
        return {node: mine}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "--elastic-policy on several nodes needs torchrun's store: add --rdzv-backend c10d and "
            "--rdzv-endpoint HOST:PORT"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    root = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"tenplex/{attempt}", root)
    if os.environ["LOCAL_RANK"] == "0":
        store.set(node, json.dumps([held.to_json() for held in mine]))
    names = [f"node{number}" for number in range(nodes)]
    rows = {name: json.loads(store.get(name)) for name in names}
    return {name: [RankSnapshot.from_json(row) for row in rows[name]] for name in names}
