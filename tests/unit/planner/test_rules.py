"""A broken rule is said in one sentence; that each is Megatron's own is shown end to end."""

from dataclasses import replace
from typing import Any

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.profile import LatentAttention, ModelProfile
from tenplex_megatron.planner.rules import broken_rules, holds, tensor_rules
from tenplex_megatron.planner.strategy import Strategy

BATCH = 12
DENSE = ModelProfile(
    num_layers=4,
    hidden_size=48,
    num_heads=12,
    num_query_groups=6,
    head_size=4,
    ffn_size=54,
    seq_length=24,
    vocab_size=50,
)
EXPERTS = replace(
    DENSE, has_bias=False, num_experts=6, expert_ffn_size=20, shared_expert_ffn_size=36
)
MODELS = {
    "dense": DENSE,
    "odd groups": replace(DENSE, num_query_groups=3),
    "one group": replace(DENSE, num_heads=4, num_query_groups=1, head_size=5),
    "fixed vocabulary": replace(DENSE, pads_vocab=False),
    "experts": EXPERTS,
    "late experts": replace(EXPERTS, num_dense_layers=1),
    "biased experts": replace(EXPERTS, has_bias=True),
}
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("name", "layout", "changes", "expected"),
    [
        ("dense", "TP5", {}, "12 attention heads do not divide by TP5"),
        ("odd groups", "TP2", {}, "3 query groups are neither a multiple nor a divisor of TP2"),
        ("dense", "TP12", {}, "54 hidden channels of the MLP do not divide by TP12"),
        ("experts", "TP3", SP, "20 hidden channels of the experts do not divide by TP3"),
        ("experts", "TP8", SP, "36 hidden channels of the shared expert do not divide by TP8"),
        ("one group", "TP4", {}, "30 rows of queries, keys and values do not divide by TP4"),
        ("dense", "CP3,TP6", SP, "8 tokens of a sequence do not divide by TP6"),
        (
            "dense",
            "TP2",
            {"recompute": "selective", "recompute_layers": 1},
            "a number of layers to recompute needs full recomputation, not selective",
        ),
        (
            "dense",
            "TP2",
            {"overlaps_tensor_parallel": True},
            "collectives of TP2 hide behind products only with sequence parallelism",
        ),
        (
            "dense",
            "TP1",
            {"loss_fusion": "te"},
            "the fused loss of Transformer Engine is switched off in Megatron; native is not",
        ),
        ("dense", "VPP2", {}, "VPP2 needs more than one pipeline stage"),
        ("dense", "PP3", {}, "4 layers do not divide into 3 pipeline parts"),
        ("dense", "PP2,STAGES2-3", {}, "stages of (2, 3) layers do not make 4 layers"),
        ("dense", "DP5", {}, "global batch 12 does not divide by micro batch 1 x DP5"),
        ("dense", "PP2,VPP2,DP4", {}, "3 micro batches do not divide by PP2, as VPP2 needs"),
        ("dense", "CP5", {}, "sequences of 24 do not divide into 2 x CP5 pieces"),
        ("dense", "TP1", {"sequence_parallel": True}, "sequence parallelism needs more than TP1"),
        ("dense", "DP2,EP2", {}, "EP2 needs a model with experts"),
        ("experts", "DP4,EP4", {}, "6 experts do not divide by EP4"),
        ("experts", "TP2", {}, "experts with TP2 need sequence parallelism"),
        (
            "biased experts",
            "TP2",
            {"sequence_parallel": True},
            "experts with biases do not run with TP2",
        ),
        ("fixed vocabulary", "TP3", {}, "50 rows of the vocabulary do not divide by TP3"),
    ],
)
def test_a_broken_rule_is_one_sentence_with_the_numbers(
    name: str, layout: str, changes: dict[str, Any], expected: str
) -> None:
    parsed = replace(ParallelLayout.parse(layout), micro_batch_size=1)
    strategy = Strategy(layout=parsed, global_batch_size=BATCH, **changes)
    assert expected in broken_rules(MODELS[name], strategy)


def test_a_layer_only_has_to_divide_where_there_is_one() -> None:
    said = [" ".join(tensor_rules(MODELS[name], 12)) for name in ("experts", "late experts")]
    assert "MLP" not in said[0]
    assert "54 hidden channels of the MLP do not divide by TP12" in said[1]
    latent = LatentAttention(query_rank=8, key_value_rank=4, rope_head_size=2, value_head_size=4)
    assert not holds(tensor_rules(MODELS["one group"], 4))
    assert holds(tensor_rules(replace(MODELS["one group"], latent=latent, ffn_size=48), 4))


def test_all_broken_rules_are_said() -> None:
    layout = ParallelLayout(tp=5, pp=3, dp=5, micro_batch_size=1)
    assert len(broken_rules(DENSE, Strategy(layout=layout, global_batch_size=BATCH))) == 5
