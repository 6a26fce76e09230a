"""What `tenplex run` says and leaves behind where a job can't start."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.test_agent import ENVIRONMENT, HERE, WAIT_S, Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


def only_sentence(job: Job, code: int) -> str:
    """What node a said at its end: one sentence, no traceback, and no snapshots stay behind."""
    assert job.codes() == {"a": code}, job.log()
    assert "Traceback" not in job.log()
    (sentence,) = [line for line in job.log().splitlines() if line.startswith("tenplex run: ")]
    assert not list((job.folder / "store").glob("*"))
    return sentence.removeprefix("tenplex run: ")


@pytest.mark.parametrize("static", [False, True], ids=["c10d", "static"])
def test_a_node_that_does_not_come_is_missed_in_one_sentence(job: Job, *, static: bool) -> None:
    job.static = static
    job.policy.write_text("{device: cpu, timeouts: {rendezvous_s: 5}}")
    job.start("1", "0", "train", nodes="a", per_node=2, at_least=2, flags=("--nnodes=2",))
    said = only_sentence(job, 1)
    assert said.startswith(f"1 of 2 nodes came to localhost:{job.port} within 5 s; start tenplex")
    assert said.endswith("on the others, or raise timeouts.rendezvous_s")


def test_a_refused_layout_leaves_no_store(job: Job) -> None:
    job.policy.write_text("{device: cpu, layouts: ['TP8,PP8']}")
    job.start("1", "0", "train", nodes="a", per_node=1)
    assert "no allowed layout fits 1 devices" in only_sentence(job, 2)


def test_a_finished_job_leaves_no_folder(job: Job) -> None:
    job.start("2", "0", "train", nodes="a", per_node=1)
    assert job.codes() == {"a": 0}, job.log()
    assert not list((job.folder / "store").glob("*"))


@pytest.mark.parametrize(
    ("policy", "options", "script", "said"),
    [
        ("device: cuda", ["--standalone"], HERE / "toy_worker.py", "cuda devices"),
        ("device: cpu", ["--standalone"], HERE / "none.py", "none.py does not exist"),
        ("device: cpu", ["--nnodes=2"], HERE / "toy_worker.py", "--rdzv-endpoint"),
    ],
    ids=["no GPUs", "no script", "no endpoint"],
)
def test_the_command_refuses_before_it_starts_anything(
    tmp_path: Path, policy: str, options: list[str], script: Path, said: str
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(policy)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tenplex_megatron.cli.main", "run"),
            *(f"--elastic-policy={path}", "--nproc-per-node=64", f"--run-dir={tmp_path / 'run'}"),
            *(f"--store-dir={tmp_path / 'store'}", *options, str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    assert sentence.startswith("tenplex run: ")
    assert said in sentence
    assert not (tmp_path / "store").exists()
    assert not list((tmp_path / "run").glob("nodes/*/lock")), "the job was not begun"
