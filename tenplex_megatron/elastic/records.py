"""What do nodes tell each other about exits, changes, and the next generation?"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.store.base import RankSnapshot

__all__ = [
    "HANDED_OVER",
    "SNAPSHOT_DAMAGED",
    "WRONG_INPUT",
    "Change",
    "Ending",
    "Ledger",
    "NextGeneration",
    "NodeReport",
    "Source",
    "StepTime",
    "WorkerExit",
]

HANDED_OVER = 85
"""Exit code of a worker that left at a step boundary after a committed snapshot."""
SNAPSHOT_DAMAGED = 86
"""Exit code of a worker that met a damaged snapshot: try an older one; no device is to blame."""
WRONG_INPUT = 2
"""Exit code of a worker whose script or arguments are wrong; another try would end the same."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How one worker ended, before anybody stopped it."""

    rank: int
    device: int
    code: int
    time: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long the steps of one generation took."""

    identity: str
    """Of the training, see `GenerationSpec`: others under its name say nothing about it."""
    generation: int
    layout: ParallelLayout
    steps: int
    step_s: float
    """The median."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node brings to the next generation."""

    node: str
    devices: int
    snapshots: tuple[RankSnapshot, ...] = ()
    exits: tuple[WorkerExit, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Why a generation ends. The first change anybody posts is the one that counts."""

    kind: str
    """`start`, `failure`, `planned`, `leave` (a node goes) or `invalid` (wrong input)."""
    cause: str
    time: float
    node: str
    gpus: int | None = None
    step: int | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the job remembers from one generation to the next."""

    generation: int = 0
    allotted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    failures: int = 0
    repeated: tuple[int, int, int] = (-1, 0, 0)
    """Version, exit code and count of failures that look alike."""
    layout: ParallelLayout | None = None
    memory_limit: float | None = None
    """Predicted bytes per device that are too many: a layout of that size ran out of memory."""

    @property
    def gpus(self) -> int:
        """The number of devices the job may use."""
        return sum(map(len, self.allotted.values()))


@dataclass(frozen=True, slots=True)
class Source:
    """The version the next generation continues from, and the node of each part."""

    version: int
    generation: int
    world_size: int
    nodes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class NextGeneration:
    """Everything a node must know to start its share of the next generation."""

    ledger: Ledger
    change: Change
    layout: ParallelLayout
    ranks: tuple[tuple[str, int], ...]
    """Node and device of every rank."""
    source: Source | None
    reason: str
    predicted_step_s: float | None = None
    """None where nothing is known of the model."""
    rejected: tuple[tuple[str, str], ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    """Number of devices of every node, free and lost ones included."""
    master: tuple[str, int] = ("", 0)
    """Address and port of the store in which the workers of this generation meet."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The job ends here."""

    code: int
    reason: str
