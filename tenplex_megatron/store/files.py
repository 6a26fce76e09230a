"""How are files made that only their owner can read, and that exist whole or not at all?

Every path is refused that another user could have put there: a symbolic link, another owner, wider
permissions than 0700 and 0600, or a parent directory in which others may swap entries.
"""

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

from tenplex_megatron.errors import SpaceError, StoreError

__all__ = [
    "check_private_directory",
    "make_private_directory",
    "open_private",
    "read_private",
    "remove_private",
    "remove_tree",
    "write_atomically",
]

_TRASH = ".trash-"
_TEMPORARY = ".tmp"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
# <root>/<job>/<node>/<generation>: the levels that are this package's own.
_OWN_LEVELS = 3


def make_private_directory(path: Path) -> None:
    """Create `path` and its missing parents with mode 0700, then check it.

    Raises:
        StoreError: somebody else owns it or could replace it.
    """
    missing = []
    current = path
    while not os.path.lexists(current):
        missing.append(current)
        current = current.parent
    for part in reversed(missing):
        try:
            part.mkdir(mode=0o700)
            part.chmod(0o700)
        except FileExistsError:
            continue  # another rank of this node was faster; it is checked below
        except OSError as error:
            raise StoreError(f"{part}: can't create the snapshot directory: {error}") from error
    check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """Refuse a directory that another user owns or could replace.

    Raises:
        StoreError: saying which part of the path is wrong and what to do.
    """
    if not path.is_absolute():
        raise StoreError(f"{path}: the snapshot directory must be an absolute path")
    user = os.geteuid()
    for level, part in enumerate((path, *path.parents)):
        try:
            status = part.lstat()
        except OSError as error:
            raise StoreError(f"{part}: can't look at the snapshot directory: {error}") from error
        if stat.S_ISLNK(status.st_mode) and level >= _OWN_LEVELS and status.st_uid in (0, user):
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(
                f"{part}: expected a real directory, got a link or a file; "
                "name another snapshot.directory or remove it"
            )
        _check_owner(part, status, user, leaf=level == 0)


def _check_owner(part: Path, status: os.stat_result, user: int, *, leaf: bool) -> None:
    if status.st_uid != user and (leaf or status.st_uid != 0):
        raise StoreError(
            f"{part}: belongs to user {status.st_uid}, expected user {user}; "
            "name another snapshot.directory"
        )
    others = stat.S_IMODE(status.st_mode) & 0o077
    if leaf and others:
        raise StoreError(
            f"{part}: others may enter it (mode {stat.S_IMODE(status.st_mode):04o}), expected "
            f"0700; run `chmod 700 {part}` if you trust what is in it"
        )
    if others & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise StoreError(
            f"{part}: others may replace what is in it (mode {stat.S_IMODE(status.st_mode):04o}); "
            "name another snapshot.directory"
        )


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a regular file that is ours alone; created with mode 0600.

    Raises:
        FileNotFoundError: it does not exist and `flags` do not create it.
        StoreError: it is a link, another user's, or open to others.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _file_error(path, "open", error) from error
    status = os.fstat(descriptor)
    expected = (os.geteuid(), 0)
    if not stat.S_ISREG(status.st_mode) or expected != (status.st_uid, status.st_mode & 0o077):
        os.close(descriptor)
        raise StoreError(
            f"{path}: expected a file of user {expected[0]} with mode 0600, got user "
            f"{status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}; remove it"
        )
    return descriptor


def read_private(path: Path) -> bytes:
    """The content of a file that is ours alone."""
    descriptor = open_private(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def write_atomically(path: Path, content: bytes, *, exclusive: bool = False) -> bool:
    """Make `path` hold `content`: readers see all of it or what was there before.

    Args:
        path: The file.
        content: Its whole content.
        exclusive: Leave an existing file alone.

    Returns:
        Whether the file was written (False only when exclusive).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{_TEMPORARY}")
    remove_private(temporary)
    try:
        descriptor = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if exclusive:
            path.hardlink_to(temporary)
            remove_private(temporary)
        else:
            temporary.rename(path)
    except FileExistsError:
        remove_private(temporary)
        return False
    except OSError as error:
        remove_private(temporary)
        raise _file_error(path, "write", error) from error
    return True


def remove_private(path: Path) -> None:
    """Remove a file if it is there."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _file_error(path, "remove", error) from error


def remove_tree(path: Path) -> None:
    """Remove a directory so that nobody ever sees half of it.

    Also sweeps what an earlier, killed removal beside it left.
    """
    trash = path.with_name(f"{_TRASH}{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _file_error(path, "remove", error) from error
    for leftover in path.parent.glob(f"{_TRASH}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _file_error(path: Path, action: str, error: OSError) -> StoreError:
    if error.errno in _NO_SPACE:
        return SpaceError(
            f"{path}: no space to {action} it ({error.strerror}); set snapshot.directory to a "
            "larger tmpfs, or give the container more with docker --shm-size"
        )
    return StoreError(f"{path}: can't {action} it: {error.strerror}")
