"""What tests of several processes share."""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="module")
def deepspeed_fork_server() -> Iterator[None]:
    """Ranks are forked from a process that has imported DeepSpeed; the server of others ends."""
    from check_deepspeed import PRELOAD

    os.environ["DS_ACCELERATOR"] = "cpu"
    server = forkserver._forkserver  # type: ignore[attr-defined]  # no public way to end it
    server._stop()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()
    yield
    server._stop()
