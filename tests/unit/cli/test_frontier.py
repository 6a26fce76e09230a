"""`tenplex frontier` shows what no other strategy beats, with flags to paste."""

import itertools
import json
from pathlib import Path

import pytest

from tenplex_megatron.cli.main import main

ROOT = Path(__file__).parents[3]
MODEL = ["--model", str(ROOT / "configs/model/llama3_8b.yaml")]
CLUSTER = ["--cluster", str(ROOT / "configs/cluster/h100.yaml")]
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
        assert f"--tensor-model-parallel-size={best['layout'][2]}" in best["flags"].split()


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
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512"
    model = [*flags.split(), "--vocab-size", "1000", "--max-position-embeddings", "512"]
    assert main([*COMMON, "--gpus", "2", "--json", "--", *model]) == 0
    (page,) = json.loads(capsys.readouterr().out)["frontiers"]
    assert page["fitting"] == page["searched"] > 0


def test_where_nothing_fits_the_smallest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(ROOT / "configs/model/gpt3_175b.yaml")]
    assert main([*COMMON, *model, "--gpus", "4"]) == 0
    assert "nothing fits; the smallest, TP" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8"], "the model: expected --model FILE or Megatron's flags after --"),
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
