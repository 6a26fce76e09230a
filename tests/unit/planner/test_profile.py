"""A model that Megatron could not build is refused, with the rule its sizes break."""

from dataclasses import replace
from typing import Any

import pytest

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import ModelProfile

GPT = ModelProfile(
    num_layers=4,
    hidden_size=48,
    num_heads=12,
    num_query_groups=6,
    head_size=4,
    ffn_size=60,
    seq_length=24,
    vocab_size=96,
)
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 16}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "--num-layers must be at least 1, got 0"),
        ({"hidden_size": -8}, "--hidden-size must be at least 1, got -8"),
        ({"num_query_groups": 0}, "--num-query-groups must be at least 1, got 0"),
        ({"num_query_groups": 5}, "12 attention heads do not divide into 5 query groups"),
        ({"ffn_size": 0}, "--ffn-hidden-size must be at least 1, got 0"),
        ({**EXPERTS, "expert_ffn_size": 0}, "--moe-ffn-hidden-size must be at least 1, got 0"),
        (
            {**EXPERTS, "experts_per_token": 5},
            "--moe-router-topk must be from 1 to 4, the number of experts, got 5",
        ),
        (
            {**EXPERTS, "num_dense_layers": 5},
            "5 leading layers of 4 have no experts",
        ),
        (
            {"seq_length": 0, "vocab_size": 0},
            "--seq-length must be at least 1, got 0; --vocab-size must be at least 1, got 0",
        ),
    ],
)
def test_sizes_that_make_no_model_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: {said}$"):
        replace(GPT, **changes)


def test_models_without_an_mlp_of_their_own_need_no_size_of_it() -> None:
    assert replace(GPT, **EXPERTS, ffn_size=0).num_experts == 4
