"""Is there room for the snapshots, and what should a person set if there is not?

Memory is reserved before training starts, so a step never dies of a full tmpfs (SIGBUS).
"""

import os
from pathlib import Path

from tenplex_megatron.errors import SpaceError

__all__ = ["check_space", "free_bytes", "reserve"]

# A signal interrupts and undoes one call of fallocate on tmpfs: keep what a retry repeats small.
_CHUNK_BYTES = 256 << 20


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written below `directory`, which need not exist yet."""
    while not directory.exists():
        directory = directory.parent
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to start when `needed_bytes` do not fit below `directory`.

    Raises:
        SpaceError: one sentence: what is missing, where, what to set.
    """
    found = free_bytes(directory)
    if needed_bytes > found:
        raise SpaceError(_sentence(directory, needed_bytes, found))


def reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Give the file `nbytes` of real memory.

    Raises:
        SpaceError: it does not fit; the file is empty then.
    """
    try:
        os.ftruncate(descriptor, nbytes)
        for start in range(0, nbytes, _CHUNK_BYTES):
            os.posix_fallocate(descriptor, start, min(_CHUNK_BYTES, nbytes - start))
    except OSError as error:
        os.ftruncate(descriptor, 0)
        found = free_bytes(path.parent)
        raise SpaceError(f"{_sentence(path, nbytes, found)} ({error.strerror})") from error


def _sentence(place: Path, needed: int, found: int) -> str:
    missing = f"{_text(needed - found)} are missing: " if needed > found else ""
    return (
        f"{place}: {missing}the snapshots need {_text(needed)}, {_text(found)} are free; set "
        "snapshot.directory to a larger tmpfs, give the container more with docker --shm-size, or "
        "raise the limit on file size (ulimit -f)"
    )


def _text(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10_000_000 else f"{nbytes:,} bytes"
