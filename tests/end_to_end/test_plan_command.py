"""Run as a program, this file prints what the ranks of a layout would hold."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.cli.describe import Describer, Script
from tenplex_megatron.cli.stored import find_jobs
from tenplex_megatron.core.codec import decode, encode
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.moves import Placement, StateSizes, bytes_to_move

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"
FLAGS = """
--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
--position-embedding-type rope --seq-length 32 --max-position-embeddings 32
--global-batch-size 8 --micro-batch-size 2 --train-iters 2 --lr 1e-2 --lr-warmup-iters 1
--tokenizer-type NullTokenizer --vocab-size 250 --make-vocab-size-divisible-by 8 --mock-data
--num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1 --bf16
--use-distributed-optimizer
"""
MODEL = FLAGS.split()
UNTIED = ["--untie-embeddings-and-output-weights"]
CASES = {"TP2,PP1,DP2": MODEL, "TP1,PP2,DP1,VPP2": [*MODEL, *UNTIED]}


def tenplex(*arguments: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return program("-m", "tenplex_megatron.cli.main", *arguments, timeout_s=timeout_s)


def program(*arguments: str | Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | {"TENPLEX_CPU": "force"},
    )


def policy(folder: Path, layout: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(f"device: cpu\nsnapshot: {{every_steps: 1}}\nlayouts: ['{layout}', 'TP4']\n")
    return path


@pytest.fixture(scope="module", params=CASES)
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A layout, and what a job stored in it."""
    layout: str = request.param
    folder = tmp_path_factory.mktemp("job")
    root = Path(tempfile.mkdtemp(prefix="tenplex-test-", dir="/dev/shm"))
    try:
        done = tenplex(
            *("run", "--elastic-policy", policy(folder, layout), "--job=planned", "--node-name=a"),
            *("--standalone", "--keep-store", f"--store-dir={root}", f"--run-dir={folder / 'run'}"),
            *("--nproc-per-node", str(ParallelLayout.parse(layout).world_size), "--redirects=3"),
            *(SCRIPT, *CASES[layout]),
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield layout, root
    finally:
        shutil.rmtree(root)


def predicted_bytes(layout: str) -> float:
    """What leaves node a for TP1,PP4,DP1 on two nodes, without a tensor described."""
    source, target = ParallelLayout.parse(layout), ParallelLayout.parse("TP1,PP4,DP1")
    model = MegatronArguments().profile(CASES[layout])
    before = Placement(source, dict.fromkeys(range(source.world_size), "a"))
    after = Placement(target, dict(enumerate(["a", "a", "new0", "new0"])))
    return sum(bytes_to_move(StateSizes.of(model), model.num_layers, before, after).values())


def stored_collection(root: Path) -> TensorCollection:
    (job,) = find_jobs(root)
    reader = job.nodes["a"].reader(2)
    boxes = {rank: tuple(box.box for box in reader.boxes(rank)) for rank in reader.ranks}
    return TensorCollection(reader.specs, boxes)


def test_what_a_layout_is_said_to_hold_is_what_a_job_stores(stored: tuple[str, Path]) -> None:
    layout, root = stored
    done = program(__file__, layout, *CASES[layout])
    assert done.returncode == 0, done.stderr[-4000:]
    described, expected = decode(done.stdout, TensorCollection), stored_collection(root)
    assert described.tensors == expected.tensors
    assert described.holdings == expected.holdings


def test_a_stored_job_goes_to_more_nodes(stored: tuple[str, Path], tmp_path: Path) -> None:
    layout, root = stored
    done = tenplex(
        *("plan", root, "TP1,PP4,DP1", "--to-nodes=2", "--moves", "--json"),
        *("--elastic-policy", policy(tmp_path, layout), SCRIPT, *CASES[layout]),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    values = json.loads(done.stdout)
    sizes = values["bytes"]
    assert values["source"] == f"step 2 of planned in {layout}"
    assert {row["target"] for row in values["nodes"]} == {"a", "new0"}
    assert 0 < sizes["moved"] == sizes["lower_bound"] < sizes["needed"]
    assert sizes["needed"] == sum(row["bytes"] for row in values["moves"])
    assert sizes["moved"] == sum(row["received"] for row in values["ranks"])
    assert values["created_boxes"] == 0
    assert sizes["moved"] == pytest.approx(predicted_bytes(layout), abs=0.03 * sizes["state"])
    assert all(name.startswith("random/") for name in values["unused_tensors"])


def test_inspect_finds_what_a_job_stored_sound(stored: tuple[str, Path]) -> None:
    layout, root = stored
    done = tenplex("inspect", root, "--json", "--tensors")
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    newest = job["versions"][0]
    assert (newest["version"], newest["layout"], newest["complete"]) == (2, layout, True)
    assert newest["digests"] == "ok"
    expected = stored_collection(root).tensors
    assert {row["name"]: tuple(row["shape"]) for row in job["tensors"]} == {
        name: spec.shape for name, spec in expected.items()
    }


def test_what_the_framework_refuses_is_said_in_one_line() -> None:
    done = tenplex("plan", "TP1", "TP1", SCRIPT, *MODEL, "--no-such-flag")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("tenplex plan: TP1,PP1,DP1: rank 0 can't be built: ")
    assert "--no-such-flag" in line
    log = Path(line.rpartition("printed: ")[2].strip(")"))
    assert "--no-such-flag" in log.read_text()
    shutil.rmtree(log.parent)


def describe(layout: str, flags: Sequence[str]) -> None:
    wanted = ParallelLayout.parse(layout)
    script = Script(framework="megatron", path=str(SCRIPT), argv=tuple(flags))
    with Describer(script, [wanted, ParallelLayout(tp=4)]) as describer:
        sys.stdout.write(encode(describer.describe(wanted)))


if __name__ == "__main__":
    describe(sys.argv[1], sys.argv[2:])
