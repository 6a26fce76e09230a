"""How does a person talk to a running job? Through files in its run folder; there is no socket.

`requests/<id>.json` asks, `requests/<id>.answer.json` answers and is replaced as the change goes
on. The folder belongs to one user and nobody else may read or write it.
"""

import contextlib
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
    "ResizeRequest",
    "claim_requests",
    "default_run_dir",
    "owner_only_folder",
    "post_request",
    "read_answer",
    "replace_json",
    "write_answer",
]


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
        ConfigError: there is no such job.
    """
    if not (run_dir / "requests").is_dir():
        raise ConfigError(f"no job runs in {run_dir}: it has no folder requests")
    request = ResizeRequest(f"{time.time_ns()}-{secrets.token_hex(3)}", gpus)
    replace_json(run_dir / "requests" / f"{request.id}.json", {"gpus": gpus})
    return request


def claim_requests(run_dir: Path) -> Iterator[ResizeRequest]:
    """The requests nobody has taken yet, oldest first; each goes to one agent only."""
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
            yield from _read_request(identity, taken, run_dir)


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
