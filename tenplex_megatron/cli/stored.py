"""Which jobs lie in a folder, on which nodes?  Takes a node's, a job's or the root folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import LayoutError, StoreError
from tenplex_megatron.store.files import check_private_directory
from tenplex_megatron.store.shared import SnapshotStore, read_job

__all__ = ["StoredJob", "find_jobs", "layout_text"]

_JOB_FILE = "job.json"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """The stores of one job, by node."""

    job: str
    identity: str
    nodes: Mapping[str, SnapshotStore]


def find_jobs(path: Path) -> tuple[StoredJob, ...]:
    """Every job in `path`, sorted by name.

    Raises:
        StoreError: there is none, a folder is not the user's own, or one can't be read.
    """
    if not path.is_dir():
        raise StoreError(f"{path}: no such folder; name a node's, a job's or the root folder")
    folders = [folder.parent for folder in _job_files(path.absolute())]
    if not folders:
        raise StoreError(
            f"{path}: holds no snapshots; expected {_JOB_FILE} in it, in its folders, or in theirs"
        )
    jobs: dict[tuple[str, str], dict[str, SnapshotStore]] = {}
    for folder in folders:
        record = read_job(folder)
        store = SnapshotStore(folder, record.job, record.identity)
        jobs.setdefault((record.job, record.identity), {})[folder.name] = store
    return tuple(StoredJob(job, identity, nodes) for (job, identity), nodes in sorted(jobs.items()))


def layout_text(layout: Mapping[str, object]) -> str:
    """The layout of a snapshot, as a person writes it."""
    try:
        return str(ParallelLayout.from_json(layout))
    except LayoutError:
        return str(dict(layout))


def _job_files(path: Path) -> Iterator[Path]:
    check_private_directory(path)
    for pattern in (_JOB_FILE, f"*/{_JOB_FILE}", f"*/*/{_JOB_FILE}"):
        found = sorted(path.glob(pattern))
        if found:
            yield from found
            return
