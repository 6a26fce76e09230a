from pathlib import Path

import pytest
import torch

from tenplex_megatron.cli.main import main
from tenplex_megatron.cli.plan import plan_values
from tenplex_megatron.cli.plan_text import print_plan
from tenplex_megatron.cli.single_rank import _UntouchedMemory
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.plan import Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec

LARGE = 1 << 20
FLAGS = ["--num-layers=4", "--num-attention-heads=4", "--global-batch-size=8"]
FLAGS += ["--micro-batch-size=2", "--hidden-size=64", "--seq-length=32"]


def collection(*regions: tuple[int, int]) -> TensorCollection:
    spec = TensorSpec("w", (8,), "float32")
    held = {r: (Box("w", Region((low,), (high,))),) for r, (low, high) in enumerate(regions)}
    return TensorCollection({"w": spec}, held)


def test_bytes_are_counted_per_pair_of_nodes_and_per_rank() -> None:
    source, target = collection((0, 4), (4, 8)), collection((0, 8), (0, 8))
    topology = Topology({0: "a", 1: "b"}, {0: "a", 1: "b"})
    values = plan_values(plan_reshard(source, target, topology), source)
    assert values["bytes"] == {
        "state": 32, "needed": 64, "local": 32, "moved": 32, "lower_bound": 32,
    }  # fmt: skip
    assert [(row["source"], row["target"], row["bytes"]) for row in values["nodes"]] == [
        ("a", "a", 16), ("a", "b", 16), ("b", "a", 16), ("b", "b", 16),
    ]  # fmt: skip
    assert [(row["rank"], row["needed"], row["received"]) for row in values["ranks"]] == [
        (0, 32, 16), (1, 32, 16),
    ]  # fmt: skip
    assert values["sent_by_node"] == {"a": 16, "b": 16}


@pytest.mark.parametrize("width", [50, 100])
def test_a_plan_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    source, target = collection((0, 4), (4, 8)), collection((0, 8))
    found = plan_reshard(source, target, Topology({0: "a", 1: "b"}, {0: "a", 1: "b"}))
    values = {
        "source": "DP2",
        "target": "DP1",
        **plan_values(found, source),
        "seconds": {"describe": 1.0, "plan": 0.1},
    }
    print_plan(values)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("moved between nodes" in line and "16 B" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["TP3", "TP1"], "4 attention heads do not divide by TP3"),
        (["TP2", "TP1", "--nodes=3"], "2 ranks can't use 3 nodes"),
        (["TP2", "WIDE"], "'WIDE' is no axis"),
        (["/nowhere/at/all", "TP2"], "/nowhere/at/all: no such folder"),
        (["TP2", "TP1", "--elastic-policy=/nowhere.yaml"], "/nowhere.yaml can't be read"),
    ],
)
def test_wrong_input_is_said_in_one_line_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], expected: str
) -> None:
    assert main(["plan", *arguments, str(tmp_path / "train.py"), *FLAGS]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert expected in lines[0]


def test_large_tensors_are_never_written() -> None:
    before = torch.empty(LARGE)
    with _UntouchedMemory():
        made = [torch.zeros(LARGE), torch.ones_like(before), before.clone(), before.half()]
        made += [torch.randn(LARGE), torch.full((LARGE,), 7.0)]
        address = before.data_ptr()
        before.fill_(3.0).mul_(2)
        both = torch.empty(2 * LARGE)
        assert torch.cat([before, before], out=both) is both
        wide = torch.cat([before.view(4, -1), before.view(4, -1)], dim=1)
    assert wide.shape == (4, LARGE // 2)
    assert [one.dtype for one in made][3] == torch.float16
    assert before.data_ptr() == address
    assert not torch.equal(before, torch.full((LARGE,), 6.0))


def test_small_tensors_are_computed() -> None:
    with _UntouchedMemory():
        assert torch.ones(8).mul_(3).sum().item() == 24
        assert torch.full((2,), 5).clone().tolist() == [5, 5]
