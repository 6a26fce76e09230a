"""What a DeepSpeed configuration says, and what it says for another layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tenplex_megatron.adapters.deepspeed.arguments import DeepSpeedArguments
from tenplex_megatron.adapters.deepspeed.config import check_layout, for_layout, read_config
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.run import run_arguments

ARGUMENTS = DeepSpeedArguments()
CONFIG: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "bf16": {"enabled": True},
    "tensor_parallel": {"partition_config": {}},
}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in CONFIG.items() if name != key}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return ["--lr", "0.1", "--deepspeed_config", str(path)]


def layout(text: str) -> ParallelLayout:
    return ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("text", "accumulation"),
    [("DP1", 12), ("DP3", 4), ("DP4", 3), ("DP12", 1), ("DP3,MBS4", 2), ("PP2,DP2,ZERO1", 6)],
)
def test_the_global_batch_is_the_same_in_every_layout(text: str, accumulation: int) -> None:
    chosen = layout(text)
    found = for_layout(CONFIG, chosen)
    micro = found["train_micro_batch_size_per_gpu"]
    assert found["gradient_accumulation_steps"] == accumulation
    assert micro * accumulation * chosen.dp == found["train_batch_size"] == 24


TRAINER = "tenplex_megatron.adapters.huggingface.callback"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed", "ds.json"], True),
        (["--lr=1", "--deepspeed=ds.json"], True),
        (["--deepspeed", "--deepspeed_config", "ds.json"], False),
        (["--deepspeed_config=ds.json", "--deepspeed"], False),
    ],
)
def test_a_script_with_the_flag_of_the_trainer_finds_it_imported(
    words: list[str], expected: bool
) -> None:
    modules = ARGUMENTS.modules(words)
    assert (TRAINER in modules) == expected
    assert modules[: len(ARGUMENTS.preload)] == ARGUMENTS.preload


def test_a_layout_may_say_the_stage() -> None:
    assert for_layout(CONFIG, layout("DP2"))["zero_optimization"]["stage"] == 2
    found = for_layout(CONFIG, layout("DP2,ZERO3"))["zero_optimization"]
    assert found == {"stage": 3, "overlap_comm": True}
    assert CONFIG["zero_optimization"]["stage"] == 2


def test_tensor_parallelism_is_switched_on_and_off() -> None:
    assert "tensor_parallel" not in for_layout(CONFIG, layout("DP2"))
    found = for_layout(CONFIG, layout("TP2,DP3"))
    assert found["tensor_parallel"] == {"partition_config": {}, "autotp_size": 2}
    # DeepSpeed itself would multiply by TP as well.
    assert "train_batch_size" not in found
    assert found["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("config", "text", "said"),
    [
        (CONFIG, "DP5", "train_batch_size 24 does not divide by .* 2 x DP5; expected a multiple"),
        (CONFIG, "DP24", "does not divide"),
        (without("train_batch_size"), "DP1", "train_batch_size: expected a count, got None; the"),
        ({**CONFIG, "train_batch_size": "auto"}, "DP1", "expected a count, got 'auto'"),
        (without("tensor_parallel"), "TP2", "no 'tensor_parallel' block that says how TP splits"),
        (CONFIG, "PP2", "pipelines run with ZeRO 0 or 1, got stage 2"),
        (CONFIG, "CP2", "DeepSpeed has no CP"),
    ],
)
def test_what_can_not_be_built_is_one_sentence(
    config: dict[str, Any], text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        for_layout(config, layout(text))


def test_the_flags_describe_the_strategy(flags: list[str]) -> None:
    found = ARGUMENTS.strategy(flags)
    assert (found.global_batch_size, found.micro_batch_size, found.zero_stage) == (24, 2, 2)
    assert (found.precision, found.overlaps_gradients) == ("bf16", True)
    assert ARGUMENTS.profile(flags) is None
    assert ARGUMENTS.layout_arguments(flags, layout("DP3"), [layout("TP2")]) == []
    with pytest.raises(ConfigError, match="ZeRO 0 or 1"):
        ARGUMENTS.layout_arguments(flags, layout("DP3"), [layout("PP2")])


@pytest.mark.parametrize("spelling", ["--deepspeed_config={}", "--deepspeed={}"])
def test_every_spelling_of_the_flag_is_read(flags: list[str], spelling: str) -> None:
    again = [*flags[:2], spelling.format(flags[3])]
    assert ARGUMENTS.strategy(again) == ARGUMENTS.strategy(flags)
    assert ARGUMENTS.strategy(["--deepspeed", *flags]) == ARGUMENTS.strategy(flags)


def test_a_missing_or_broken_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--deepspeed_config is missing .* add"):
        ARGUMENTS.strategy(["--deepspeed"])
    with pytest.raises(ConfigError, match=r"none\.json can't be read"):
        ARGUMENTS.strategy([f"--deepspeed_config={tmp_path}/none.json"])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected keys and values"):
        read_config(tmp_path / "list.json")


def test_the_identity_is_what_is_trained_not_how_fast(flags: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"

    def identity(**changes: Any) -> str:  # noqa: ANN401 - keys of a configuration
        other.write_text(json.dumps({**CONFIG, **changes}))
        return ARGUMENTS.identity([*flags[:2], f"--deepspeed_config={other}", "--local_rank=3"])

    assert identity() == ARGUMENTS.identity(flags)
    assert identity(train_micro_batch_size_per_gpu=1) == ARGUMENTS.identity(flags)
    assert identity(zero_optimization={"stage": 3}) == ARGUMENTS.identity(flags)
    assert identity(train_batch_size=12) != ARGUMENTS.identity(flags)
    assert identity(bf16={"enabled": False}) != ARGUMENTS.identity(flags)
    assert ARGUMENTS.identity(["--lr", "0.2", *flags[2:]]) != ARGUMENTS.identity(flags)


def test_a_layout_that_no_configuration_expresses_is_refused_before_anything_starts() -> None:
    check_layout(CONFIG, layout("TP2,DP2,ZERO3"))
    with pytest.raises(ConfigError, match="DeepSpeed has no VPP"):
        check_layout(CONFIG, layout("PP2,VPP2,ZERO1"))


def test_several_nodes_of_a_launcher_meet_where_it_says() -> None:
    environment = {"CROSS_SIZE": "2", "CROSS_RANK": "1", "LOCAL_SIZE": "4", "WORLD_SIZE": "8"}
    environment |= {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    words = ["--job", "j", "t.py", "--elastic-policy=p.yaml", "--lr", "1"]
    assert run_arguments(words, environment) == [
        *("--elastic-policy=p.yaml", "--nproc-per-node=4", "--nnodes=2", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=host:29500", "--node-name=node-1", "--job", "j", "t.py", "--lr", "1"),
    ]
    with pytest.raises(ConfigError, match="expected --elastic-policy FILE"):
        run_arguments(["t.py"], {})
