"""On how many GPUs a ZeRO job keeps its batch, as a table and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.cli.main import main
from tenplex_megatron.planner.batches import batch_cuts, richer_batches

ROOT = Path(__file__).parents[3]
MODEL = ("--model", str(ROOT / "configs/model/llama3_8b.yaml"))


def written(folder: Path, **more: Any) -> str:  # noqa: ANN401 - keys of a configuration
    settings: dict[str, Any] = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    settings |= {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, **more}
    (folder / "ds.json").write_text(json.dumps(settings))
    return f"--deepspeed-config={folder / 'ds.json'}"


@pytest.fixture
def config(tmp_path: Path) -> str:
    return written(tmp_path)


def test_every_cut_is_exact_and_none_is_missing() -> None:
    found = batch_cuts(24, (1, 2, 3), range(1, 13))
    assert all(cut.ranks * cut.micro * cut.accumulation == 24 for cut in found)
    expected = sum(24 % (ranks * micro) == 0 for ranks in range(1, 13) for micro in (1, 2, 3))
    assert len(set(found)) == len(found) == expected


def test_a_richer_batch_really_runs_on_more() -> None:
    for batch, count in richer_batches(26, (1, 2), range(1, 17)):
        assert len({cut.ranks for cut in batch_cuts(batch, (1, 2), range(1, 17))}) == count
        assert count > len({cut.ranks for cut in batch_cuts(26, (1, 2), range(1, 17))})


def test_the_table_has_a_row_for_every_cut(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", config, "--gpus=1:8"]) == 0
    said = capsys.readouterr().out
    assert "train_batch_size 24, ZeRO 3" in said
    assert main(["frontier", config, "--gpus=1:8", "--json"]) == 0
    cuts = json.loads(capsys.readouterr().out)["cuts"]
    assert [cut["ranks"] for cut in cuts] == [1, 2, 3, 4, 6]


def test_gpus_that_split_tensors_share_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path, tensor_parallel={"autotp_size": 2})
    assert main(["frontier", config, "--gpus=1:8"]) == 0
    assert "train_batch_size 24, ZeRO 3, TP2" in capsys.readouterr().out
    arguments = ["--gpus=1:8", *MODEL, "--cluster=h100"]
    assert main(["frontier", config, *arguments, "--json"]) == 0
    cuts = json.loads(capsys.readouterr().out)["cuts"]
    assert [(cut["gpus"], cut["ranks"]) for cut in cuts] == [(2, 1), (4, 2), (6, 3), (8, 4)]
    assert all(2 * cut["accumulation"] * cut["ranks"] == 24 for cut in cuts)
    whole = written(tmp_path)
    assert main(["frontier", whole, "--gpus=1", *arguments[1:], "--json"]) == 0
    (alone,) = json.loads(capsys.readouterr().out)["cuts"]
    assert cuts[0]["memory_bytes"] < alone["memory_bytes"]  # half of every tensor
    assert (
        main(["frontier", written(tmp_path, tensor_parallel={"autotp_size": 3}), "--gpus=2"]) == 2
    )
    said = capsys.readouterr().err
    assert "on none of 2 to 2 GPUs with TP3" in said


def test_with_a_model_every_cut_has_its_time_and_memory(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpus=1:24", "--micro-batch-sizes=1,2", *MODEL, "--cluster=h100"]
    assert main(["frontier", config, *arguments, "--json"]) == 0
    cuts = json.loads(capsys.readouterr().out)["cuts"]
    one = [cut for cut in cuts if cut["micro"] == 1]
    memory = [cut["memory_bytes"] for cut in one]
    assert memory == sorted(memory, reverse=True)  # ZeRO-3 shards all state
    assert one[-1]["step_s"] < one[0]["step_s"]
    assert not one[0]["fits"]
    assert one[-1]["fits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus=7"], "train_batch_size 24 with micro-batches of [2] divides on none of 7 to 7"),
        (["--gpus=5:2"], "--gpus: expected the smaller number first"),
        (["--gpus=many"], "--gpus: expected N or N:M, got 'many'"),
        (["--gpus=2", *MODEL], "predictions need both --model and --cluster"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    config: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontier", config, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_micro_batches_are_counts(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frontier", config, "--gpus=2", "--micro-batch-sizes=0,1"])
    assert caught.value.code == 2
    assert "expected a count from 1, got 0" in capsys.readouterr().err
