"""Where do the snapshots of a job lie on a node, and which of them count?

One directory per node and job, on tmpfs, so that files outlive every process:

    job.json                                whose snapshots these are
    gen-0007/rank-00003.slot0.data / .json  bytes of one version of one rank, and its index
    gen-0007/manifest-000000000020.json     every rank of the world has finished version 20
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.base import DamagedFile, Inventory, RankSnapshot, TensorStore
from tenplex_megatron.store.files import (
    check_private_directory,
    make_private_directory,
    read_private,
    remove_private,
    remove_tree,
    write_atomically,
)
from tenplex_megatron.store.index import JobRecord, Manifest, RankIndex
from tenplex_megatron.store.reader import SnapshotReader, StoredIndex
from tenplex_megatron.store.values import PlainValue
from tenplex_megatron.store.writer import SnapshotWriter, place_boxes

__all__ = [
    "SnapshotStore",
    "default_root",
    "node_directory",
    "read_job",
    "remove_empty_parents",
]

logger = logging.getLogger(__name__)

_JOB_FILE = "job.json"
_TRIES = 5
_GENERATION = re.compile(r"gen-(\d{4,})")
_INDEX = re.compile(r"(rank-\d{5,}\.slot[01])\.json")
_MANIFEST = re.compile(r"manifest-(\d{12,})\.json")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def default_root() -> Path:
    """Where snapshots lie unless the policy's snapshot.directory names another place."""
    return Path("/dev/shm") / f"tenplex-{os.geteuid()}"


def node_directory(root: Path, job: str, node: str) -> Path:
    """The directory of one node of one job.

    Raises:
        StoreError: a name can't be a directory's name.
    """
    for kind, name in (("job", job), ("node", node)):
        if not _SAFE_NAME.fullmatch(name):
            raise StoreError(
                f"{kind} name {name!r}: expected at most 100 letters, digits, '.', '_' or '-', "
                "the first one no '.' or '-'"
            )
    return root / job / node


def remove_empty_parents(directory: Path) -> None:
    """Remove what `node_directory` puts above a node's directory, where nothing is left in it.

    A root that somebody chose stays.
    """
    job = directory.parent
    with suppress(OSError):  # not empty, or already gone
        job.rmdir()
        if job.parent == default_root():
            job.parent.rmdir()


def read_job(directory: Path) -> JobRecord:
    """Whose snapshots lie in `directory`.

    Raises:
        StoreError: there are none, or they are another user's.
    """
    check_private_directory(directory)
    path = directory / _JOB_FILE
    try:
        return JobRecord.from_bytes(read_private(path), str(path))
    except FileNotFoundError:
        raise StoreError(f"{path}: missing; there are no snapshots here") from None


@dataclass(frozen=True, slots=True)
class _Scan:
    stored: tuple[StoredIndex, ...]
    manifests: Mapping[tuple[int, int], Manifest]
    damaged: tuple[DamagedFile, ...]


class SnapshotStore(TensorStore):
    """The snapshots of one job on one node, in files on tmpfs."""

    def __init__(self, directory: Path, job: str, identity: str) -> None:
        """Name the place; `create` or `open_existing` then checks it.

        Args:
            directory: See `node_directory`.
            job: The job's name.
            identity: Fingerprint of what is trained; another one's snapshots are refused.
        """
        self.directory = directory
        self.job = job
        self.identity = identity

    def create(self) -> Self:
        """Make the directory unless it exists; several processes may do so at once.

        Raises:
            StoreError: another user, job or identity has it, or another format.
        """
        self._make_directory()
        record = JobRecord(self.job, self.identity).to_bytes()
        write_atomically(self.directory / _JOB_FILE, record, exclusive=True)
        return self.open_existing()

    def open_existing(self) -> Self:
        """Check that the directory holds snapshots of this job.

        Raises:
            StoreError: it does not, or another user has it.
        """
        found = read_job(self.directory)
        expected = JobRecord(self.job, self.identity)
        if found != expected:
            raise StoreError(
                f"{self.directory}: holds snapshots of job {found.job!r} ({found.identity}), "
                f"expected job {self.job!r} ({self.identity}): its flags, model, data or optimizer "
                "were others; start it as before, give this job another name or "
                "snapshot.directory, or remove the directory to lose them"
            )
        return self

    def writer(
        self,
        rank: int,
        world_size: int,
        *,
        generation: int,
        layout: Mapping[str, PlainValue],
        specs: Mapping[str, TensorSpec],
        boxes: Sequence[Box],
    ) -> SnapshotWriter:
        """See `TensorStore.writer`."""
        if not 0 <= rank < world_size:
            raise StoreError(f"rank {rank} is outside of a world of {world_size}")
        template = RankIndex(
            job=self.job,
            generation=generation,
            version=-1,
            rank=rank,
            world_size=world_size,
            layout=layout,
            specs={box.tensor: specs[box.tensor] for box in boxes if box.tensor in specs},
            boxes=place_boxes(specs, boxes),
            progress={},
        )
        directory = self._generation_path(generation)
        make_private_directory(directory)
        return SnapshotWriter(directory, template, lambda: self.committed_version(generation))

    def commit(self, version: int, *, generation: int, ranks: Collection[int]) -> None:
        """See `TensorStore.commit`; older manifests of the generation are removed."""
        held = {
            entry.index.rank: entry
            for entry in self._scan(generation).stored
            if entry.index.version == version and entry.index.rank in ranks
        }
        directory = self._generation_path(generation)
        missing = sorted(set(ranks) - set(held))
        if missing or not held:
            raise StoreError(
                f"{directory}: version {version} can't be committed, ranks {missing or 'none'} "
                f"of {sorted(ranks)} have not finished it here"
            )
        reader = SnapshotReader(held)
        manifest = Manifest(
            job=self.job,
            generation=generation,
            version=version,
            world_size=reader.world_size,
            layout=reader.layout,
            indexes={rank: entry.digest for rank, entry in held.items()},
        )
        write_atomically(directory / f"manifest-{version:012d}.json", manifest.to_bytes())
        for older, path in self._manifest_paths(generation):
            if older < version:
                remove_private(path)

    def committed_version(self, generation: int) -> int | None:
        """The newest version of a generation with a manifest here."""
        return max((version for version, _ in self._manifest_paths(generation)), default=None)

    def examine(self) -> Inventory:
        """See `TensorStore.examine`."""
        scan = self._scan()
        snapshots = []
        for entry in scan.stored:
            index = entry.index
            manifest = scan.manifests.get((index.generation, index.version))
            snapshots.append(
                RankSnapshot(
                    generation=index.generation,
                    version=index.version,
                    rank=index.rank,
                    world_size=index.world_size,
                    layout=index.layout,
                    committed=manifest is not None
                    and manifest.indexes.get(index.rank) == entry.digest,
                    nbytes=index.nbytes,
                    digest=entry.digest,
                )
            )
        for damaged in scan.damaged:
            logger.warning("skipped a damaged snapshot file: %s", damaged.reason)
        snapshots.sort(key=lambda held: (held.generation, held.version, held.rank))
        return Inventory(tuple(snapshots), scan.damaged)

    def reader(self, version: int, *, generation: int | None = None) -> SnapshotReader:
        """See `TensorStore.reader`."""
        stored = [e for e in self._scan(generation).stored if e.index.version == version]
        if not stored:
            where = "" if generation is None else f" of generation {generation}"
            raise StoreError(f"{self.directory}: no rank has finished version {version}{where}")
        newest = max(entry.index.generation for entry in stored)
        return SnapshotReader({e.index.rank: e for e in stored if e.index.generation == newest})

    def prune(self, keep_generation: int) -> tuple[int, ...]:
        """See `TensorStore.prune`."""
        older = tuple(number for number in self._generations() if number < keep_generation)
        if older and self.committed_version(keep_generation) is None:
            raise StoreError(
                f"{self.directory}: generation {keep_generation} has not committed a version; "
                f"generations {older} are kept"
            )
        for number in older:
            remove_tree(self._generation_path(number))
        return older

    def quarantine(self, version: int, *, generation: int, rank: int) -> None:
        """Take a rank's damaged version out of every later inventory; its files stay to be read."""
        for entry in self._scan(generation).stored:
            if (entry.index.version, entry.index.rank) == (version, rank):
                index_path = entry.data_path.with_suffix(".json")
                with suppress(FileNotFoundError):
                    index_path.rename(index_path.with_suffix(".damaged"))

    def remove(self) -> None:
        """Remove everything this job holds on this node."""
        self.open_existing()
        remove_tree(self.directory)

    def remove_unused(self) -> None:
        """Remove everything here unless a rank has finished a version, even a damaged one."""
        kept = (".json", ".damaged")
        for number in self._generations():
            if any(name.endswith(kept) for name in _names(self._generation_path(number))):
                return
        if self.directory.exists():
            self.remove()

    def _make_directory(self) -> None:
        """Another job or node that ends may take an empty parent away between two looks."""
        for _ in range(_TRIES - 1):
            try:
                return make_private_directory(self.directory)
            except StoreError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
        return make_private_directory(self.directory)

    def _generation_path(self, generation: int) -> Path:
        return self.directory / f"gen-{generation:04d}"

    def _generations(self) -> list[int]:
        matches = (_GENERATION.fullmatch(name) for name in _names(self.directory))
        return sorted(int(match[1]) for match in matches if match)

    def _manifest_paths(self, generation: int) -> Iterator[tuple[int, Path]]:
        directory = self._generation_path(generation)
        for name in _names(directory):
            if match := _MANIFEST.fullmatch(name):
                yield int(match[1]), directory / name

    def _scan(self, only: int | None = None) -> _Scan:
        stored: list[StoredIndex] = []
        manifests: dict[tuple[int, int], Manifest] = {}
        damaged: list[DamagedFile] = []
        for generation in self._generations() if only is None else [only]:
            directory = self._generation_path(generation)
            for name in _names(directory):
                path = directory / name
                try:
                    if _MANIFEST.fullmatch(name):
                        manifest = Manifest.from_bytes(read_private(path), str(path))
                        manifests[generation, manifest.version] = manifest
                    elif match := _INDEX.fullmatch(name):
                        data_path = directory / f"{match[1]}.data"
                        stored.append(self._load(path, data_path, generation))
                except FileNotFoundError:
                    continue  # overwritten by its rank since the directory was listed
                except StoreError as error:
                    damaged.append(DamagedFile(str(path), str(error)))
        return _Scan(tuple(_newest_slots(stored)), manifests, tuple(damaged))

    def _load(self, path: Path, data_path: Path, generation: int) -> StoredIndex:
        index, digest = RankIndex.unseal(read_private(path), str(path))
        if (index.job, index.generation) != (self.job, generation):
            raise StoreError(
                f"{path}: belongs to job {index.job!r} generation {index.generation}, "
                f"expected job {self.job!r} generation {generation}"
            )
        size = data_path.stat().st_size if data_path.exists() else 0
        if size < index.data_bytes:
            raise StoreError(f"{data_path}: truncated to {size} bytes, expected {index.data_bytes}")
        return StoredIndex(index, digest, data_path)


def _newest_slots(stored: Sequence[StoredIndex]) -> list[StoredIndex]:
    """One entry per generation, version and rank (two slots never hold the same version)."""
    unique = {(e.index.generation, e.index.version, e.index.rank): e for e in stored}
    return list(unique.values())


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return []
