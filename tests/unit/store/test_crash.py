import json
import subprocess
import sys
from pathlib import Path
from typing import TypedDict, cast

import pytest

SCENARIO = Path(__file__).with_name("crash_scenario.py")


class Result(TypedDict):
    runs: int
    failures: list[str]
    committed: list[int]


def run_scenario(*arguments: str) -> Result:
    # A process of its own: it forks for every kill, which one with torch's threads must not do.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCENARIO), *arguments],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return cast(Result, json.loads(done.stdout))


@pytest.mark.timeout(180)  # seconds of work, but a busy machine stretches hundreds of forks
def test_a_process_killed_at_any_write_or_rename_leaves_a_complete_older_version() -> None:
    result = run_scenario("points", "0")
    assert result["failures"] == []
    assert result["runs"] > 150
    assert result["committed"] == [0, 110, 120, 130, 140]


def test_a_process_killed_at_random_times_leaves_a_complete_older_version() -> None:
    result = run_scenario("random", "2")
    assert result["failures"] == []
    assert result["runs"] > 5
