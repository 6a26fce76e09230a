import itertools

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.choose import (
    LayoutPattern,
    ModelLimits,
    allowed_layouts,
    choose,
)

LIMITS = ModelLimits(
    num_layers=8, num_heads=8, num_query_groups=4, global_batch_size=24, micro_batch_size=1
)


@pytest.mark.parametrize(
    ("devices", "layout"),
    [(8, "TP2,PP2,DP2"), (7, "TP2,PP2,DP1"), (4, "TP2,PP2,DP1"), (3, "TP1,PP1,DP3")],
)
def test_more_devices_come_first(devices: int, layout: str) -> None:
    assert str(choose(devices, LIMITS, ["TP2,PP2", "TP1,PP1,DP3"]).layout) == layout


def test_a_smaller_bubble_comes_second_and_a_smaller_tensor_axis_third() -> None:
    assert choose(4, LIMITS, ["TP1,PP4", "TP2,PP2"]).layout == ParallelLayout(tp=2, pp=2)
    assert choose(4, LIMITS, ["TP2,PP2,VPP2", "TP2,PP2"]).layout.vpp == 2
    assert choose(4, LIMITS, ["TP4", "TP2"]).layout == ParallelLayout(tp=2, dp=2)


def test_the_present_axes_break_a_tie() -> None:
    layouts = ["TP2,PP2", "TP2,PP2,MBS1"]
    for layout, other in itertools.permutations(layouts):
        kept = choose(4, LIMITS, [other, layout], ParallelLayout.parse(layout))
        assert kept.layout.tp == 2


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("TP3", "8 attention heads do not divide by TP3"),
        ("PP3", "8 layers do not divide into 3 pipeline parts"),
        ("VPP2", "VPP2 needs more than one pipeline stage"),
        ("PP2,STAGES3-4", "stages of (3, 4) layers do not make 8 layers"),
        ("MBS5", "global batch 24 does not divide by micro batch 5"),
        ("TP2,PP8", "needs 16 devices"),
        ("TP1,DP9", "is pinned to 9 devices"),
        ("EP16", "expert axis of 16 does not divide"),
    ],
)
def test_what_breaks_a_rule_is_rejected_with_the_rule(pattern: str, why: str) -> None:
    decision = choose(8, LIMITS, [pattern, "TP1,PP1"])
    assert why in dict(decision.rejected)[pattern]
    assert decision.layout == ParallelLayout(dp=8)


def test_an_interleaved_pipeline_needs_whole_rounds_of_micro_batches() -> None:
    with pytest.raises(ConfigError, match="3 micro batches do not divide by PP2, as VPP2 needs"):
        choose(2, LIMITS, ["PP2,VPP2,MBS8"])


def test_query_groups_may_be_a_multiple_or_a_divisor_of_the_tensor_axis() -> None:
    assert choose(8, LIMITS, ["TP8"]).layout.tp == 8
    with pytest.raises(ConfigError, match="neither a multiple nor a divisor"):
        choose(8, ModelLimits(8, 12, 4, 24, 1), ["TP6"])


def test_data_parallel_size_shrinks_until_the_batch_divides() -> None:
    assert choose(5, LIMITS, ["TP1"]).layout == ParallelLayout(dp=4)
    assert choose(7, LIMITS, None).layout.dp == 6


def test_stage_layers_make_an_uneven_pipeline_legal() -> None:
    limits = ModelLimits(7, 8, 8, 24, 1)
    assert choose(2, limits, ["PP2,STAGES3-4"]).layout.stage_layers == (3, 4)


def test_an_expert_axis_takes_the_largest_data_parallel_size_it_divides() -> None:
    assert choose(7, LIMITS, ["EP2"]).layout == ParallelLayout(dp=6, ep=2)


def test_auto_never_uses_more_than_it_is_given() -> None:
    for devices in range(1, 17):
        layout = choose(devices, LIMITS, None).layout
        assert layout.world_size <= devices
        assert LIMITS.global_batch_size % layout.dp == 0


def test_when_nothing_fits_the_error_says_what_would() -> None:
    with pytest.raises(ConfigError, match="TP2,PP2,DP1 would fit 4") as caught:
        choose(3, LIMITS, ["TP2,PP2", "TP4,PP2"])
    assert "TP2,PP2: needs 4 devices" in str(caught.value)
    with pytest.raises(ConfigError, match="none would fit any other number"):
        choose(3, LIMITS, ["TP3"])


def test_a_choice_explains_itself() -> None:
    decision = choose(8, LIMITS, ["TP2,PP2", "TP8", "TP1,PP4,DP1"])
    assert decision.reason == "TP8,PP1,DP1 uses 8 of 8 devices, pipeline bubble 0.0%"
    assert dict(decision.rejected) == {
        "TP1,PP4,DP1": "is pinned to 4 devices",
        "TP2,PP2,DP2": "pipeline bubble 8.3% instead of 0.0%",
    }


def test_allowed_layouts_has_every_split_once() -> None:
    found = allowed_layouts(LIMITS, ["TP2,PP2", "TP3", "EP2", "DP3"], 8)
    assert list(map(str, found)) == ["TP2,PP2,DP1", "TP1,PP1,DP2,EP2", "TP1,PP1,DP3"]
    assert ParallelLayout(tp=4, pp=2) in allowed_layouts(LIMITS, None, 8)


def test_a_pattern_keeps_an_open_data_parallel_size_apart() -> None:
    assert LayoutPattern.parse("TP2,DP3").data_parallel == 3
    assert LayoutPattern.parse("TP2,CP2").replica_size == 4
    assert LayoutPattern.parse("TP2").sized(4) == ParallelLayout(tp=2, dp=4)
