"""The quick count of bytes is the exact plan's, for states that are cut the way it assumes."""

import itertools

import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.planner.moves import Placement, StateSizes, bytes_to_move

LAYERS = 4
UNITS = 840
LAYOUTS = [
    ParallelLayout.parse(text)
    for text in (
        "TP1,PP1,DP1",
        "TP2,PP2,DP2",
        "TP1,PP4,DP1",
        "TP1,PP1,DP3",
        "TP4,PP1,DP2",
        "TP2,PP2,DP2,VPP2",
        "TP1,PP2,DP3,STAGES1-3",
        "TP1,PP1,DP4,CP2",
    )
]


def placed(layout: ParallelLayout, nodes: int, *, is_sharded: bool) -> Placement:
    per_node = -(-layout.world_size // nodes)
    names = {rank: f"n{rank // per_node}" for rank in range(layout.world_size)}
    return Placement(layout, names, is_sharded)


def collection(place: Placement) -> TensorCollection:
    """One tensor per layer, cut by TP and, where it is sharded, by the data axes."""
    layout = place.layout
    specs = {str(n): TensorSpec(str(n), (UNITS,), "uint8") for n in range(LAYERS)}
    holdings: dict[int, tuple[Box, ...]] = {}
    for rank in place.nodes:
        at = layout.coordinates(rank)
        shards = layout.dp * layout.cp if place.is_sharded else 1
        shard = at.dp * layout.cp + at.cp if place.is_sharded else 0
        width = UNITS // layout.tp // shards
        low = at.tp * UNITS // layout.tp + shard * width
        holdings[rank] = tuple(
            Box(str(layer), Region((low,), (low + width,)))
            for chunk in range(layout.vpp)
            for layer in layout.layers(LAYERS, at.pp, chunk)
        )
    return TensorCollection(specs, holdings)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("is_sharded", [True, False])
def test_the_quick_count_is_the_lower_bound_of_the_plan(nodes: int, is_sharded: bool) -> None:
    for old, new in itertools.product(LAYOUTS, repeat=2):
        source = placed(old, nodes, is_sharded=is_sharded)
        target = placed(new, nodes, is_sharded=is_sharded)
        if not set(source.nodes.values()) <= set(target.nodes.values()):
            continue  # the plan wants somebody who reads what each node holds
        plan = plan_reshard(
            collection(source), collection(target), Topology(source.nodes, target.nodes)
        )
        arriving = bytes_to_move(StateSizes(layer=UNITS), LAYERS, source, target)
        assert sum(arriving.values()) == pytest.approx(plan.bytes_lower_bound), (old, new)


def test_what_a_lost_node_held_alone_counts_as_travelling() -> None:
    layout = ParallelLayout.parse("TP1,PP2,DP1")
    source = Placement(layout, {0: "a"})
    target = Placement(ParallelLayout(), {0: "a"})
    assert bytes_to_move(StateSizes(layer=10), LAYERS, source, target) == {"a": 20}


def test_embeddings_lie_on_the_first_and_the_last_stage() -> None:
    sizes = StateSizes(layer=0, input=100, output=10)
    two = Placement(ParallelLayout(pp=2), {0: "a", 1: "b"})
    one = Placement(ParallelLayout(), {0: "a"})
    assert bytes_to_move(sizes, LAYERS, two, one) == {"a": 10}
    assert bytes_to_move(sizes, LAYERS, one, two) == {"a": 0, "b": 10}


def test_experts_are_cut_by_the_expert_grid() -> None:
    sizes = StateSizes(layer=0, experts=64)
    spread = Placement(ParallelLayout(dp=4, ep=4), dict(enumerate("aabb")))
    half = Placement(ParallelLayout(dp=2, ep=2), dict(enumerate("ab")))
    assert bytes_to_move(sizes, 1, spread, half) == {"a": 0, "b": 0}
    moved = Placement(ParallelLayout(dp=2, ep=2), dict(enumerate("ba")))
    assert bytes_to_move(sizes, 1, spread, moved) == {"a": 32, "b": 32}
