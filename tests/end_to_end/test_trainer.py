"""A Trainer of Transformers goes on as if nothing had happened when its devices change."""

import itertools
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
    largest_difference,
    read_run,
    read_samples,
    summarise_changes,
    unequal_tensors,
)

HERE = Path(__file__).parent
SCRIPT = HERE / "trainer_train.py"
SAMPLES, BATCH, EPOCHS = 50, 12, 3
"""Samples are no multiple of the batch: passes end inside of batches."""
STEPS = EPOCHS * -(-SAMPLES // BATCH)
TIMEOUT_S = 280

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


class Job:
    """One job in a folder of its own."""

    def __init__(
        self, folder: Path, model: str, stage: int, policy: dict[str, Any], **options: object
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self._model, self._options = model, options
        folder.mkdir()
        common = {"framework": "deepspeed", "device": "cpu", "audit": {"samples": True}}
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage},
        }
        (folder / "ds.json").write_text(json.dumps(config))
        (folder / "policy.yaml").write_text(yaml.safe_dump(common | policy))

    def start(self, devices: int) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(HERE.parents[1])}
        environment |= {"HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tenplex_megatron.cli.main", "run", "--standalone"),
                *(f"--run-dir={self.run_dir}", f"--store-dir={self.folder / 'store'}"),
                *(
                    f"--elastic-policy={self.folder / 'policy.yaml'}",
                    "--redirects=3",
                    "--keep-store",
                ),
                *(f"--nproc-per-node={devices}", str(SCRIPT), f"--output={self.folder}"),
                *(f"--deepspeed={self.folder / 'ds.json'}", f"--model={self._model}"),
                *(f"--epochs={EPOCHS}", f"--samples={SAMPLES}"),
                *(f"--option={name}={json.dumps(value)}" for name, value in self._options.items()),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rows(self, path: str) -> list[dict[str, Any]]:
        full = self.folder / path
        return [json.loads(line) for line in full.read_text().splitlines()] if full.exists() else []

    def said(self, name: str) -> dict[int, tuple[float, ...]]:
        """Step -> what the Trainer said of it last: `name`, its epoch and its learning rate."""
        return {
            row["step"]: (row[name], row["epoch"], row.get("learning_rate", 0.0))
            for row in self.rows("notes.jsonl")
            if name in row
        }

    def end(self) -> list[float]:
        """The last step, the best one, how many were worse since, and the best metric."""
        found: list[float] = json.loads((self.folder / "done.json").read_text())
        return found

    def samples(self) -> dict[int, tuple[int, ...]]:
        return read_samples(self.run_dir, read_run([self.run_dir]), batch_size=BATCH)


@pytest.fixture
def start() -> Iterator[Callable[[Job, int], subprocess.Popen[str]]]:
    started = []

    def started_job(job: Job, devices: int) -> subprocess.Popen[str]:
        started.append(job.start(devices))
        return started[-1]

    yield started_job
    for process in started:
        process.kill()
        process.wait()


def finished(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run that nothing happens to, on one device."""
    job = Job(tmp_path_factory.mktemp("calm") / "job", "gpt2", 2, {})
    finished(job.start(1))
    return job


def check_against(calm: Job, job: Job, *, left_at: tuple[int, ...] = ()) -> None:
    """The same samples, losses, schedule, epochs and evaluations."""
    assert set(calm.said("loss")) == set(range(1, STEPS + 1))
    assert set(calm.said("eval_loss")) == {*range(2, STEPS + 1, 2), STEPS}
    for name, missing in (("loss", left_at), ("eval_loss", ())):
        expected, found = calm.said(name), job.said(name)
        # The loss of the very step a job was left in is not known to who goes on.
        assert set(found) == set(expected) - set(missing)
        for step, values in found.items():
            assert values == pytest.approx(expected[step], abs=2e-5), (name, step)
    recorded, others = (read_run([one.run_dir]).losses for one in (calm, job))
    assert set(recorded) == set(range(1, STEPS + 1))
    assert largest_difference(recorded, others) <= 2e-5
    assert job.samples() == calm.samples()
    assert job.end() == pytest.approx(calm.end(), abs=2e-5)
    assert job.end()[0] == STEPS
    checkpoints = {path.name for path in job.folder.glob("checkpoint-*")}
    assert checkpoints == {f"checkpoint-{step}" for step in range(3, STEPS + 1, 3)}


def test_every_global_batch_is_the_next_part_of_the_stream(calm: Job) -> None:
    samples = calm.samples()
    assert sorted(samples) == list(range(1, STEPS + 1))
    dealt = list(itertools.chain(*(samples[step] for step in sorted(samples))))
    for start in range(0, len(dealt) - SAMPLES + 1, SAMPLES):
        assert sorted(dealt[start : start + SAMPLES]) == list(range(SAMPLES))


def test_a_trainer_changes_its_devices_as_planned(
    calm: Job, tmp_path: Path, start: Callable[..., Any]
) -> None:
    # Left at a step that is evaluated and saved, with a checkpoint of three ranks behind it, and
    # at the last step of a pass.
    policy = {
        "layouts": ["DP3,ZERO2", "DP2,ZERO3", "DP1,ZERO1"],
        "schedule": {6: 2, 10: 1},
        "audit": {"samples": True, "state": True},
        "preload": ["transformers.models.gpt2.modeling_gpt2"],
    }
    job = Job(tmp_path / "job", "gpt2", 2, policy, dataloader_num_workers=1)
    finished(start(job, 3))
    check_against(calm, job, left_at=(6, 10))
    run = read_run([job.run_dir])
    changes = [(change.source.dp, change.target.dp) for change in summarise_changes(run)]
    assert changes == [(3, 2), (2, 1)]
    assert unequal_tensors(run) == ()


def test_a_trainer_survives_the_kill_of_a_rank(tmp_path: Path, start: Callable[..., Any]) -> None:
    policy = {"snapshot": {"every_steps": 1}}
    # A schedule that moves with the evaluations, and not with the steps.
    schedule = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 9.0, "threshold_mode": "abs"},
    }
    undisturbed, job = (
        Job(tmp_path / name, "llama", 3, policy, **schedule) for name in ("calm", "job")
    )
    finished(start(undisturbed, 2))
    assert len({rate for _, _, rate in undisturbed.said("loss").values()}) > 4
    process = start(job, 2)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(step >= 6 for step in job.said("loss")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (started,) = [event for event in job.rows("run/events.jsonl") if event["kind"] == "started"]
    os.kill(int(started["pids"]["1"]), signal.SIGKILL)
    finished(process)
    found = set(job.said("loss"))
    # The loss of the step that was resumed from may never have been said.
    check_against(undisturbed, job, left_at=tuple(set(undisturbed.said("loss")) - found))
    assert len(found) >= STEPS - 1
    # Started once more, there is nothing left to train, and the script goes on after it.
    (job.folder / "done.json").unlink()
    said = job.said("loss")
    finished(start(job, 2))
    assert job.said("loss") == said
    assert job.end()[0] == STEPS
