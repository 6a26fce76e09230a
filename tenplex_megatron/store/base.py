"""What does a place that keeps snapshots of tensors promise, whatever it is made of?

Invariants: a version of a rank is visible only once every byte of it is written; beginning a new
version never removes the newest committed one; what is read carries the digest it was written with.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.processors import processors_per_rank
from tenplex_megatron.store.values import PlainValue

__all__ = [
    "DamagedFile",
    "Inventory",
    "RankSnapshot",
    "StoredBox",
    "TensorReader",
    "TensorStore",
    "TensorWriter",
]


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box at rest: which part of which tensor, where its bytes lie, and their digest."""

    tensor: str
    region: Region
    dtype: str
    offset: int
    nbytes: int
    digest: str

    @property
    def box(self) -> Box:
        """The part of the global tensor these bytes are."""
        return Box(self.tensor, self.region)


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """One finished version of one rank, as its index describes it (no data was read)."""

    generation: int
    version: int
    rank: int
    world_size: int
    layout: Mapping[str, PlainValue]
    committed: bool
    nbytes: int
    digest: str
    """Digest of the index, which contains the digest of every box."""

    def to_json(self) -> dict[str, object]:
        """Plain values for a message to another node."""
        return {
            "generation": self.generation,
            "version": self.version,
            "rank": self.rank,
            "world_size": self.world_size,
            "layout": dict(self.layout),
            "committed": self.committed,
            "nbytes": self.nbytes,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> "RankSnapshot":
        """The snapshot that `to_json` described."""
        return cls(
            generation=cast(int, record["generation"]),
            version=cast(int, record["version"]),
            rank=cast(int, record["rank"]),
            world_size=cast(int, record["world_size"]),
            layout=cast(Mapping[str, PlainValue], record["layout"]),
            committed=cast(bool, record["committed"]),
            nbytes=cast(int, record["nbytes"]),
            digest=cast(str, record["digest"]),
        )


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that was skipped, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """What one node holds, sorted by generation, version and rank; and what it had to skip."""

    snapshots: tuple[RankSnapshot, ...]
    damaged: tuple[DamagedFile, ...]


class TensorWriter(ABC):
    """Writes the versions of one rank; used by the worker of that rank alone."""

    @abstractmethod
    def begin(self, version: int, *, spare: int | None = None) -> list[memoryview]:
        """Open `version` for writing: one writable view of bytes per box, in the boxes' order.

        `spare` is the version all ranks have agreed to be finished, when that is newer than what
        is committed here: the agreement comes before one rank per node records it.

        Does not block. From here to `finish` the version does not exist for readers; the newest
        committed version stays untouched whatever happens.

        Raises:
            StoreError: `version` is not newer than what is held, or one is being finished.
        """

    @abstractmethod
    def finish(self, version: int, progress: Mapping[str, PlainValue]) -> tuple[str, ...]:
        """Make the begun version visible; returns the digest of each box.

        Blocks for as long as reading every byte once takes; any thread may call it. The views
        must not be written any more. After a failure the version does not exist.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; finished versions stay readable."""


class TensorReader(ABC):
    """Reads one version of the ranks that are held here."""

    generation: int
    version: int
    world_size: int
    layout: Mapping[str, PlainValue]
    ranks: tuple[int, ...]
    specs: Mapping[str, TensorSpec]

    @abstractmethod
    def boxes(self, rank: int) -> tuple[StoredBox, ...]:
        """What `rank` wrote, in the order it was written."""

    @abstractmethod
    def progress(self, rank: int) -> dict[str, PlainValue]:
        """The values `rank` gave to `finish`, equal in value and type."""

    @abstractmethod
    def view(self, rank: int, box_index: int) -> memoryview:
        """The bytes of a box, read-only and without a copy."""

    @abstractmethod
    def verify(self, rank: int, box_index: int) -> None:
        """Compare a box with the digest it was written with.

        Raises:
            StoreError: naming the file, the tensor and the region.
        """

    def damaged(self, boxes: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """What `verify` says of those (rank, box index) that are damaged, in the given order.

        Boxes are read on all processors this rank has to itself.
        """

        def problem(box: tuple[int, int]) -> str | None:
            try:
                self.verify(*box)
            except StoreError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(processors_per_rank(), thread_name_prefix="tenplex-verify") as pool:
            found = zip(boxes, pool.map(problem, boxes), strict=True)
            return {box: text for box, text in found if text is not None}

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory once no view is in use."""


class TensorStore(ABC):
    """The snapshots of one job on one node."""

    @abstractmethod
    def writer(
        self,
        rank: int,
        world_size: int,
        *,
        generation: int,
        layout: Mapping[str, PlainValue],
        specs: Mapping[str, TensorSpec],
        boxes: Sequence[Box],
    ) -> TensorWriter:
        """Reserve memory for two versions of `boxes` and open them for writing.

        Raises:
            SpaceError: there is not enough memory; nothing is left behind.
        """

    @abstractmethod
    def commit(self, version: int, *, generation: int, ranks: Collection[int]) -> None:
        """Record that every rank of the world has finished `version`; the caller has agreed that.

        `ranks` are all those whose snapshots lie here. Calling it twice does no harm.

        Raises:
            StoreError: one of `ranks` has no finished `version` here.
        """

    @abstractmethod
    def examine(self) -> Inventory:
        """What is held and what is damaged, from the indexes alone."""

    @abstractmethod
    def reader(self, version: int, *, generation: int | None = None) -> TensorReader:
        """Open `version`, of the newest generation that holds it unless one is named.

        Raises:
            StoreError: no rank has finished that version here, or its data is torn.
        """

    @abstractmethod
    def prune(self, keep_generation: int) -> tuple[int, ...]:
        """Remove older generations; returns which.

        Raises:
            StoreError: `keep_generation` has not committed a version here.
        """

    def inventory(self) -> tuple[RankSnapshot, ...]:
        """The snapshots that `examine` finds undamaged."""
        return self.examine().snapshots
