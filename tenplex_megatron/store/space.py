"""Is there room for the snapshots, and what should a person set if there is not?

Memory is reserved before training starts, so a step never dies of a full tmpfs (SIGBUS). On tmpfs
both the size of the file system and the memory of the node and of its container are limits.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tenplex_megatron.errors import SpaceError

__all__ = ["check_space", "free_bytes", "reserve"]

# A signal interrupts and undoes one call of fallocate on tmpfs: keep what a retry repeats small.
_CHUNK_BYTES = 256 << 20
_LARGER_TMPFS = (
    "set snapshot.directory to a larger tmpfs, or start the container with a larger "
    "docker --shm-size"
)
_MORE_MEMORY = (
    "give the container more memory, or set snapshot.directory to a file system on a local disk"
)


@dataclass(frozen=True, slots=True, order=True)
class _Room:
    nbytes: int
    advice: str


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written below `directory`, which need not exist yet."""
    return _room(directory).nbytes


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to start when `needed_bytes` do not fit below `directory`.

    Raises:
        SpaceError: one sentence: what is missing, where, what to set.
    """
    room = _room(directory)
    if needed_bytes > room.nbytes:
        raise SpaceError(
            f"{directory}: snapshots need {_text(needed_bytes)} but {_text(room.nbytes)} are free, "
            f"{_text(needed_bytes - room.nbytes)} are missing; {room.advice}"
        )


def reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Give the file `nbytes` of real memory; what it holds already stays.

    Raises:
        SpaceError: it does not fit; the file has its old size then.
    """
    old_bytes = os.fstat(descriptor).st_size
    try:
        os.ftruncate(descriptor, nbytes)
        for start in range(0, nbytes, _CHUNK_BYTES):
            os.posix_fallocate(descriptor, start, min(_CHUNK_BYTES, nbytes - start))
    except OSError as error:
        os.ftruncate(descriptor, min(old_bytes, nbytes))
        raise SpaceError(
            f"{path}: can't reserve {_text(nbytes)} ({error.strerror}), "
            f"{_text(free_bytes(path.parent))} are free; {_LARGER_TMPFS}, "
            "or raise the limit on file size (ulimit -f)"
        ) from error


def _room(directory: Path) -> _Room:
    while not directory.exists():
        directory = directory.parent
    status = os.statvfs(directory)
    room = _Room(status.f_bavail * status.f_frsize, _LARGER_TMPFS)
    if _is_in_memory(directory):
        limits = [room.nbytes, *_memory_limits()]
        if min(limits) < room.nbytes:
            return _Room(max(min(limits), 0), _MORE_MEMORY)
    return room


def _is_in_memory(directory: Path) -> bool:
    """Whether the mount that holds `directory` is tmpfs."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in _lines(Path("/proc/self/mountinfo")))
    return any(
        fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
        for fields in mounts
    )


def _memory_limits() -> Iterator[int]:
    """Bytes of memory still free for this process: on the node, and in each control group."""
    node = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")))
    if "MemAvailable" in node:
        yield sum(int(node[key].split()[0]) << 10 for key in ("MemAvailable", "SwapFree"))
    for line in _lines(Path("/proc/self/cgroup")):
        if line.startswith("0::/"):
            group = Path("/sys/fs/cgroup") / line.removeprefix("0::/")
            for part in (group, *group.parents):
                yield from _group_limit(part)


def _group_limit(group: Path) -> Iterator[int]:
    limit = _lines(group / "memory.max")
    used = _lines(group / "memory.current")
    if limit and used and limit[0] != "max":
        detail = dict(line.split() for line in _lines(group / "memory.stat"))
        yield int(limit[0]) - int(used[0]) + int(detail.get("inactive_file", 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # another kernel or a restricted container: this limit is not known


def _text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"
