"""A test that leaves a process behind fails, and the process is gone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

INNER = """
import subprocess
import pytest

CHILD = ["sh", "-c", "sleep 60 >/dev/null & echo $!"]
OF_ANOTHER_SESSION = ["setsid", *CHILD]

@pytest.mark.parametrize("command", [CHILD, OF_ANOTHER_SESSION])
def test_leak(command):
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    with open("pids", "a") as report:
        report.write(process.stdout)
"""
SETTINGS = """
[pytest]
norecursedirs =
markers =
    dist:
"""


def test_a_process_left_behind_fails_the_test_and_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "dist"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path / "tests")
    (folder / "test_leak.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    # CI would make pytest repeat whole messages in its summary.
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.count("AssertionError: processes still running 3.0 s after the test") == 2
    pids = (tmp_path / "pids").read_text().split()
    processes = [Path("/proc") / pid for pid in pids]
    alive = [p for p in processes if p.exists() and ") Z " not in p.joinpath("stat").read_text()]
    assert len(pids) == 2
    assert alive == []
