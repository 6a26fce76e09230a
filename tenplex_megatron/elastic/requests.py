"""How does a person talk to a running job? Through files in its run folder; there is no socket.

`requests/<id>.json` asks, `requests/<id>.answer.json` answers and is replaced as the change goes
on. The folder belongs to one user and nobody else may read or write it.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenplex_megatron.errors import ConfigError

__all__ = [
    "LOCK",
    "ResizeRequest",
    "claim_requests",
    "default_run_dir",
    "is_running",
    "owner_only_folder",
    "post_request",
    "read_answer",
    "replace_json",
    "withdraw_request",
    "write_answer",
]

LOCK = "lock"
"""In the folder of every node: held by its agent."""


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """Somebody asks for another number of devices."""

    id: str
    gpus: int


def default_run_dir(job: str) -> Path:
    """Where a job of this user keeps its files unless it was told otherwise."""
    return Path(tempfile.gettempdir()) / f"tenplex-{os.getuid()}" / job


def owner_only_folder(path: Path) -> Path:
    """The folder `path`, created if need be, readable by its owner only.

    Raises:
        ConfigError: it belongs to somebody else, is a link, or others can write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"folder {path} can't be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} must be a folder that belongs to user {os.getuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"folder {path} can't be closed to others: {error}") from error
    return path


def post_request(run_dir: Path, gpus: int) -> ResizeRequest:
    """Ask the job in `run_dir` to go to `gpus` devices.

    Raises:
        ConfigError: no job runs there.
    """
    if not is_running(run_dir):
        raise ConfigError(
            f"no job runs in {run_dir}; start it with tenplex run, or name the folder of a running "
            "one with --run-dir"
        )
    request = ResizeRequest(f"{time.time_ns()}-{secrets.token_hex(3)}", gpus)
    replace_json(run_dir / "requests" / f"{request.id}.json", {"gpus": gpus})
    return request


def is_running(run_dir: Path) -> bool:
    """Whether any node of a job works in this folder now."""
    return any(_is_locked(lock) for lock in run_dir.glob(f"nodes/*/{LOCK}"))


def _is_locked(path: Path) -> bool:
    """Whether an agent holds the lock file of its node, as it does until it ends."""
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def withdraw_request(run_dir: Path, identity: str) -> None:
    """Take a request back that no agent has taken yet."""
    (run_dir / "requests" / f"{identity}.json").unlink(missing_ok=True)


def claim_requests(run_dir: Path, *, since_ns: int = 0) -> Iterator[ResizeRequest]:
    """The requests nobody has taken yet, oldest first; each goes to one agent only.

    What was asked before `since_ns` (nanoseconds of Unix time) was meant for an earlier start of
    the job and is refused.
    """
    folder = run_dir / "requests"
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.endswith(".json") and entry.name.count(".") == 1
    )
    for name in names:
        identity = name.removesuffix(".json")
        taken = folder / f"{identity}.taken.json"
        # Agents of several nodes may share the folder: the rename picks one.
        with contextlib.suppress(FileNotFoundError):
            (folder / name).rename(taken)
            if _asked_ns(identity) < since_ns:
                write_answer(
                    run_dir,
                    identity,
                    state="refused",
                    reason="it was asked before this start of the job; ask again",
                )
                continue
            yield from _read_request(identity, taken, run_dir)


def _asked_ns(identity: str) -> int:
    """When a request was posted; one that somebody wrote by hand counts as new."""
    text = identity.partition("-")[0]
    return int(text) if text.isdigit() else time.time_ns()


def _read_request(identity: str, path: Path, run_dir: Path) -> Iterator[ResizeRequest]:
    try:
        gpus = json.loads(path.read_text())["gpus"]
    except (ValueError, KeyError, TypeError):
        gpus = None
    if isinstance(gpus, int):
        yield ResizeRequest(identity, gpus)
    else:
        write_answer(run_dir, identity, state="refused", reason='expected {"gpus": N}')


def write_answer(run_dir: Path, identity: str, **fields: object) -> None:
    """Replace the answer to a request; `state` is pending, done or refused."""
    replace_json(run_dir / "requests" / f"{identity}.answer.json", fields)


def read_answer(run_dir: Path, identity: str) -> dict[str, Any] | None:
    """The present answer to a request, None before there is one."""
    try:
        answer = json.loads((run_dir / "requests" / f"{identity}.answer.json").read_text())
    except FileNotFoundError:
        return None
    assert isinstance(answer, dict)
    return answer


def replace_json(path: Path, data: object) -> None:
    """Write JSON so that a reader sees all of it or the former content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(data, file)
    temporary.replace(path)
