"""What does an agent know about its job before it meets the other agents?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.entry import WorkerTask
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.store.shared import SnapshotStore

__all__ = ["JobSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """One node's view of a job; does not change while it runs."""

    job: str
    identity: str
    node: str
    min_nodes: int
    rules: Rules
    policy_path: Path
    run_dir: Path
    store: SnapshotStore
    store_path: Path
    task: WorkerTask
    """What every worker runs, without layout flags."""
    layout_flags: Callable[[ParallelLayout], Sequence[str]]
    """Flags that make the framework build a layout."""
