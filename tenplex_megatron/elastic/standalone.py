"""How does a job that plain torchrun started get its layout and its state?

Without an agent of ours nothing changes while the job runs; but at every start, also after a
restart by torchrun, the layout follows from the policy and the number of ranks, and the state from
the newest complete snapshot. The snapshots stay when the job ends: nobody knows whether it is
started again, so a person removes them.
"""

import importlib
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from torch._C._distributed_c10d import PrefixStore, TCPStore

from tenplex_megatron.adapters.registry import argument_adapter
from tenplex_megatron.config import ElasticPolicy, load_policy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic import session
from tenplex_megatron.elastic.events import EventLog
from tenplex_megatron.elastic.generation import ENVIRONMENT_VARIABLE, GenerationSpec
from tenplex_megatron.elastic.membership import Rules, newest_complete
from tenplex_megatron.elastic.planning import rules_of
from tenplex_megatron.elastic.records import NodeReport
from tenplex_megatron.elastic.requests import default_run_dir, owner_only_folder
from tenplex_megatron.errors import ConfigError, StoreError
from tenplex_megatron.planner.allowed import allowed_layouts
from tenplex_megatron.store.base import RankSnapshot
from tenplex_megatron.store.shared import SnapshotStore, default_root, node_directory

__all__ = ["JOB_VARIABLE", "install_under_torchrun", "job_name", "node_names"]

logger = logging.getLogger(__name__)

JOB_VARIABLE = "TENPLEX_JOB"
"""Environment variable that names the job; its snapshots are found by this name."""

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def install_under_torchrun(policy_path: Path) -> None:
    """Append layout flags to `sys.argv` and hook the framework of this process.

    Raises:
        ConfigError: torchrun's variables are missing, or no layout uses exactly these ranks.
        StoreError: the job's snapshots are of another training, or of another format.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"--elastic-policy: {', '.join(missing)} not set; start the script with torchrun or "
            "`tenplex run`"
        )
    policy = load_policy(policy_path)
    _speak_on_first_rank()
    if policy.schedule:
        logger.warning("the policy's schedule needs `tenplex run`; under torchrun it is not used")
    adapter = argument_adapter(policy.framework)
    os.environ.update(adapter.environment(policy.device))
    if policy.device == "cpu" and adapter.cpu_stand_in is not None:
        importlib.import_module(adapter.cpu_stand_in).install()
    argv = sys.argv[1:]
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    rules = rules_of(policy, policy_path, adapter, argv, devices_per_node=per_node)
    layout = _choose(int(os.environ["WORLD_SIZE"]), per_node, rules)
    spec = _spec(policy_path, policy, layout, adapter.identity(argv))
    os.environ[ENVIRONMENT_VARIABLE] = spec.to_json()
    # The next start may have more ranks than this one.
    allowed = allowed_layouts(rules.job)
    sys.argv += adapter.device_arguments(policy.device)
    sys.argv += adapter.layout_arguments(argv, layout, allowed)
    session.install(spec, plans_changes=False)
    _say_start(spec)


def job_name(script: str, environment: Mapping[str, str]) -> str:
    """What two successive starts of one job have in common, and other jobs have not.

    The variable `TENPLEX_JOB`, else torchrun's `--rdzv-id`, else the script's name.

    >>> job_name("/a/pretrain_gpt.py", {"TORCHELASTIC_RUN_ID": "none"})
    'pretrain_gpt'
    """
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    with suppress(ValueError):
        # torchrun --standalone makes up another one at every start.
        run_id = "none" if uuid.UUID(run_id).version == 4 else run_id
    chosen = environment.get(JOB_VARIABLE) or ("" if run_id == "none" else run_id)
    return chosen or Path(script).stem


def node_names(hosts: Sequence[str]) -> list[str]:
    """A name for each of torchrun's nodes: that of its host, where its snapshots lie.

    Nodes on one host are told apart by their order.

    >>> node_names(["a", "b", "a"])
    ['a-0', 'b', 'a-1']
    """
    return [
        f"{host}-{hosts[:number].count(host)}" if hosts.count(host) > 1 else host
        for number, host in enumerate(hosts)
    ]


def _choose(world_size: int, per_node: int, rules: Rules) -> ParallelLayout:
    nodes = -(-world_size // per_node)
    devices = {f"node-{number}": tuple(range(per_node)) for number in range(nodes)}
    layout = rules.job.layout(rules.choose(devices, must_run=True).best.strategy)
    if layout.world_size != world_size:
        raise ConfigError(
            f"{world_size} ranks: the best layout the policy allows, {layout}, uses "
            f"{layout.world_size}; start as many ranks, or use `tenplex run`"
        )
    return layout


def _spec(
    policy_path: Path, policy: ElasticPolicy, layout: ParallelLayout, identity: str
) -> GenerationSpec:
    meeting = _Meeting.join()
    names = node_names(meeting.exchange("host", socket.gethostname().partition(".")[0]))
    node = names[meeting.number]
    job = job_name(sys.argv[0], os.environ)
    root = Path(policy.snapshot.directory) if policy.snapshot.directory else default_root()
    path = node_directory(root, job, node)
    held = _open_store(path, job, identity).inventory()
    rows = meeting.exchange("held", json.dumps([part.to_json() for part in held]))
    reports = [
        NodeReport(name, 0, tuple(RankSnapshot.from_json(part) for part in json.loads(row)))
        for name, row in zip(names, rows, strict=True)
    ]
    seen = [part.generation for report in reports for part in report.snapshots]
    run_dir = owner_only_folder(default_run_dir(job))
    generation = max(seen, default=0) + 1
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return GenerationSpec(
        job=job,
        identity=identity,
        generation=generation,
        cause="torchrun started",
        layout=layout,
        gpus=layout.world_size,
        node=node,
        nodes=tuple(names[rank // per_node] for rank in range(layout.world_size)),
        store=path,
        policy=policy_path.resolve(),
        rundir=run_dir,
        control=owner_only_folder(run_dir / "nodes" / node / f"generation-{generation}"),
        source=newest_complete(reports),
    )


def _open_store(path: Path, job: str, identity: str) -> SnapshotStore:
    try:
        return SnapshotStore(path, job, identity).create()
    except StoreError as error:
        raise StoreError(f"{error} (under torchrun, {JOB_VARIABLE} names the job)") from None


@dataclass(frozen=True)
class _Meeting:
    """The nodes of this job, through the store that torchrun already runs."""

    number: int
    count: int
    store: PrefixStore | None

    @classmethod
    def join(cls) -> Self:
        number, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
        if count == 1:
            return cls(number, count, None)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise ConfigError(
                "--elastic-policy on several nodes needs torchrun's store: add --rdzv-backend c10d "
                "and --rdzv-endpoint HOST:PORT"
            )
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        root = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(number, count, PrefixStore(f"tenplex/{attempt}", root))

    def exchange(self, what: str, mine: str) -> list[str]:
        """What every node says, by the first rank of each."""
        if self.store is None:
            return [mine]
        if os.environ["LOCAL_RANK"] == "0":
            self.store.set(f"{what}/{self.number}", mine)
        return [self.store.get(f"{what}/{number}").decode() for number in range(self.count)]


def _speak_on_first_rank() -> None:
    """One worker tells on stderr what happens here, wherever the framework's own log goes."""
    ours = logging.getLogger("tenplex_megatron")
    if os.environ["RANK"] != "0" or ours.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s tenplex: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    # Frameworks set up the root logger too; nothing is to be said twice.
    ours.propagate = False


def _say_start(spec: GenerationSpec) -> None:
    if os.environ["RANK"] != "0":
        return
    source = spec.source
    EventLog(spec.rundir / "events.jsonl", spec.node).append(
        "decided",
        spec.generation,
        layout=str(spec.layout),
        gpus=spec.gpus,
        cause=spec.cause,
        nodes=spec.nodes,
        version=None if source is None else source.version,
    )
    start = "the start" if source is None else f"step {source.version} of {source.world_size} ranks"
    logger.info(
        "job %s: %s from %s; snapshots in %s stay after the end, remove them to start anew",
        spec.job,
        spec.layout,
        start,
        spec.store,
    )
