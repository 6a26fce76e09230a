"""`tenplex frontier` shows what no other strategy beats, with flags to paste."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from tenplex_megatron.cli.main import main
from tenplex_megatron.config import load_profile
from tenplex_megatron.planner.cluster import ClusterProfile

ROOT = Path(__file__).parents[3]
MODEL = ["--model", str(ROOT / "configs/model/llama3_8b.yaml")]
CLUSTER = ["--cluster", str(ROOT / "configs/cluster/h100.yaml")]
CAPACITY = load_profile(ClusterProfile, ROOT / "configs/cluster/h100.yaml").memory_bytes
GPT = [
    *("--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8"),
    *("--seq-length", "512", "--vocab-size", "1000", "--max-position-embeddings", "512"),
]
COMMON = ["frontier", *CLUSTER, "--global-batch-size", "64"]


def test_every_point_beats_the_one_before_in_time_and_the_one_after_in_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMON, *MODEL, "--gpus", "8:16", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [page["devices"] for page in values["frontiers"]] == [8, 16]
    for page in values["frontiers"]:
        points = page["points"]
        assert page["searched"] >= page["fitting"] >= sum(point["fits"] for point in points) > 0
        for before, after in itertools.pairwise(points):
            assert before["memory_bytes"] < after["memory_bytes"]
            assert before["step_s"] > after["step_s"]
        (best,) = [point for point in points if point["is_fastest"]]
        assert best["step_s"] == min(point["step_s"] for point in points if point["fits"])
        assert all(point["devices"] <= page["devices"] for point in points)
        assert f"--tensor-model-parallel-size={best['layout'][2]}" in shlex.split(best["flags"])


def test_the_table_has_flags_for_every_row_and_the_plot_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "frontier.png"
    assert main([*COMMON, *MODEL, "--gpus", "8", "--top", "3", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "8 devices of h100: " in said
    assert said.count("--pipeline-model-parallel-size=") == 3
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_megatrons_flags_describe_the_model_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMON, "--gpus", "2", "--json", "--", *GPT]) == 0
    (page,) = json.loads(capsys.readouterr().out)["frontiers"]
    assert page["fitting"] == page["searched"] > 0


def test_where_nothing_fits_the_nearest_is_named_with_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", str(ROOT / "configs/model/gpt3_175b.yaml")]
    assert main([*COMMON, *model, "--gpus", "4", "--json"]) == 2
    said = capsys.readouterr()
    (page,) = json.loads(said.out)["frontiers"]
    assert page["fitting"] == 0
    assert page["best_step_s"] is None
    (line,) = said.err.splitlines()
    needed = page["least_memory_bytes"]
    assert f"fits the {CAPACITY / 1e9:.4g} GB of h100 (memory_bytes): the nearest, TP" in line
    assert f"needs {needed / 1e9:.4g} GB, {(needed - CAPACITY) / 1e9:.4g} GB more" in line
    enough = re.fullmatch(
        r".* for weights, gradients and optimizer; (\d+) devices are enough", line
    )
    assert enough is not None
    half = int(enough[1]) // 2
    assert main([*COMMON, *model, "--gpus", f"{half}:{enough[1]}", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("nothing fits; the smallest is ") == shown.count("does not fit") == 1


def test_one_table_compares_numbers_of_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "best.png"
    range_ = [*COMMON, *MODEL, "--gpus", "4:16"]
    assert main([*range_, "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)["frontiers"]
    best = [page["best_step_s"] for page in pages]
    assert best == sorted(best, reverse=True)
    assert [page["speedup"] for page in pages] == [best[0] / one for one in best]
    assert main([*range_, "--top", "1", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert said.count("the fastest that fits") == 1
    for page in pages:
        assert re.search(rf"{page['devices']} +│ {page['best_step_s']:.4g}", said)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_recomputed_layers_and_uneven_stages_are_in_table_and_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMON, *MODEL, "--gpus", "6", "--json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["frontiers"]
    some = [row for row in page["points"] if row["recompute_layers"] is not None]
    uneven = [row for row in page["points"] if row["stage_layers"] is not None]
    assert some
    assert uneven
    for row in some:
        assert f"--recompute-num-layers={row['recompute_layers']}" in shlex.split(row["flags"])
        assert "--recompute-method=block" in shlex.split(row["flags"])
    for row in uneven:
        (flag,) = (flag for flag in shlex.split(row["flags"]) if "parallel-layout" in flag)
        assert [stage.count("t") for stage in flag.split("=")[1].split("|")] == row["stage_layers"]
        assert sum(row["stage_layers"]) == 32
    assert main([*COMMON, *MODEL, "--gpus", "6", "--top", "99"]) == 0
    said = capsys.readouterr().out
    assert f"{some[-1]['recompute_layers']} per stage" in said or not some[-1]["fits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8"], "the model: expected --model FILE or Megatron's flags after --"),
        ([*MODEL, "--gpus", "2", "--cluster", "k80"], "cluster 'k80': expected a file, or one of"),
        (
            [*MODEL, "--gpus", "2", "--micro-batch-sizes", "3,5"],
            "no strategy runs on 2 devices: global batch 64 does not divide by micro batch 3 x DP1",
        ),
        (
            ["--gpus", "2", "--", *GPT, "--num-attention-heads", "9"],
            "--hidden-size 512 does not divide by --num-attention-heads 9",
        ),
        (
            ["--gpus", "2", "--", *GPT, "--num-query-groups", "3", "--group-query-attention"],
            "model: 8 attention heads do not divide into 3 query groups",
        ),
        (
            ["--gpus", "2", "--", *GPT, "--num-layers", "0"],
            "--num-layers: expected from 1, got 0",
        ),
        ([*MODEL, "--gpus", "8:2"], "--gpus: expected the smaller number first, got '8:2'"),
        ([*MODEL, "--gpus", "many"], "--gpus: expected N or N:M with N from 1, got 'many'"),
        (["--model", "no.yaml", "--gpus", "8"], "no.yaml"),
    ],
)
def test_wrong_input_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tenplex frontier: ")
    assert said in line
