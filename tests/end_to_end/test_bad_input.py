"""Wrong input ends `tenplex run` with exit code 2 and one sentence: what, where, what to do."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.store.shared import SnapshotStore, node_directory

SCRIPT = Path(__file__).parents[2] / "scripts/pretrain_gpt.py"
SIZES = {
    "num-layers": 4,
    "num-attention-heads": 12,
    "num-query-groups": 3,
    "global-batch-size": 12,
    "micro-batch-size": 1,
    "hidden-size": 96,
    "ffn-hidden-size": 96,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "vocab-size": 256,
    "tokenizer-type": "NullTokenizer",
    "split": "1,0,0",
    "lr": "1e-3",
    "train-iters": 4,
    "num-workers": 0,
    "eval-iters": 0,
    "attention-dropout": 0,
    "hidden-dropout": 0,
}
FLAGS = [
    *(f"--{name}={value}" for name, value in SIZES.items()),
    *("--group-query-attention", "--mock-data"),
]


class Command:
    """`tenplex run` with a policy and Megatron's flags, on one node."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.folder, self.store = folder, store
        self.policy = folder / "policy.yaml"

    def run(
        self,
        *options: str,
        policy: dict[str, Any] | None = None,
        script: Path = SCRIPT,
        flags: Sequence[str] = FLAGS,
        file_bytes: int | None = None,
    ) -> str:
        """The sentence on stderr; fails unless it is one, and the exit code 2."""
        if policy is not None:
            values = {"device": "cpu", "timeouts": {"rendezvous_s": 5}} | policy
            self.policy.write_text(yaml.safe_dump(values))
        command = [
            *(sys.executable, "-W", "ignore", "-m", "tenplex_megatron.cli.main", "run"),
            f"--elastic-policy={self.policy}",
            *("--job=bad", "--node-name=here", "--nproc-per-node=4", "--redirects=3"),
            *(f"--run-dir={self.folder / 'run'}", f"--store-dir={self.store}"),
            *(options or ("--standalone",)),
        ]
        limit = (lambda: _limit_files(file_bytes)) if file_bytes else None
        done = subprocess.run(
            [*command, str(script), *flags],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | {"TENPLEX_CPU": "force"},
            preexec_fn=limit,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        assert done.returncode == 2, done.stderr
        (sentence,) = re.findall(r"^tenplex run: (.*)$", done.stderr, re.MULTILINE)
        return sentence


def _limit_files(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


@pytest.fixture
def tenplex(tmp_path: Path, store_directory: Path) -> Command:
    return Command(tmp_path, store_directory)


def test_an_unknown_policy_key_is_named_with_the_closest_one(tenplex: Command) -> None:
    said = tenplex.run(policy={"snapshots": {"every_steps": 2}})
    assert f"{tenplex.policy}: snapshots: unknown key; the closest key is 'snapshot'" in said


def test_a_missing_policy_is_named(tenplex: Command) -> None:
    assert re.search(r"elastic policy \S+/policy.yaml can't be read: .*No such file", tenplex.run())


def test_a_missing_model_flag_is_named(tenplex: Command) -> None:
    said = tenplex.run(policy={}, flags=FLAGS[1:])
    assert said.startswith("--num-layers is missing from the training script's flags")
    assert said.endswith("add --num-layers N")


@pytest.mark.parametrize(
    ("layout", "devices", "reason"),
    [
        ("TP5,PP1,DP1", 5, "12 attention heads do not divide by TP5"),
        ("TP2,PP2,DP1", 4, "3 query groups are neither a multiple nor a divisor of TP2"),
        ("TP1,PP3,DP1", 3, "4 layers do not divide into 3 pipeline parts"),
        ("TP1,PP1,DP5", 5, "global batch 12 does not divide by micro batch 1 x DP5"),
    ],
)
def test_a_layout_that_can_not_exist_is_named_with_the_reason(
    tenplex: Command, layout: str, devices: int, reason: str
) -> None:
    said = tenplex.run("--standalone", f"--nproc-per-node={devices}", policy={"layouts": [layout]})
    assert f"no allowed layout fits {devices} devices ({layout}: {reason})" in said
    assert "none would fit any other number" in said


def test_a_world_too_small_is_told_what_would_fit(tenplex: Command) -> None:
    said = tenplex.run(policy={"layouts": ["TP3,PP2", "TP6,PP1"]})
    assert "no allowed layout fits 4 devices" in said
    assert "would fit 6" in said


def test_a_schedule_that_asks_for_devices_that_do_not_exist_is_refused(tenplex: Command) -> None:
    said = tenplex.run(policy={"schedule": {3: 8}, "layouts": ["TP1,PP2"]})
    assert said.startswith("schedule.3 (")
    assert said.endswith("policy.yaml, line 5): expected 1 to 4 devices (here: 4), got 8")


def test_snapshots_of_another_training_are_left_alone(tenplex: Command) -> None:
    path = node_directory(tenplex.store, "bad", "here")
    SnapshotStore(path, "bad", "another").create()
    said = tenplex.run(policy={"layouts": ["TP1,PP2"]})
    mine = MegatronArguments().identity(FLAGS)
    assert f"{path}: holds snapshots of job 'bad' (another), expected job 'bad' ({mine})" in said
    assert "start it as before, give this job another name" in said
    assert (path / "job.json").exists()


def test_another_format_of_snapshots_is_named(tenplex: Command) -> None:
    path = node_directory(tenplex.store, "bad", "here")
    SnapshotStore(path, "bad", MegatronArguments().identity(FLAGS)).create()
    record = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps(record | {"format": 999}))
    said = tenplex.run(policy={"layouts": ["TP1,PP2"]})
    assert str(path / "job.json") in said
    assert "999" in said


def test_a_port_in_use_is_named(tenplex: Command) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        endpoint = f"localhost:{taken.getsockname()[1]}"
        said = tenplex.run(
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
            *("--rdzv-conf=read_timeout=3,timeout=3",),
            policy={"layouts": ["TP1,PP2"], "timeouts": {"rendezvous_s": 3}},
        )
    assert said.startswith(f"no rendezvous at {endpoint} (c10d): ")


def test_a_script_that_never_trains_is_named(tenplex: Command) -> None:
    script = tenplex.folder / "idle.py"
    script.write_text("import sys\n")
    said = tenplex.run(policy={"layouts": ["TP1,PP2"]}, script=script)
    assert said.startswith(f"{script} ended without training under the elastic hooks")


@pytest.fixture
def small_place(tmp_path: Path) -> Iterator[tuple[Path, int | None]]:
    """A folder on a tmpfs of 1 MB where mounting is allowed, else any folder and a file limit."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    mount = shutil.which("mount") or "mount"
    options = [mount, "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(place)]
    mounted = subprocess.run(options, capture_output=True, check=False).returncode == 0
    yield place, None if mounted else 1 << 20
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_too_small_for_snapshots_is_named_before_training(
    tenplex: Command, small_place: tuple[Path, int | None]
) -> None:
    tenplex.store, file_bytes = small_place
    said = tenplex.run(policy={"layouts": ["TP1,PP2,DP2"]}, file_bytes=file_bytes)
    assert f"{tenplex.store}/bad/here/gen-0001" in said
    assert re.search(r"set snapshot.directory to a larger tmpfs", said)
    assert not (tenplex.folder / "run/losses.jsonl").exists()
