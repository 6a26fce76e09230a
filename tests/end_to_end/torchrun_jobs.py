"""A small GPT and the command lines that train it with plain torchrun and with `tenplex run`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tenplex_megatron.elastic.report import Run, read_run, read_samples
from tests.end_to_end.tiny_gpt import GLOBAL_BATCH_SIZE, tiny_gpt_flags

STEPS = 5
STOP = 3
"""The step after which the first start of a job leaves; no snapshot is due there."""
EXACT = 2e-5


@dataclass(frozen=True)
class Place:
    """Where one test keeps its jobs, and what they train on."""

    folder: Path
    store: Path
    data: Path

    def flags(self) -> list[str]:
        """Megatron's flags."""
        return [*tiny_gpt_flags(self.data, steps=STEPS), "--use-distributed-optimizer"]

    def policy(self, name: str, layouts: Sequence[str], schedule: dict[int, int]) -> Path:
        """A policy file."""
        path = self.folder / f"{name}.yaml"
        values = {
            "device": "cpu",
            "layouts": list(layouts),
            "schedule": schedule,
            "snapshot": {"every_steps": 2, "directory": str(self.store)},
            "audit": {"samples": True, "state": True},
        }
        path.write_text(yaml.safe_dump(values))
        return path

    def torchrun(
        self, job: str, ranks: int, script: Path, policy: Path, *extra: str, code: int = 0
    ) -> str:
        """One start with plain torchrun; what it said."""
        return self._run(
            *("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)),
            *(*self.flags(), "--elastic-policy", str(policy), *extra),
            environment={"TENPLEX_JOB": job},
            code=code,
        )

    def tenplex_run(self, job: str, ranks: int, script: Path, policy: Path, *options: str) -> str:
        """One whole job with `tenplex run`; what it said."""
        return self._run(
            *("tenplex_megatron.cli.main", "run", f"--elastic-policy={policy}", "--standalone"),
            *(f"--job={job}", "--node-name=here", f"--run-dir={self.runs(job)}"),
            *(f"--store-dir={self.store}", f"--nproc-per-node={ranks}", *options, str(script)),
            *self.flags(),
            environment={},
            code=0,
        )

    def runs(self, job: str) -> Path:
        """The run folder of a job, where this package puts it below the temporary folder."""
        return self.folder / f"tenplex-{os.getuid()}" / job

    def run(self, job: str) -> Run:
        """What the job recorded."""
        return read_run([self.runs(job)])

    def samples(self, job: str) -> dict[int, tuple[int, ...]]:
        """Step -> ids of its global batch."""
        return read_samples(self.runs(job), self.run(job), batch_size=GLOBAL_BATCH_SIZE)

    def _run(self, *module: str, environment: dict[str, str], code: int) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *module],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            env=os.environ | {"TENPLEX_CPU": "force", "TMPDIR": str(self.folder)} | environment,
        )
        assert done.returncode == code, (done.stderr + done.stdout)[-6000:]
        return done.stdout + done.stderr


def assert_same_course(place: Place, job: str, uninterrupted: str) -> None:
    """Every step has the loss, within what another order of sums may change, and the samples."""
    expected, found = place.run(uninterrupted).losses, place.run(job).losses
    assert list(expected) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=EXACT, rel=0)
    assert place.samples(job) == place.samples(uninterrupted)
    assert len(place.samples(job)) == STEPS
