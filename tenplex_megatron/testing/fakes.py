"""Snapshots and live state of numbered tensors, so that plans are run with real bytes."""

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.execution.executor import Target
from tenplex_megatron.store.base import StoredBox, TensorReader
from tenplex_megatron.store.values import PlainValue
from tenplex_megatron.testing.generate import numbered

__all__ = ["MemoryReader", "blank_targets", "box_bytes", "first_wrong"]

BLANK = 0xA5


def box_bytes(spec: TensorSpec, box: Box) -> npt.NDArray[np.uint8]:
    """The bytes of a box of a numbered tensor, row-major."""
    cut = numbered(spec)[box.region.slices()]
    # Odd multiplier: elements stay different, and all of their bytes are in use.
    mixed = cut.astype(np.uint64).reshape(-1, 1) * np.uint64(0x9E3779B97F4A7C15)
    content = np.ascontiguousarray(mixed.view(np.uint8)[:, -spec.itemsize :]).reshape(-1)
    if spec.dtype == "bool":
        content &= 1
    return content


class MemoryReader(TensorReader):
    """What some ranks of a collection hold of numbered tensors, in this process."""

    def __init__(self, collection: TensorCollection, ranks: Collection[int]) -> None:
        self.generation = 1
        self.version = 1
        self.world_size = len(collection.ranks)
        self.layout: Mapping[str, PlainValue] = {}
        self.ranks = tuple(sorted(ranks))
        self.specs = collection.tensors
        self._boxes: dict[int, tuple[StoredBox, ...]] = {}
        self._bytes: dict[tuple[int, int], memoryview] = {}
        for rank in self.ranks:
            stored = []
            for number, box in enumerate(collection.partition(rank)):
                spec = collection.tensors[box.tensor]
                content = box_bytes(spec, box).tobytes()
                self._bytes[rank, number] = memoryview(content)
                stored.append(StoredBox(box.tensor, box.region, spec.dtype, 0, len(content), ""))
            self._boxes[rank] = tuple(stored)

    def boxes(self, rank: int) -> tuple[StoredBox, ...]:
        """See `TensorReader.boxes`."""
        return self._boxes[rank]

    def progress(self, rank: int) -> dict[str, PlainValue]:
        """See `TensorReader.progress`."""
        return {"rank": rank}

    def view(self, rank: int, box_index: int) -> memoryview:
        """See `TensorReader.view`."""
        return self._bytes[rank, box_index]

    def verify(self, rank: int, box_index: int) -> None:
        """See `TensorReader.verify`; memory of this process is trusted."""

    def close(self) -> None:
        """See `TensorReader.close`."""
        self._bytes.clear()


def blank_targets(collection: TensorCollection, rank: int) -> list[Target]:
    """The boxes of a rank, every byte of them wrong."""
    targets = []
    for box in collection.partition(rank):
        spec = collection.tensors[box.tensor]
        memory = torch.full((box.region.numel * spec.itemsize,), BLANK, dtype=torch.uint8)
        targets.append(Target(box, memory.view(getattr(torch, spec.dtype))))
    return targets


def first_wrong(
    collection: TensorCollection, targets: Collection[Target], created: Collection[Box] = ()
) -> str | None:
    """The first box whose bytes are not those of the numbered tensor; `created` stays blank."""
    for target in targets:
        spec = collection.tensors[target.box.tensor]
        expected = box_bytes(spec, target.box).reshape(*target.box.region.shape, spec.itemsize)
        for box in created:
            shared = box.region.intersect(target.box.region) if box.tensor == spec.name else None
            if shared is not None:
                expected[shared.relative_to(target.box.region).slices()] = BLANK
        found = target.flat.view(torch.uint8).numpy()
        if not np.array_equal(found, expected.reshape(-1)):
            return str(target.box)
    return None
