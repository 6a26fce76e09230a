"""How is one version read without a copy, and how is damage found and named?

Every data file is mapped read-only when it is first asked for; nothing is read ahead.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import StoredBox, TensorReader
from tenplex_megatron.store.files import open_private
from tenplex_megatron.store.index import RankIndex, digest_bytes
from tenplex_megatron.store.values import PlainValue

__all__ = ["SnapshotReader", "StoredIndex"]


@dataclass(slots=True)
class StoredIndex:
    """An undamaged index, its digest, and the data file it describes."""

    index: RankIndex
    digest: str
    data_path: Path
    memory: memoryview | None = field(default=None, repr=False)


class SnapshotReader(TensorReader):
    """One version of the ranks held on this node."""

    def __init__(self, stored: Mapping[int, StoredIndex]) -> None:
        """Read `stored`: at least one rank, all of one version of one generation.

        Raises:
            StoreError: the ranks contradict each other.
        """
        self._stored = dict(sorted(stored.items()))
        self.ranks = tuple(self._stored)
        first = self._stored[self.ranks[0]].index
        self.generation = first.generation
        self.version = first.version
        self.world_size = first.world_size
        self.layout = first.layout
        specs: dict[str, TensorSpec] = {}
        for rank, entry in self._stored.items():
            if (entry.index.world_size, entry.index.layout) != (first.world_size, first.layout):
                raise StoreError(
                    f"version {self.version}: rank {rank} was written in layout "
                    f"{entry.index.layout}, rank {self.ranks[0]} in {first.layout}"
                )
            for name, spec in entry.index.specs.items():
                if specs.setdefault(name, spec) != spec:
                    raise StoreError(
                        f"version {self.version}: rank {rank} says {spec}, "
                        f"another rank says {specs[name]}"
                    )
        self.specs = specs

    def boxes(self, rank: int) -> tuple[StoredBox, ...]:
        """See `TensorReader.boxes`."""
        return self._entry(rank).index.boxes

    def progress(self, rank: int) -> dict[str, PlainValue]:
        """See `TensorReader.progress`."""
        return dict(self._entry(rank).index.progress)

    def index_digest(self, rank: int) -> str:
        """The digest over the index of a rank, and so over all its boxes."""
        return self._entry(rank).digest

    def view(self, rank: int, box_index: int) -> memoryview:
        """See `TensorReader.view`."""
        entry = self._entry(rank)
        box = entry.index.boxes[box_index]
        if entry.memory is None:
            entry.memory = _map(entry.data_path, entry.index.data_bytes)
        return entry.memory[box.offset : box.offset + box.nbytes]

    def verify(self, rank: int, box_index: int) -> None:
        """See `TensorReader.verify`."""
        entry = self._entry(rank)
        box = entry.index.boxes[box_index]
        found = digest_bytes(self.view(rank, box_index))
        if found != box.digest:
            raise StoreError(
                f"{entry.data_path}: {box.tensor} {box.region} of version {self.version} is "
                f"damaged: expected digest {box.digest}, got {found} "
                f"({box.nbytes} bytes at {box.offset})"
            )

    def problems(self) -> tuple[str, ...]:
        """Verify every box of every rank held here; one sentence for each that is damaged."""
        todo = [(rank, index) for rank in self.ranks for index in range(len(self.boxes(rank)))]
        return tuple(self.damaged(todo).values())

    def close(self) -> None:
        """See `TensorReader.close`."""
        for entry in self._stored.values():
            entry.memory = None

    def _entry(self, rank: int) -> StoredIndex:
        try:
            return self._stored[rank]
        except KeyError:
            raise StoreError(
                f"version {self.version}: rank {rank} is not held here, only {self.ranks}"
            ) from None


def _map(path: Path, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except FileNotFoundError:
        raise StoreError(f"{path}: missing, its index names {nbytes} bytes") from None
    try:
        size = os.fstat(descriptor).st_size
        if size < nbytes:  # reading past the end of a mapped file kills the process
            raise StoreError(f"{path}: truncated to {size} bytes, expected {nbytes}")
        return memoryview(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)
