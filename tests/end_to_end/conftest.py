"""What end-to-end tests share: a warm fork server, a small dataset, and places for a job."""

import multiprocessing
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server() -> None:
    """Ranks of all tests are forked from one process that has imported Megatron."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tenplex_megatron.cpu", *MegatronArguments.preload])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small indexed dataset of real text."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--output", str(prefix)]
    subprocess.run([*command, "--max-megabytes", "1"], check=True, capture_output=True)
    return prefix
