"""The quick count of bytes is the exact plan's, for states that are cut the way it assumes."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError
from tenplex_megatron.planner.moves import Moves, Placement, Source, StateSizes, bytes_to_move
from tests.unit.planner.clusters import A100

LAYERS, BREADTH = 4, 4
DENSE = (
    *("TP1,PP1,DP1", "TP2,PP2,DP2", "TP1,PP4,DP1", "TP1,PP1,DP3", "TP4,PP1,DP2"),
    *("TP2,PP2,DP2,VPP2", "TP1,PP2,DP3,STAGES1-3", "TP1,PP1,DP4,CP2"),
)
SPARSE = ("TP1,PP1,DP1", "TP1,PP1,DP4,EP4", "TP2,PP2,DP2,EP2", "TP1,PP2,DP4,EP2", "TP1,PP1,DP3")


@dataclass(frozen=True)
class Model:
    """Tensors of so many rows, each of BREADTH columns."""

    layer: int = 840
    expert: int = 0
    num_experts: int = 0
    output: int = 24
    positions: int = 48
    words: int = 120
    is_tied: bool = True

    @property
    def sizes(self) -> StateSizes:
        return StateSizes(
            layer=BREADTH * self.layer,
            experts=BREADTH * self.expert * self.num_experts,
            num_experts=max(self.num_experts, 1),
            input=BREADTH * (self.positions + self.words),
            output=BREADTH * self.output,
            tied=BREADTH * self.words if self.is_tied else 0,
        )

    def tensors(self) -> dict[str, int]:
        found = {"output": self.output, "positions": self.positions, "words": self.words}
        for layer in range(LAYERS):
            found[f"layer{layer}"] = self.layer
            found |= {f"layer{layer}.{e}": self.expert for e in range(self.num_experts)}
        return found

    def chunk(self, layout: ParallelLayout, pp: int, chunk: int, ep: int) -> list[list[str]]:
        """The names in every buffer of a model chunk: dense, experts, tied words."""
        per_rank = self.num_experts // layout.ep
        mine = range(ep * per_rank, (ep + 1) * per_rank)
        virtual = chunk * layout.pp + pp
        is_first, is_last = virtual == 0, virtual == layout.pp * layout.vpp - 1
        dense, experts, words = [], [], []
        if is_last:
            dense.append("output")
        for layer in reversed(layout.layers(LAYERS, pp, chunk)):
            where = dense if layout.ep == 1 else experts
            where += [f"layer{layer}.{e}" for e in reversed(mine)]
            dense.append(f"layer{layer}")
        if is_first:
            dense.append("positions")
        if self.is_tied and is_first != is_last:
            words.append("words")
        elif is_first:
            dense.append("words")
        return [dense, experts, words]


def rows_of_shard(sizes: dict[str, int], names: list[str], part: int, of: int) -> list[range]:
    """What one of equal shards of some tensors, one after the other, holds of each."""
    total = sum(sizes[name] for name in names)
    low, high = part * total // of, (part + 1) * total // of
    ends = list(itertools.accumulate((sizes[name] for name in names), initial=0))
    return [
        range(max(low, start) - start, min(high, stop) - start)
        for start, stop in itertools.pairwise(ends)
    ]


def collection(model: Model, place: Placement) -> TensorCollection:
    layout, sizes = place.layout, model.tensors()
    specs = {name: TensorSpec(name, (rows, BREADTH), "uint8") for name, rows in sizes.items()}
    holdings: dict[int, tuple[Box, ...]] = {}
    width = BREADTH // layout.tp
    for rank in place.nodes:
        at, of_experts = layout.coordinates(rank), layout.expert_coordinates(rank)
        shard, shards = at.dp * layout.cp + at.cp, layout.dp * layout.cp
        boxes: list[Box] = []
        for chunk in range(layout.vpp):
            buffers = model.chunk(layout, at.pp, chunk, of_experts.ep)
            cuts = [(shard, shards), (of_experts.dp, layout.expert_dp), (shard, shards)]
            for names, (part, of) in zip(buffers, cuts, strict=True):
                cut = (part, of) if place.is_sharded else (0, 1)
                for name, rows in zip(names, rows_of_shard(sizes, names, *cut), strict=True):
                    if rows:
                        first, stop = (rows.start, at.tp * width), (rows.stop, (at.tp + 1) * width)
                        boxes.append(Box(name, Region(first, stop)))
        holdings[rank] = tuple(boxes)
    return TensorCollection(specs, holdings)


def placed(text: str, nodes: int, *, is_sharded: bool) -> Placement:
    layout = ParallelLayout.parse(text)
    per_node = -(-layout.world_size // nodes)
    names = {rank: f"n{rank // per_node}" for rank in range(layout.world_size)}
    return Placement(layout, names, is_sharded)


def planned(model: Model, source: Placement, target: Placement) -> ReshardPlan:
    held, wanted = collection(model, source), collection(model, target)
    return plan_reshard(held, wanted, Topology(source.nodes, target.nodes))


def links(plan: ReshardPlan) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for transfer in plan.remote():
        sender = plan.topology.target_nodes[transfer.sender_rank]
        found[sender, plan.topology.target_nodes[transfer.target_rank]] += plan.nbytes(transfer)
    return dict(found)


def by_node(plan: ReshardPlan, moves: Moves) -> list[int]:
    arriving = dict.fromkeys(moves.nodes, 0)
    for rank, nbytes in plan.received_by_rank.items():
        arriving[plan.topology.target_nodes[rank]] += nbytes
    return list(arriving.values())


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (Model(), DENSE),
        (Model(is_tied=False), DENSE),
        (Model(expert=60, num_experts=4, is_tied=False), SPARSE),
    ],
    ids=["tied", "untied", "experts"],
)
def test_the_quick_count_is_that_of_the_exact_plan(
    model: Model, layouts: tuple[str, ...], nodes: int, is_sharded: bool
) -> None:
    for old, new in itertools.product(layouts, repeat=2):
        source = placed(old, nodes, is_sharded=is_sharded)
        target = placed(new, nodes, is_sharded=is_sharded)
        moves = Source(model.sizes, LAYERS, source).moves(target)
        if moves.missing.sum() > 1e-6:
            with pytest.raises(LayoutError, match="no new rank runs on nodes"):
                planned(model, source, target)
            continue
        plan = planned(model, source, target)
        assert moves.moved_bytes == pytest.approx(plan.bytes_lower_bound)
        assert list(moves.arriving) == pytest.approx(by_node(plan, moves), abs=1e-6)
        assert moves.within.sum() == pytest.approx(plan.bytes_total - plan.bytes_moved)
        busiest = max(plan.sent_by_node.values())
        assert float(moves.leaving.max()) == pytest.approx(busiest, rel=0.03, abs=8), (old, new)
        if is_sharded and not model.is_tied:  # nobody has a choice whom to ask
            found = {ends: n for ends, n in moves.between().items() if n > 1e-6}
            assert found == pytest.approx(links(plan))


def test_what_a_lost_node_held_alone_is_missing_and_counts_as_arriving() -> None:
    layout = ParallelLayout.parse("TP1,PP2,DP1")
    source = Placement(layout, {0: "a"})
    moves = Source(StateSizes(layer=10), LAYERS, source).moves(
        Placement(ParallelLayout(), {0: "a"})
    )
    assert (moves.within, moves.missing, moves.arriving) == ([20], [20], [20])
    assert moves.moved_bytes == 0
    assert moves.between() == {}


def test_embeddings_lie_on_the_first_and_the_last_stage() -> None:
    two = Placement(ParallelLayout(pp=2), {0: "a", 1: "b"})
    one = Placement(ParallelLayout(), {0: "a"})
    untied = StateSizes(layer=0, input=100, output=10)
    assert bytes_to_move(untied, LAYERS, two, one) == {"a": 10}
    assert bytes_to_move(untied, LAYERS, one, two) == {"a": 0, "b": 10}
    tied = replace(untied, tied=80)
    assert bytes_to_move(tied, LAYERS, one, two) == {"a": 0, "b": 90}
    swapped = Placement(ParallelLayout(pp=2), {0: "b", 1: "a"})
    assert bytes_to_move(tied, LAYERS, two, swapped) == {"a": 10, "b": 20}


def test_buckets_of_the_first_chunk_are_cut_one_by_one() -> None:
    sizes = StateSizes(layer=12 * 4e7)  # a bucket each
    source = Placement(ParallelLayout(dp=2), {0: "a", 1: "b"})
    target = Placement(ParallelLayout(pp=2), {0: "a", 1: "b"})
    # Megatron's buffers begin with the last layers: each rank holds what the other one needs.
    assert bytes_to_move(sizes, 2, source, target) == {"a": sizes.layer, "b": sizes.layer}
    bucketed = replace(source, is_bucketed=True)
    half = sizes.layer / 2
    assert bytes_to_move(sizes, 2, bucketed, target) == {"a": half, "b": half}


def test_holders_of_the_same_share_what_they_send() -> None:
    source = Placement(ParallelLayout(dp=2), {0: "a", 1: "b"}, is_sharded=False)
    target = Placement(ParallelLayout(dp=3), {0: "a", 1: "b", 2: "c"}, is_sharded=False)
    moves = Source(StateSizes(layer=10), LAYERS, source).moves(target)
    assert moves.between() == {("a", "c"): 20, ("b", "c"): 20}
    assert moves.ranks == (1, 1, 1)


def test_the_slowest_link_is_the_one_with_most_seconds_for_its_ranks() -> None:
    source = Placement(ParallelLayout(), {0: "a"}, is_sharded=False)
    sizes = StateSizes(layer=10e9)
    names = {0: "a", 1: "b", 2: "b"}
    moves = Source(sizes, 1, source).moves(Placement(ParallelLayout(dp=3), names, is_sharded=False))
    rate = A100.network_bandwidth * A100.network_efficiency
    wait = moves.slowest(A100)
    assert (wait.node, wait.direction) == ("a", "leaving")
    assert wait.seconds == pytest.approx(20e9 / rate)
    fast = replace(A100, network_bandwidth=1e15)
    wait = moves.slowest(fast)
    assert (wait.node, wait.direction) == ("a", "within")
    inside = A100.node_bandwidth * A100.node_efficiency
    assert wait.seconds == pytest.approx(10e9 / inside)


def test_a_thousand_devices_are_counted_at_once() -> None:
    sizes = StateSizes(layer=1e9, input=1e9)
    source = placed("TP8,PP8,DP16", 128, is_sharded=True)
    target = placed("TP4,PP12,DP20", 120, is_sharded=True)
    prepared = Source(sizes, 96, source)
    best = min(_timed(prepared, target) for _ in range(3))
    assert best < 0.1


def _timed(source: Source, target: Placement) -> float:
    started = time.process_time()
    source.moves(target)
    return time.process_time() - started
