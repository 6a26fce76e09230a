"""Which model the flags describe, and which flags state a strategy.

That Megatron reads them the same way is shown end to end, by its own validation.
"""

from dataclasses import replace
from typing import Any

import pytest

from tenplex_megatron.adapters.megatron.arguments import MegatronArguments
from tenplex_megatron.adapters.megatron.described import OTHER_MODELS, described_strategy
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import LatentAttention
from tenplex_megatron.planner.strategy import Strategy

ARGUMENTS = MegatronArguments()
MODEL = [
    *("--num-layers=4", "--hidden-size=48", "--num-attention-heads=6", "--seq-length=32"),
    "--vocab-size=1000",
]
EXPERTS = "--num-experts=8"


def flags(layout: str = "TP2,MBS1", **changes: Any) -> list[str]:  # noqa: ANN401 - any field
    strategy = Strategy(layout=ParallelLayout.parse(layout), global_batch_size=24, **changes)
    return ARGUMENTS.strategy_arguments(strategy)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["--tensor-model-parallel-size=2", "--micro-batch-size=1", "--bf16"]),
        ({}, ["--global-batch-size=24", "--attention-backend=auto", "--overlap-grad-reduce"]),
        ({"layout": "PP2,MBS1,STAGES1-3"}, ["--pipeline-model-parallel-layout=Et|tttL"]),
        ({"zero_stage": 1}, ["--use-distributed-optimizer", "--overlap-param-gather"]),
        ({"zero_stage": 2}, ["--use-megatron-fsdp", "--ckpt-format=fsdp_dtensor"]),
        ({"zero_stage": 3}, ["--data-parallel-sharding-strategy=optim_grads_params"]),
        ({"recompute": "selective"}, ["--recompute-granularity=selective"]),
        ({"recompute": "full"}, ["--recompute-method=uniform", "--recompute-num-layers=1"]),
        (
            {"recompute": "full", "recompute_layers": 3},
            ["--recompute-method=block", "--recompute-num-layers=3"],
        ),
        ({"sequence_parallel": True}, ["--sequence-parallel"]),
        ({"overlaps_tensor_parallel": True}, ["--tp-comm-overlap"]),
        ({"precision": "fp8"}, ["--bf16", "--fp8-format=hybrid"]),
        ({"precision": "fp16"}, ["--fp16"]),
        ({"is_flash": False}, ["--attention-backend=unfused"]),
        ({"loss_fusion": "native"}, ["--cross-entropy-fusion-impl=native"]),
    ],
)
def test_every_choice_has_its_flags(changes: dict[str, Any], expected: list[str]) -> None:
    assert set(expected) <= set(flags(**changes))


def test_what_is_not_chosen_has_no_flag() -> None:
    said = " ".join(flags(precision="fp32", overlaps_gradients=False))
    for word in ("recompute", "sequence", "overlap", "distributed", "fsdp", "fp", "bf16", "fusion"):
        assert word not in said, said


@pytest.mark.parametrize(
    ("extra", "rows", "pads"),
    [
        ([], 1024, True),
        (["--make-vocab-size-divisible-by=3"], 1002, True),
        (["--padded-vocab-size=1010"], 1010, False),
        (["--no-pad-vocab-size"], 1000, False),
    ],
)
def test_the_vocabulary_is_padded_as_for_one_rank(extra: list[str], rows: int, pads: bool) -> None:
    profile = ARGUMENTS.profile([*MODEL, *extra])
    assert (profile.vocab_size, profile.pads_vocab) == (rows, pads)


def test_the_flags_of_a_layout_do_not_change_the_model() -> None:
    extra = ["--tensor-model-parallel-size=2", "--num-layers-per-virtual-pipeline-stage=1"]
    assert ARGUMENTS.profile([*MODEL, *extra]) == ARGUMENTS.profile(MODEL)


@pytest.mark.parametrize("number", range(len(MODEL)))
def test_a_missing_size_of_the_model_is_named(number: int) -> None:
    left = MODEL[:number] + MODEL[number + 1 :]
    flag = MODEL[number].split("=")[0]
    with pytest.raises(ConfigError, match=f"^{flag} is missing .* add {flag} N$"):
        ARGUMENTS.profile(left)


def test_heads_of_no_whole_size_are_refused_unless_given() -> None:
    argv = [*MODEL, "--num-attention-heads=5"]
    with pytest.raises(ConfigError, match=r"--hidden-size 48 does not divide .* add --kv-channels"):
        ARGUMENTS.profile(argv)
    assert ARGUMENTS.profile([*argv, "--kv-channels=10"]).head_size == 10


@pytest.mark.parametrize("flag", OTHER_MODELS)
def test_a_model_of_another_kind_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: no profile is known"):
        ARGUMENTS.profile([*MODEL, flag])
    assert ARGUMENTS.profile([*MODEL, flag], is_rough=True) == ARGUMENTS.profile(MODEL)


def test_a_rough_profile_takes_an_unknown_vocabulary_for_a_usual_one() -> None:
    without = [flag for flag in MODEL if "--vocab-size" not in flag]
    assert len(without) < len(MODEL)
    with pytest.raises(ConfigError, match=r"^--vocab-size is missing"):
        ARGUMENTS.profile(without)
    rough = ARGUMENTS.profile(without, is_rough=True)
    assert replace(rough, vocab_size=8) == replace(ARGUMENTS.profile(MODEL), vocab_size=8)
    assert rough.vocab_size == 50304


@pytest.mark.parametrize(
    "changes",
    [
        *({"zero_stage": stage} for stage in range(4)),
        *({"precision": kind} for kind in ("fp32", "fp16", "bf16", "fp8")),
        *({"recompute": kind} for kind in ("none", "selective", "full")),
        {"recompute": "full", "recompute_layers": 3},
        {"is_flash": False, "overlaps_gradients": False, "loss_fusion": "native"},
        {"sequence_parallel": True, "overlaps_tensor_parallel": True},
    ],
)
def test_flags_say_the_strategy_they_were_written_for(changes: dict[str, Any]) -> None:
    layout = ParallelLayout(tp=2, micro_batch_size=3)
    strategy = Strategy(layout=layout, global_batch_size=24, **changes)
    described = described_strategy([*MODEL, *ARGUMENTS.strategy_arguments(strategy)])
    assert described == replace(strategy, layout=ParallelLayout(micro_batch_size=3))


@pytest.mark.parametrize(
    ("frequency", "dense"),
    [("1", 0), ("[1,1,1,1]", 0), ("([0]*1+[1]*3)", 1), ("[0]+[0]+[1]*2", 2)],
)
def test_leading_layers_may_lack_experts(frequency: str, dense: int) -> None:
    pattern = f"--moe-layer-freq={frequency}"
    assert ARGUMENTS.profile([*MODEL, EXPERTS, pattern]).num_dense_layers == dense
    assert ARGUMENTS.profile([*MODEL, pattern]).num_dense_layers == 0


@pytest.mark.parametrize(
    "frequency",
    [
        "2",
        "([0]*1+[1]*2)",
        "[1]*3+[0]",
        "([1]*1+[0]*1)*2",
        "[0]*4",
        "[2]*4",
        "[1]*3+x",
        "[1",
        "[a]*4",
    ],
)
def test_other_patterns_of_experts_are_refused(frequency: str) -> None:
    with pytest.raises(ConfigError, match=r"^--moe-layer-freq .*\[0\]\*1\+\[1\]\*3"):
        ARGUMENTS.profile([*MODEL, EXPERTS, f"--moe-layer-freq={frequency}"])


def test_no_experts_are_a_dense_model_and_less_is_refused() -> None:
    assert ARGUMENTS.profile([*MODEL, "--num-experts=0"]) == ARGUMENTS.profile(MODEL)
    with pytest.raises(ConfigError, match="--num-experts: expected from 0, got -1"):
        ARGUMENTS.profile([*MODEL, "--num-experts=-1"])


def test_latent_attention_has_its_own_sizes() -> None:
    argv = [*MODEL, "--multi-latent-attention", "--v-head-dim=96"]
    profile = ARGUMENTS.profile([*argv, "--q-lora-rank=8"])
    assert profile.latent == LatentAttention(
        query_rank=8, key_value_rank=32, rope_head_size=64, value_head_size=96
    )
    assert profile.head_size == 128
    with pytest.raises(ConfigError, match=r"^--q-lora-rank is missing"):
        ARGUMENTS.profile(argv)
