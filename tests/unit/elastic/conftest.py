"""The folder of a job that runs, without the job."""

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenplex_megatron.elastic.requests import LOCK, owner_only_folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The folder of a job that runs."""
    owner_only_folder(tmp_path / "requests")
    with (owner_only_folder(tmp_path / "nodes/a") / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path
