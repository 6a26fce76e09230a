"""Ranks, axes, stages, and what people write for them."""

import itertools

import pytest

from tenplex_megatron.core.mesh import (
    Coordinates,
    ExpertCoordinates,
    ParallelLayout,
    parse_fields,
)
from tenplex_megatron.errors import ConfigError, LayoutError

SIZES = [
    (tp, pp, dp, cp, ep)
    for tp, pp, dp, cp, ep in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2), (1, 2, 4))
    if dp * cp % ep == 0
]


@pytest.mark.parametrize(("tp", "pp", "dp", "cp", "ep"), SIZES)
def test_ranks_and_coordinates_are_inverse_in_both_grids(
    tp: int, pp: int, dp: int, cp: int, ep: int
) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    ranks = range(layout.world_size)
    assert [layout.rank(layout.coordinates(rank)) for rank in ranks] == list(ranks)
    assert [layout.rank(layout.expert_coordinates(rank)) for rank in ranks] == list(ranks)
    assert {layout.coordinates(rank).pp for rank in ranks} == set(range(pp))
    assert layout.expert_dp * ep == dp * cp


def test_tensor_parallel_varies_fastest_and_pipeline_slowest() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2)
    assert layout.coordinates(1) == Coordinates(tp=1)
    assert layout.coordinates(2) == Coordinates(cp=1)
    assert layout.coordinates(4) == Coordinates(dp=1)
    assert layout.coordinates(8) == Coordinates(pp=1)


def test_experts_take_their_axis_from_context_and_data() -> None:
    layout = ParallelLayout(tp=2, dp=4, ep=2)
    assert layout.expert_coordinates(2) == ExpertCoordinates(ep=1)
    assert layout.expert_coordinates(4) == ExpertCoordinates(dp=1)


@pytest.mark.parametrize("axes", [("tp",), ("dp", "cp"), ("pp",), ("tp", "pp"), ()])
def test_groups_part_the_world(axes: tuple[str, ...]) -> None:
    layout = ParallelLayout(tp=2, pp=2, dp=2, cp=2)
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(16))
    for group in groups:
        for rank in group:
            fixed = {
                axis: getattr(layout.coordinates(rank), axis)
                for axis in ("tp", "cp", "dp", "pp")
                if axis not in axes
            }
            first = layout.coordinates(group[0])
            assert fixed == {axis: getattr(first, axis) for axis in fixed}


@pytest.mark.parametrize(
    "text",
    [
        "TP1,PP1,DP1",
        "TP2,PP2,DP2,VPP2",
        "TP2,PP2,DP4,CP2,EP4,MBS3",
        "TP1,PP2,DP1,STAGES3-5",
        "TP1,PP2,DP1,VPP2,STAGES1-2-3-4",
        "TP1,PP1,DP4,ZERO3",
        "TP1,PP1,DP2,MBS2,ZERO0",
    ],
)
def test_layouts_read_back_what_they_print_and_their_json(text: str) -> None:
    layout = ParallelLayout.parse(text)
    assert str(layout) == text
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.from_json(layout.to_json()) == layout


def test_parsing_ignores_case_and_order_and_fills_in_ones() -> None:
    assert ParallelLayout.parse("pp2, tp4") == ParallelLayout(tp=4, pp=2)
    assert parse_fields("TP2,MBS4") == {"tp": 2, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TP2,XP3", "'XP3' is no axis"),
        ("TP", "'TP' is no axis"),
        ("", "'' is no axis"),
        ("TP2,TP4", "TP is given twice"),
        ("TP2-3", "more than one size"),
        ("TP0", "size of at least 1"),
        ("DP3,EP2", "does not divide"),
        ("DP3,ZERO4", "ZeRO stage: expected 0 to 3"),
    ],
)
def test_a_mistyped_layout_is_the_users_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelLayout.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tq": 2}, "unknown fields"),
        ({"tp": "2"}, "expected an integer"),
        ({"tp": True}, "expected an integer"),
        ({"tp": None}, "expected an integer"),
        ({"stage_layers": 3}, "expected integers"),
        ({"stage_layers": "35"}, "expected an integer"),
        ({"micro_batch_size": 0}, "micro batch size"),
    ],
)
def test_malformed_fields_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout.from_json(values)


def test_with_world_size_fills_the_world_with_replicas() -> None:
    assert ParallelLayout(tp=2, cp=2).with_world_size(12) == ParallelLayout(tp=2, cp=2, dp=3)
    with pytest.raises(LayoutError, match="one replica needs 4 ranks"):
        ParallelLayout(tp=2, cp=2).with_world_size(6)


@pytest.mark.parametrize(("pp", "vpp"), list(itertools.product((1, 2, 4), (1, 2, 3))))
def test_stages_and_chunks_hold_every_layer_once(pp: int, vpp: int) -> None:
    layout = ParallelLayout(pp=pp, vpp=vpp)
    held = [
        layer
        for chunk in range(vpp)
        for stage in range(pp)
        for layer in layout.layers(24, stage, chunk)
    ]
    assert held == list(range(24))


def test_uneven_stages_divide_over_their_chunks() -> None:
    layout = ParallelLayout(pp=2, vpp=2, stage_layers=(2, 4))
    assert [layout.layers(6, stage, chunk) for chunk in (0, 1) for stage in (0, 1)] == [
        range(1),
        range(1, 3),
        range(3, 4),
        range(4, 6),
    ]
    each = ParallelLayout(pp=2, vpp=2, stage_layers=(1, 2, 3, 0))
    assert each.layers(6, 0, 1) == range(3, 6)
    assert each.layers(6, 1, 1) == range(6, 6)


def test_impossible_stages_are_refused() -> None:
    with pytest.raises(LayoutError, match="name 3 stages"):
        ParallelLayout(pp=2, stage_layers=(1, 2, 3))
    with pytest.raises(LayoutError, match="divide over 2 chunks"):
        ParallelLayout(pp=2, vpp=2, stage_layers=(1, 2))
    with pytest.raises(LayoutError, match="do not divide over 4 stages"):
        ParallelLayout(pp=4).layers(6, 0)
    with pytest.raises(LayoutError, match="sum to 3, the model has 4"):
        ParallelLayout(pp=2, stage_layers=(1, 2)).layers(4, 0)
    with pytest.raises(LayoutError, match="no chunk 1 on stage 0"):
        ParallelLayout().layers(4, 0, 1)


def test_places_and_axes_outside_the_grid_are_refused() -> None:
    layout = ParallelLayout(tp=2)
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2"):
        layout.coordinates(2)
    with pytest.raises(LayoutError, match="no rank at"):
        layout.rank(Coordinates(tp=2))
    with pytest.raises(LayoutError, match="'xp' is no axis"):
        layout.size("xp")
    with pytest.raises(LayoutError, match="'ep' is no axis of the dense grid"):
        layout.groups("ep")
    assert [layout.size(axis) for axis in ("tp", "cp", "dp", "pp", "ep")] == [2, 1, 1, 1, 1]
