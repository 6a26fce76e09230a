"""The one import: silent without the flag, one sentence and exit code 2 for wrong input."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tenplex_megatron.elastic.standalone import job_name, node_names

RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_WORLD_SIZE": "1",
    "TENPLEX_CPU": "force",
}
KEPT_OUT = (*RANK, "TENPLEX_GENERATION", "TENPLEX_JOB")
MODEL = (
    *("--num-layers=4", "--num-attention-heads=4", "--global-batch-size=12"),
    *("--hidden-size=64", "--seq-length=32"),
    *("--micro-batch-size=1", "--elastic-policy", "policy.yaml"),
)


def run(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text("import sys\nimport tenplex_megatron.auto\nprint('torch' in sys.modules)\n")
    clean = {name: value for name, value in os.environ.items() if name not in KEPT_OUT}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=folder,
        env=clean | (environment or {}),
    )


def refused(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> str:
    done = run(folder, *arguments, environment=environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (sentence,) = (
        line.removeprefix("tenplex: ")
        for line in done.stderr.splitlines()
        if line.startswith("tenplex: ")
    )
    return sentence


@pytest.mark.parametrize("arguments", [[], ["--lr", "1"], ["elastic-policy"]])
def test_without_the_flag_nothing_happens_and_torch_is_not_loaded(
    tmp_path: Path, arguments: Sequence[str]
) -> None:
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_under_an_agent_the_import_leaves_everything_to_it(tmp_path: Path) -> None:
    done = run(tmp_path, "--elastic-policy=a.yaml", environment={"TENPLEX_GENERATION": "{}"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (["--elastic-policy"], "nothing"),
        (["--elastic-policy="], "nothing"),
        (["--elastic-policy", "--lr"], "--lr"),
    ],
)
def test_a_flag_without_a_path_is_refused(
    tmp_path: Path, arguments: Sequence[str], got: str
) -> None:
    expected = f"--elastic-policy: expected the path of a policy, got {got}"
    assert refused(tmp_path, *arguments) == expected


def test_a_script_started_without_torchrun_is_told_so(tmp_path: Path) -> None:
    said = refused(tmp_path, *MODEL)
    assert "RANK" in said
    assert "start the script with torchrun or `tenplex run`" in said


def test_a_number_of_ranks_that_no_layout_uses_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "store"
    (tmp_path / "policy.yaml").write_text(
        f"device: cpu\nlayouts: ['TP2,PP1']\nsnapshot: {{directory: {place}}}\n"
    )
    said = refused(tmp_path, *MODEL, environment=RANK)
    assert said.startswith("3 ranks: the best layout the policy allows, TP2,PP1,DP1, uses 2")
    assert not place.exists()


def test_only_the_first_rank_of_a_node_speaks(tmp_path: Path) -> None:
    done = run(tmp_path, *MODEL, environment=RANK | {"RANK": "1", "LOCAL_RANK": "1"})
    assert (done.returncode, "tenplex: " in done.stderr) == (2, False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "pretrain_gpt"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "pretrain_gpt"),
        ({"TORCHELASTIC_RUN_ID": "b2af2282-e1af-40a7-a707-5329a9293b8e"}, "pretrain_gpt"),
        ({"TORCHELASTIC_RUN_ID": "big"}, "big"),
        ({"TORCHELASTIC_RUN_ID": "big", "TENPLEX_JOB": "mine"}, "mine"),
    ],
)
def test_two_starts_of_one_job_have_one_name(environment: dict[str, str], expected: str) -> None:
    assert job_name("/some/where/pretrain_gpt.py", environment) == expected


def test_nodes_are_named_by_their_host_and_apart_on_one() -> None:
    assert node_names(["one"]) == ["one"]
    assert node_names(["one", "two"]) == ["one", "two"]
    assert node_names(["one", "two", "one"]) == ["one-0", "two", "one-1"]
