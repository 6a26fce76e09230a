"""Real DeepSpeed engines change world and ZeRO stage while they train, started by two launchers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenplex_megatron.elastic.report import (
    Run,
    largest_difference,
    read_run,
    read_samples,
    summarise_changes,
    unequal_tensors,
)

HERE = Path(__file__).parent
README = (HERE.parents[1] / "README.md").read_text()
SCRIPT = HERE / "deepspeed_train.py"
PIPELINE = HERE / "deepspeed_pipeline.py"
STEPS = 12
BATCH = 12
TENPLEX = [sys.executable, "-m", "tenplex_megatron.cli.main", "run", "--standalone"]
DEEPSPEED = [
    str(Path(sys.executable).parent / "deepspeed"),
    "--no_local_rank",
    "--master_port=29613",
]
MODULE = ["--module", "tenplex_megatron.run"]
CALM: dict[str, Any] = {"framework": "deepspeed", "device": "cpu", "audit": {"samples": True}}
STAGE_1 = {"zero_optimization": {"stage": 1}}
STAGES = ["DP4,ZERO3", "DP3,ZERO1", "DP2,ZERO2", "DP1,ZERO0"]

pytestmark = pytest.mark.timeout(400)


class Job:
    """One job in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        policy: dict[str, Any],
        config: dict[str, Any],
        script: Path = SCRIPT,
    ) -> None:
        self.folder = folder
        self._script = script
        self.run_dir = folder / "run"
        folder.mkdir()
        settings = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 3},
            "steps_per_print": 1000,
        }
        self.config, self.policy = folder / "ds.json", folder / "policy.yaml"
        self.config.write_text(json.dumps(settings | config))
        self.policy.write_text(yaml.safe_dump(policy))

    def start(self, launcher: list[str], *script: str) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(HERE.parents[1])}
        ours = [
            f"--run-dir={self.run_dir}",
            f"--store-dir={self.folder / 'store'}",
            "--redirects=3",
        ]
        words = [
            *(str(self._script), f"--steps={STEPS}", f"--deepspeed_config={self.config}"),
            *(f"--elastic-policy={self.policy}", *script),
        ]
        if launcher is TENPLEX:
            words.remove(f"--elastic-policy={self.policy}")
            ours += [f"--elastic-policy={self.policy}", "--nproc-per-node=4"]
        command = [*launcher, *ours, *words]
        if launcher is DEEPSPEED:
            command = [*launcher, "--num_accelerators=4", *MODULE, *ours, *words]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[Job, subprocess.Popen[str]]]]:
    started = []

    def start(
        policy: dict[str, Any],
        launcher: list[str],
        *script: str,
        config: dict[str, Any] | None = None,
        path: Path = SCRIPT,
    ) -> tuple[Job, subprocess.Popen[str]]:
        job = Job(tmp_path / f"job-{len(started)}", policy, config or {}, path)
        started.append(job.start(launcher, *script))
        return job, started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that nothing happens to."""
    job = Job(tmp_path_factory.mktemp("calm") / "job", CALM, {})
    done = job.start(TENPLEX)
    said, _ = done.communicate(timeout=200)
    assert done.returncode == 0, said
    return job


def check_against(calm: Job, job: Job) -> Run:
    """The same losses on the same samples."""
    mine, theirs = read_run([job.run_dir]), read_run([calm.run_dir])
    assert len(theirs.losses) == STEPS
    assert largest_difference(theirs.losses, mine.losses) <= 2e-5
    expected = read_samples(calm.run_dir, theirs, batch_size=BATCH)
    assert read_samples(job.run_dir, mine, batch_size=BATCH) == expected
    return mine


def kill_rank(job: Job, process: subprocess.Popen[str], rank: int, *, after: int) -> None:
    """SIGKILL to a worker once a step is finished."""
    deadline = time.monotonic() + 200
    while not any(row["step"] >= after for row in job.rows("losses.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started = [event for event in job.rows("events.jsonl") if event["kind"] == "started"]
    os.kill(int(started[-1]["pids"][str(rank)]), signal.SIGKILL)


def test_a_job_changes_stage_and_world_live(calm: Job, make: Callable[..., Any]) -> None:
    policy = {**CALM, "layouts": STAGES, "schedule": {4: 2, 8: 3}}
    policy["audit"] = {"samples": True, "state": True}
    job, process = make(policy, TENPLEX)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    run = check_against(calm, job)
    found = [(str(change.source), str(change.target)) for change in summarise_changes(run)]
    assert found == [
        ("TP1,PP1,DP4,ZERO3", "TP1,PP1,DP2,ZERO2"),
        ("TP1,PP1,DP2,ZERO2", "TP1,PP1,DP3,ZERO1"),
    ]
    assert unequal_tensors(run) == ()


def test_under_its_own_launcher_a_job_survives_the_kill_of_a_rank(
    tmp_path: Path, calm: Job, make: Callable[..., Any]
) -> None:
    # A ZeRO checkpoint of four ranks, which three could not load.
    policy = {**CALM, "snapshot": {"every_steps": 1}}
    job, process = make(policy, DEEPSPEED, f"--save={tmp_path / 'checkpoint'}")
    kill_rank(job, process, 2, after=5)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    (change,) = summarise_changes(check_against(calm, job))
    assert (change.source.dp, change.target.dp) == (4, 3)
    assert "signal 9" in change.cause
    assert change.steps_lost <= 2
    assert (tmp_path / "checkpoint/latest").exists()


def test_a_pipeline_goes_on_with_other_stages(tmp_path: Path, make: Callable[..., Any]) -> None:
    policy = {**CALM, "layouts": ["PP2"]}
    calm, process = make(policy, TENPLEX, "--stages=topology", path=PIPELINE, config=STAGE_1)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    policy = {**CALM, "layouts": ["PP2,DP2", "PP1,DP3"], "schedule": {4: 3}}
    policy["audit"] = {"samples": True, "state": True}
    save = f"--save={tmp_path / 'checkpoint'}"
    job, process = make(policy, TENPLEX, save, path=PIPELINE, config=STAGE_1)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    run = check_against(calm, job)
    (change,) = summarise_changes(run)
    assert (str(change.source), str(change.target)) == ("TP1,PP2,DP2", "TP1,PP1,DP3")
    assert unequal_tensors(run) == ()


@pytest.mark.parametrize(
    ("script", "policy", "config", "said"),
    [
        (["--mode=twice"], {}, {}, "this engine is elastic already; call it once"),
        (["--mode=never"], {}, {}, "an engine is trained that was not handed to elastic(engine)"),
        ([], {"layouts": ["TP2"]}, {}, "no 'tensor_parallel' block that says how TP splits"),
        ([], {}, {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}, "none would fit"),
        (["--stages=wrong"], {"layouts": ["PP2"]}, STAGE_1, "the axes {'pipe': 1, 'data': 4, "),
        ([], {"layouts": ["PP2"]}, {}, "pipelines run with ZeRO 0 or 1, got stage 3"),
    ],
    ids=[
        "wrapped twice",
        "never wrapped",
        "no way to split",
        "no batch",
        "other stages",
        "stage of a pipeline",
    ],
)
def test_what_is_wrong_ends_the_job_with_one_sentence(
    make: Callable[..., Any],
    script: list[str],
    policy: dict[str, Any],
    config: dict[str, Any],
    said: str,
) -> None:
    path = PIPELINE if script and "stages" in script[0] else SCRIPT
    _, process = make({**CALM, **policy}, TENPLEX, *script, config=config, path=path)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("tenplex run: ")]
    assert said in sentence


def test_the_lines_that_make_a_script_elastic_are_those_of_the_readme() -> None:
    (block,) = (part for part in README.split("```") if "ElasticSampler, elastic" in part)
    lines = [line.strip() for line in block.removeprefix("python").splitlines() if line.strip()]
    assert len(lines) == 12
    script = [line.strip() for line in SCRIPT.read_text().splitlines()]
    assert [line for line in lines if line not in script] == []
