"""Which layouts a policy allows on so many devices, and why not the others."""

from dataclasses import replace

import pytest

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.allowed import (
    Job,
    LayoutPattern,
    allowed_layouts,
    allowed_strategies,
    check_layout,
    legal_worlds,
    smallest_world,
)
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

MODEL = ModelProfile(
    num_layers=8,
    hidden_size=96,
    num_heads=8,
    num_query_groups=4,
    head_size=12,
    ffn_size=192,
    seq_length=4096,
    vocab_size=256,
)
JOB = Job(
    model=MODEL,
    base=Strategy(layout=ParallelLayout(micro_batch_size=1), global_batch_size=24),
)


def nodes(count: int) -> dict[str, tuple[int, ...]]:
    return {"a": tuple(range(count))}


def allowed(count: int, *layouts: str, job: Job = JOB) -> tuple[list[str], dict[str, str]]:
    found, why = allowed_strategies(replace(job, layouts=layouts or None), nodes(count))
    return [str(job.layout(strategy)) for strategy in found], dict(why)


def test_a_pattern_has_the_largest_data_parallel_size_that_is_legal() -> None:
    assert allowed(8, "TP2,PP2")[0] == ["TP2,PP2,DP2"]
    assert allowed(7, "TP2,PP2")[0] == ["TP2,PP2,DP1"]
    assert allowed(5, "TP1")[0] == ["TP1,PP1,DP4"]  # 5 does not divide 24
    assert allowed(7, "CP2", "CP2,EP1")[0] == ["TP1,PP1,DP3,CP2"]


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
        ("EP2", "EP2 needs a model with experts"),
    ],
)
def test_what_breaks_a_rule_is_left_out_with_the_rule(pattern: str, why: str) -> None:
    found, illegal = allowed(8, pattern, "TP1,PP1")
    assert found == ["TP1,PP1,DP8"]
    assert why in illegal[pattern]


def test_an_interleaved_pipeline_needs_whole_rounds_of_micro_batches() -> None:
    why = allowed(2, "PP2,VPP2,MBS8")[1]["PP2,VPP2,MBS8"]
    assert why == "3 micro batches do not divide by PP2, as VPP2 needs"


def test_query_groups_may_be_a_multiple_or_a_divisor_of_the_tensor_axis() -> None:
    assert allowed(8, "TP8")[0] == ["TP8,PP1,DP1"]
    odd = replace(JOB, model=replace(MODEL, num_heads=12, num_query_groups=4, head_size=8))
    assert "neither a multiple nor a divisor" in allowed(6, "TP6", job=odd)[1]["TP6"]


def test_a_free_choice_is_legal_and_never_uses_more_than_it_is_given() -> None:
    for count in range(1, 17):
        found, _ = allowed_strategies(JOB, nodes(count))
        assert len(set(found)) == len(found) > 0
        for strategy in found:
            assert strategy.layout.world_size <= count
            assert strategy.global_batch_size % strategy.layout.dp == 0
            check_layout(JOB, strategy.layout)


def test_a_free_choice_knows_the_sizes_of_nodes() -> None:
    devices = {"a": (0, 2, 3), "b": (0, 1)}
    found, _ = allowed_strategies(JOB, devices)
    assert {strategy.layout.tp for strategy in found} == {1, 2}
    assert max(strategy.layout.world_size for strategy in found) == 5  # a stage for each
    assert all(min(one.layout.stage_layers or (1,)) > 0 and one.layout.cp == 1 for one in found)


def test_tensor_groups_of_a_pattern_stay_inside_nodes_where_they_can() -> None:
    patterns = replace(JOB, layouts=("TP4", "TP8"))
    found, _ = allowed_strategies(patterns, {"a": tuple(range(7)), "b": tuple(range(7))})
    assert [str(JOB.layout(one)) for one in found] == ["TP4,PP1,DP2", "TP8,PP1,DP1"]


def test_a_pinned_layout_is_taken_for_more_devices_only_where_nothing_else_is_left() -> None:
    pinned = ("TP2,PP2,DP2", "TP1,PP2,DP2", "DP3")
    found, _ = allowed(4, *pinned)
    assert found == ["TP1,PP2,DP2"]
    found, illegal = allowed(7, *pinned)
    assert found == ["TP1,PP2,DP2", "TP1,PP1,DP3"]
    assert illegal == {"TP2,PP2,DP2": "is pinned to 8 devices"}


def test_what_a_layout_does_not_say_stays_as_the_user_has_it() -> None:
    base = replace(JOB.base, sequence_parallel=True, recompute="full", zero_stage=1)
    job = replace(JOB, base=base, layouts=("TP2,PP2", "TP1,MBS2"))
    first, second = allowed_strategies(job, nodes(4))[0]
    assert (first.recompute, first.zero_stage, first.sequence_parallel) == ("full", 1, True)
    assert not second.sequence_parallel  # Megatron switches it off for TP1
    assert [str(job.layout(one)) for one in (first, second)] == ["TP2,PP2,DP1", "TP1,PP1,DP4,MBS2"]


def test_allowed_layouts_has_every_tensor_split_once() -> None:
    patterns = replace(JOB, layouts=("TP2,PP2", "TP3", "CP2", "DP3"))
    found = allowed_layouts(patterns, 8)
    assert list(map(str, found)) == ["TP2,PP2,DP1", "TP1,PP1,DP1,CP2", "TP1,PP1,DP3"]
    assert [layout.tp for layout in allowed_layouts(JOB, 8)] == [1, 2, 4, 8]
    assert [layout.tp for layout in allowed_layouts(JOB, 5)] == [1, 2, 4]


def test_the_smallest_world_is_the_least_that_helps() -> None:
    assert str(smallest_world(replace(JOB, layouts=("TP4,PP2", "TP2,PP2")))) == "TP2,PP2,DP1"
    assert smallest_world(replace(JOB, layouts=("TP3",))) is None
    assert str(smallest_world(JOB)) == "TP1,PP1,DP1"


def test_every_number_of_devices_that_a_layout_fills_is_legal() -> None:
    def legal(*layouts: str) -> list[int]:
        return legal_worlds(replace(JOB, layouts=layouts or None), 32)

    assert legal() == [1, 2, 3, 4, 6, 8, 12, 24]
    assert legal("TP4,PP2") == [8, 16, 24, 32]
    assert legal("TP2,DP3", "TP8,MBS5") == [6]
    for count in range(1, 33):
        found, _ = allowed_strategies(replace(JOB, layouts=("TP2,PP2", "TP1")), nodes(count))
        fills = any(strategy.layout.world_size == count for strategy in found)
        assert fills == (count in legal("TP2,PP2", "TP1"))


def test_a_layout_that_breaks_rules_is_refused_with_all_of_them() -> None:
    with pytest.raises(
        ConfigError, match=r"TP3,PP3,DP1: 8 attention heads .*; .* 3 pipeline parts"
    ):
        check_layout(JOB, ParallelLayout(tp=3, pp=3))


def test_a_pattern_keeps_an_open_data_parallel_size_apart() -> None:
    assert LayoutPattern.parse("TP2,DP3").data_parallel == 3
    assert LayoutPattern.parse("TP2").data_parallel is None


def test_of_an_unknown_model_only_the_batch_restricts_layouts() -> None:
    unknown = replace(JOB, model=None)
    assert allowed(5, job=unknown)[0] == ["TP1,PP1,DP4"]
    found, illegal = allowed(6, "TP3", "PP5,VPP2", "ZERO3", job=unknown)
    assert found == ["TP3,PP1,DP2", "TP1,PP1,DP6,ZERO3"]
    assert illegal == {"PP5,VPP2": "24 micro batches do not divide by PP5, as VPP2 needs"}
    assert str(smallest_world(unknown)) == "TP1,PP1,DP1"
    assert allowed_layouts(unknown) == (ParallelLayout(),)
