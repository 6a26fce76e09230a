"""Tensors at rest: versioned snapshots in the memory of a node that outlive every process."""

from tenplex_megatron.store.base import (
    DamagedFile,
    Inventory,
    RankSnapshot,
    StoredBox,
    TensorReader,
    TensorStore,
    TensorWriter,
)
from tenplex_megatron.store.reader import SnapshotReader
from tenplex_megatron.store.selection import (
    RejectedVersion,
    Selection,
    WorldVersion,
    select_version,
    world_versions,
)
from tenplex_megatron.store.shared import (
    SnapshotStore,
    default_root,
    node_directory,
    read_job,
)
from tenplex_megatron.store.space import check_space, free_bytes
from tenplex_megatron.store.values import PlainValue
from tenplex_megatron.store.writer import SnapshotWriter

__all__ = [
    "DamagedFile",
    "Inventory",
    "PlainValue",
    "RankSnapshot",
    "RejectedVersion",
    "Selection",
    "SnapshotReader",
    "SnapshotStore",
    "SnapshotWriter",
    "StoredBox",
    "TensorReader",
    "TensorStore",
    "TensorWriter",
    "WorldVersion",
    "check_space",
    "default_root",
    "free_bytes",
    "node_directory",
    "read_job",
    "select_version",
    "world_versions",
]
