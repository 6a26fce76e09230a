"""`tenplex plan --from` says what a job would get on other devices, without a script."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.cli.main import main
from tenplex_megatron.cli.what_if import is_what_if
from tenplex_megatron.cli.what_if_values import KEYS

ROOT = Path(__file__).parents[3]
MODEL = ["--model", str(ROOT / "configs/model/llama3_8b.yaml"), "--global-batch-size=512"]
H100 = ["--cluster", str(ROOT / "configs/cluster/h100.yaml")]
COMMON = [*MODEL, *H100]
FLAGS = ["--num-layers=32", "--hidden-size=4096", "--num-attention-heads=32", "--seq-length=2048"]
FLAGS += ["--vocab-size=51200", "--micro-batch-size=2", "--global-batch-size=256", "--bf16"]
FLAGS += ["--use-distributed-optimizer", "--recompute-activations"]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main(["plan", "--json", *arguments])
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (2 if values["missing_bytes"] >= 1 else 0)
    assert list(values) == list(KEYS)  # what is documented is what is there
    return values


def test_three_of_64_are_lost(capsys: pytest.CaptureFixture[str]) -> None:
    values = asked(capsys, "--from=TP2,PP4,DP8", "--gpus=61", *COMMON)
    assert (values["from_layout"], values["gpus"]) == ("TP2,PP4,DP8", 61)
    assert values["devices_per_node"] == [8] * 7 + [5]
    assert values["lost"] == ["n7:5", "n7:6", "n7:7"]
    assert values["missing_bytes"] == 0
    assert 0 < values["devices"] <= 61  # type: ignore[operator]
    assert values["memory_bytes"] <= values["memory_limit_bytes"]  # type: ignore[operator]
    assert values["pause_s"] == values["restart_s"] + values["move_s"]  # type: ignore[operator]
    nodes: list[dict[str, float]] = values["nodes"]  # type: ignore[assignment]
    links: list[dict[str, float]] = values["links"]  # type: ignore[assignment]
    for name in ("arriving", "leaving"):
        assert sum(row[f"{name}_bytes"] for row in nodes) == pytest.approx(values["moved_bytes"])
    assert sum(row["bytes"] for row in links) == pytest.approx(values["moved_bytes"], rel=1e-6)
    assert sum(row["ranks"] for row in nodes) == values["devices"]
    assert sum(row["within_bytes"] for row in nodes) == pytest.approx(values["within_bytes"])
    assert values["baseline_kind"] == "fewer replicas"
    assert f"--micro-batch-size={values['micro_batch_size']}" in str(values["flags"])


def test_with_flags_all_but_the_layout_stays(capsys: pytest.CaptureFixture[str]) -> None:
    lost = "--lost=n0:3,n1:7,n3"
    values = asked(capsys, "--from=TP4,PP2,DP4", lost, "--cluster=a100_selene", "--", *FLAGS)
    runners_up: list[dict[str, object]] = values["runners_up"]  # type: ignore[assignment]
    assert len(runners_up) > 1
    for row in (values, *runners_up):
        assert (row["micro_batch_size"], row["zero_stage"], row["recompute"]) == (2, 1, "selective")
    assert (values["gpus"], values["lost_nodes"]) == (22, ["n3"])
    assert values["missing_bytes"] > 0  # type: ignore[operator]


def test_the_batch_of_the_flags_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    batch = "--global-batch-size=128"
    values = asked(capsys, "--from=TP4,PP2,DP4", "--gpus=24", batch, *H100, "--", *FLAGS)
    assert values["global_batch_size"] == 128


def test_a_job_that_keeps_its_devices_can_stay(capsys: pytest.CaptureFixture[str]) -> None:
    soon = "--next-change=6"  # a restart takes 5 s
    values = asked(capsys, "--from=TP2,PP4,DP8", "--gpus=65", soon, *COMMON)
    assert values["stays"] is True
    assert (values["layout"], values["pause_s"], values["nodes"]) == ("TP2,PP4,DP8", 0, [])
    later = asked(capsys, "--from=TP2,PP4,DP8", "--gpus=128", *COMMON)
    assert later["stays"] is False
    assert later["baseline_kind"] == "stay"
    assert later["step_s"] < values["step_s"]  # type: ignore[operator]


def test_nodes_of_different_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--devices-per-node=8,8,5"
    model = [MODEL[0], MODEL[1], "--global-batch-size=500"]
    values = asked(capsys, "--from=TP2,PP2,DP5", "--gpus=17", sizes, *model, *H100)
    assert values["devices_per_node"] == [8, 8, 1]
    assert values["lost"] == ["n2:1", "n2:2", "n2:3"]


@pytest.mark.parametrize("gpus", ["61", "70", "128"])
def test_the_answer_is_shown(capsys: pytest.CaptureFixture[str], gpus: str) -> None:
    assert main(["plan", "--from", "TP2,PP4,DP8", "--gpus", gpus, *COMMON]) == 0
    said = capsys.readouterr().out
    for line in (
        "step",
        "peak memory",
        "bytes",
        "pause",
        "pays off",
        "busiest nodes",
        "runners-up",
    ):
        assert re.search(rf"^ *{line} ", said, flags=re.MULTILINE), line
    assert f" of {gpus} h100 devices" in said
    assert "flags: --tensor-model-parallel-size=" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["TP2", "TP1", "--gpus=8", *COMMON], "TP2: --from asks what a job would get"),
        (["--nodes", "2", "--gpus=8", *COMMON], "--nodes: --from asks what a job would get"),
        (["--gpus=8", *COMMON, "--", *FLAGS], "expected --model FILE or Megatron's flags after --"),
        (["--gpus=8", *H100], "expected --model FILE or Megatron's flags after --, got neither"),
        (["--gpus=8", *H100, *MODEL[:2]], "--global-batch-size: expected beside --model"),
        ([*COMMON], "--gpus: expected how many devices the job will have, or --lost"),
        (["--gpus=0", *COMMON], "--gpus: expected at least 1 device, got 0"),
        (["--gpus=999999", *COMMON], "--gpus 999999: expected at most 131072 devices, got 999999"),
        (["--gpus=64", "--lost=n0:1", *COMMON], "63 of 64 devices are left without n0:1"),
        (["--gpus=61", "--devices-per-node=8,8,5", *COMMON], "--devices-per-node has 21 in all"),
        (["--gpus=61", *MODEL, "--cluster=h1000"], "h1000"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from=TP2,PP4,DP8", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tenplex plan: ")
    assert said in line


@pytest.mark.parametrize(
    ("layout", "gpus", "said"),
    [
        ("TP3,PP4,DP8", "61", "Megatron refuses it: 32 attention heads do not divide by TP3"),
        ("TP2,PP4,DP7", "50", "with a global batch of 511 or 518 instead of 512 it could run"),
        ("TP8,PP96,DP4000", "61", "expected at most 131072 devices, got 3072000"),
        ("WIDE", "61", "'WIDE' is no axis"),
    ],
)
def test_a_layout_that_can_not_run_is_refused_by_its_rule(
    layout: str, gpus: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", layout, "--gpus", gpus, *COMMON]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_where_nothing_fits_the_nearest_miss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(ROOT / "configs/model/gpt3_175b.yaml"), "--global-batch-size=512"]
    assert main(["plan", "--from=TP8,PP8,DP1", "--gpus=4", *model, *H100]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"on 4 devices fits 85 GB: the smallest, TP4.* GB short", line)


def test_the_mode_is_told_by_its_options() -> None:
    assert is_what_if(["--from=TP2"])
    assert is_what_if(["--gpus", "8"])
    assert not is_what_if(["TP2", "TP1", "train.py", "--", "--from", "x"])


def test_help_shows_both_modes_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = capsys.readouterr().out
    assert "SOURCE TARGET" in said
    assert "--devices-per-node" in said
    assert all(re.search(rf"^  {key} ", said, flags=re.MULTILINE) for key in KEYS)
