"""How does a rank overwrite its older version in place and never lose the newer one?

Each rank has two slots: a data file mapped once and an index. The index of a slot is removed before
its data is touched, and renamed into place after the last byte and its digest are known.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import StoredBox, TensorWriter
from tenplex_megatron.store.files import (
    open_private,
    read_private,
    remove_private,
    write_atomically,
)
from tenplex_megatron.store.index import RankIndex, digest_bytes
from tenplex_megatron.store.pages import PageToucher, memory_address
from tenplex_megatron.store.processors import processors_per_rank
from tenplex_megatron.store.space import check_space, reserve
from tenplex_megatron.store.values import PlainValue, encode_value

__all__ = ["SLOTS", "SnapshotWriter", "place_boxes", "slot_paths"]

SLOTS = (0, 1)
_ALIGNMENT = 64
# An index is about this large per box or tensor; it is only used to ask for a little more space.
_INDEX_BYTES_PER_BOX = 512
# Below this, starting threads costs more than one thread needs to hash everything.
_PARALLEL_DIGEST_BYTES = 64 << 20


def slot_paths(directory: Path, rank: int, slot: int) -> tuple[Path, Path]:
    """The data file and the index of one slot in the directory of a generation."""
    name = f"rank-{rank:05d}.slot{slot}"
    return directory / f"{name}.data", directory / f"{name}.json"


def place_boxes(specs: Mapping[str, TensorSpec], boxes: Sequence[Box]) -> tuple[StoredBox, ...]:
    """Where each box lies in a data file; digests are still empty.

    Raises:
        StoreError: a box is not inside a tensor that `specs` describe.
    """
    placed = []
    offset = 0
    for box in boxes:
        spec = specs.get(box.tensor)
        if spec is None:
            raise StoreError(f"{box.tensor}: box {box.region} has no tensor of that name in specs")
        full = Region.full(spec.shape)
        if len(spec.shape) != len(box.region.start) or not full.contains(box.region):
            raise StoreError(f"{box.tensor}: box {box.region} is outside of shape {spec.shape}")
        nbytes = box.region.numel * spec.itemsize
        placed.append(StoredBox(box.tensor, box.region, spec.dtype, offset, nbytes, ""))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(placed)


@dataclass(slots=True)
class _Slot:
    """One data file, mapped for as long as the writer lives."""

    descriptor: int
    index_path: Path
    memory: mmap.mmap
    views: tuple[memoryview, ...]
    version: int | None


class SnapshotWriter(TensorWriter):
    """Writes the versions of one rank of one generation into shared memory."""

    def __init__(
        self,
        directory: Path,
        template: RankIndex,
        newest_committed: Callable[[], int | None],
    ) -> None:
        """Reserve and map both slots.

        Args:
            directory: That of the generation; exists.
            template: The index of every version, without version, digests and progress.
            newest_committed: The version that `begin` must spare.

        Raises:
            SpaceError: there is no room for two versions.
            StoreError: the rank is being written elsewhere, or holds other boxes already.
        """
        self._directory = directory
        self._template = template
        self._newest_committed = newest_committed
        self._nbytes = max(template.data_bytes, mmap.PAGESIZE)
        self._begun: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        missing = sum(self._missing_bytes(slot) for slot in SLOTS)
        check_space(directory, missing)
        try:
            for slot in SLOTS:
                self._slots.append(self._open_slot(slot))
        except BaseException:
            self._forget_empty()
            self._release()
            raise
        self._toucher = PageToucher(self.buffers)

    @property
    def slot_bytes(self) -> int:
        """The size of each of the two slots."""
        return self._nbytes

    @property
    def buffers(self) -> tuple[mmap.mmap, ...]:
        """The mapped memory of both slots; the same objects for the life of the writer."""
        return tuple(slot.memory for slot in self._slots)

    @property
    def newest(self) -> int | None:
        """The newest finished version of this rank in this generation."""
        return max((slot.version for slot in self._slots if slot.version is not None), default=None)

    def address(self, slot: int) -> int:
        """Where a slot is mapped, so that it can be registered (pinned) once for a device."""
        return memory_address(self._slots[slot].memory)

    def begin(self, version: int, *, spare: int | None = None) -> list[memoryview]:
        """See `TensorWriter.begin`; the slot written is the unfinished, else the older one."""
        if not self._lock.acquire(blocking=False):
            raise StoreError(
                f"{self._name()}: version {version} can't begin while another is being finished; "
                "wait for that first"
            )
        try:
            if version < 0 or not self._slots:
                state = "the writer is closed" if not self._slots else "it is negative"
                raise StoreError(f"{self._name()}: version {version} can't begin, {state}")
            if self.newest is not None and version <= self.newest:
                raise StoreError(
                    f"{self._name()}: version {version} is not newer than {self.newest}, "
                    "which is held already"
                )
            number = self._choose_slot(self._newest_committed() if spare is None else spare)
            slot = self._slots[number]
            self._begun = None
            remove_private(slot.index_path)
            slot.version = None
            self._begun = (version, number)
            return list(slot.views)
        finally:
            self._lock.release()

    def finish(self, version: int, progress: Mapping[str, PlainValue]) -> tuple[str, ...]:
        """See `TensorWriter.finish`."""
        with self._lock:
            if self._begun is None or self._begun[0] != version:
                begun = "none" if self._begun is None else str(self._begun[0])
                raise StoreError(
                    f"{self._name()}: version {version} can't be finished, {begun} was begun"
                )
            slot = self._slots[self._begun[1]]
            encode_value(progress)  # refused values cost nothing yet
            digests = _digest_all(slot.views)
            boxes = zip(self._template.boxes, digests, strict=True)
            index = replace(
                self._template,
                version=version,
                boxes=tuple(replace(box, digest=digest) for box, digest in boxes),
                progress=progress,
            )
            write_atomically(slot.index_path, index.seal()[0])
            slot.version = version
            self._begun = None
            return digests

    def close(self) -> None:
        """See `TensorWriter.close`; memory is unmapped with the last view of it."""
        with self._lock:
            self._begun = None
            self._toucher.stop()
            self._release()

    def _choose_slot(self, spared: int | None) -> int:
        """The slot to lose: never the newest committed version, else unfinished before older."""
        free = [n for n in SLOTS if self._slots[n].version is None]
        if free:
            return free[0]
        losable = [n for n in SLOTS if self._slots[n].version != spared]
        return min(losable, key=lambda n: self._slots[n].version or 0)

    def _missing_bytes(self, slot: int) -> int:
        data_path, _ = slot_paths(self._directory, self._template.rank, slot)
        held = data_path.stat().st_blocks * 512 if data_path.exists() else 0
        boxes = len(self._template.boxes) + len(self._template.specs)
        return max(self._nbytes - held, 0) + _INDEX_BYTES_PER_BOX * boxes

    def _open_slot(self, number: int) -> _Slot:
        data_path, index_path = slot_paths(self._directory, self._template.rank, number)
        descriptor = open_private(data_path, os.O_RDWR | os.O_CREAT)
        try:
            self._lock_file(descriptor, data_path)
            version = self._held_version(index_path, os.fstat(descriptor).st_size)
            reserve(descriptor, data_path, self._nbytes)
            memory = mmap.mmap(descriptor, self._nbytes)
        except BaseException:
            if not os.fstat(descriptor).st_size:
                remove_private(data_path)
            os.close(descriptor)
            raise
        whole = memoryview(memory)
        views = tuple(whole[box.offset : box.offset + box.nbytes] for box in self._template.boxes)
        return _Slot(descriptor, index_path, memory, views, version)

    def _held_version(self, index_path: Path, data_bytes: int) -> int | None:
        """The finished version in a slot left by an earlier writer of the same generation."""
        try:
            index, _ = RankIndex.unseal(read_private(index_path), str(index_path))
        except FileNotFoundError:
            return None
        except StoreError:
            remove_private(index_path)
            return None
        if data_bytes < index.data_bytes:
            remove_private(index_path)
            return None
        held = tuple(replace(box, digest="") for box in index.boxes)
        if held != self._template.boxes:
            raise StoreError(
                f"{index_path}: generation {index.generation} of rank {index.rank} holds other "
                f"boxes ({len(held)}, expected {len(self._template.boxes)}); use a new generation"
            )
        return index.version

    @staticmethod
    def _lock_file(descriptor: int, path: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{path}: another process is writing it; every rank has one writer"
            ) from error

    def _forget_empty(self) -> None:
        """Give back the memory of slots that hold no version."""
        for number, slot in enumerate(self._slots):
            if slot.version is None:
                remove_private(slot_paths(self._directory, self._template.rank, number)[0])

    def _release(self) -> None:
        for slot in self._slots:
            os.close(slot.descriptor)
        self._slots = []

    def _name(self) -> str:
        return f"{self._directory} rank {self._template.rank}"


def _digest_all(views: Sequence[memoryview]) -> tuple[str, ...]:
    """Nobody waits for digests of a running job, so one processor is left to training."""
    threads = processors_per_rank() - 1
    if threads < 2 or sum(view.nbytes for view in views) < _PARALLEL_DIGEST_BYTES:
        return tuple(digest_bytes(view) for view in views)
    with ThreadPoolExecutor(threads) as pool:
        return tuple(pool.map(digest_bytes, views))
