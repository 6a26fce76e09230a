"""Plans are carried out on threads: every byte arrives, once, and is counted."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenplex_megatron.core import coalesce
from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError, TransportError
from tenplex_megatron.execution.executor import Movement, Target, execute_plan
from tenplex_megatron.testing.fakes import MemoryReader, blank_targets, first_wrong
from tenplex_megatron.testing.generate import ModelShape, megatron_collection, nodes_of
from tenplex_megatron.transport.loopback import LoopbackTransport

MODEL = ModelShape(num_layers=4)
LAYOUTS = ("TP1", "TP2", "PP2", "DP2", "TP2,PP2", "TP2,DP2", "PP2,VPP2", "DP3", "TP2,PP2,DP2")
SCATTERED = 1 << 40


def run(
    source: TensorCollection, target: TensorCollection, topology: Topology
) -> tuple[ReshardPlan, list[Movement]]:
    """Every new rank on a thread; the targets are checked byte for byte."""
    plan = plan_reshard(source, target, topology)

    def live(transport: LoopbackTransport, rank: int) -> tuple[Movement, str | None]:
        node = topology.target_nodes[rank]
        held = [old for old in source.ranks if topology.source_nodes[old] == node]
        reader = MemoryReader(source, held) if held else None
        targets = blank_targets(target, rank)
        moved = execute_plan(
            plan, rank, reader=reader, targets=targets, transport=transport, timeout_s=20
        )
        return moved, first_wrong(target, targets, plan.created_for(rank))

    ranks = list(topology.target_nodes)
    with ThreadPoolExecutor(len(ranks)) as pool:
        rows = list(pool.map(live, LoopbackTransport.world(len(ranks)), ranks))
    assert [wrong for _, wrong in rows if wrong] == []
    return plan, [moved for moved, _ in rows]


def assert_counted(plan: ReshardPlan, movements: Sequence[Movement]) -> None:
    assert sum(moved.sent_bytes for moved in movements) == plan.bytes_moved
    assert sum(moved.received_bytes for moved in movements) == plan.bytes_moved
    assert plan.bytes_moved == plan.bytes_lower_bound
    local = sum(moved.local_bytes for moved in movements)
    assert local + plan.bytes_moved == plan.bytes_total
    assert [moved.sent_bytes for moved in movements] == list(plan.sent_by_rank.values())
    assert [moved.received_bytes for moved in movements] == list(plan.received_by_rank.values())


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LAYOUTS, repeat=2)))
def test_every_target_is_filled_once_and_every_byte_is_counted(old: str, new: str) -> None:
    before, after = map(ParallelLayout.parse, (old, new))
    source, target = megatron_collection(MODEL, before), megatron_collection(MODEL, after)
    num_nodes = min(2, before.world_size, after.world_size)
    nodes = nodes_of(before.world_size, num_nodes), nodes_of(after.world_size, num_nodes)
    assert_counted(*run(source, target, Topology(*nodes)))


@pytest.mark.parametrize("budget", [8, 24, 1000])
@pytest.mark.parametrize("alone", [0, 64, SCATTERED])
def test_small_messages_carry_the_same_bytes(
    budget: int, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalesce, "SMALLEST_MESSAGE_BYTES", budget)
    monkeypatch.setattr(coalesce, "MESSAGE_BYTES", budget)
    monkeypatch.setattr(coalesce, "ALONE_BYTES", alone)
    model = ModelShape(num_layers=2, hidden=4, heads=4, groups=2, ffn=4)
    layouts = map(ParallelLayout.parse, ("TP2,PP2", "TP1,PP1,DP4"))
    source, target = (megatron_collection(model, layout) for layout in layouts)
    assert_counted(*run(source, target, Topology(nodes_of(4, 4), nodes_of(4, 4))))


@pytest.mark.parametrize("alone", [0, SCATTERED])
@pytest.mark.parametrize("far", [False, True])
def test_every_box_that_holds_an_element_is_filled(
    far: bool, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may hold overlapping boxes; the plan names their shared elements once."""
    monkeypatch.setattr(coalesce, "ALONE_BYTES", alone)
    spec = TensorSpec("weight", (6, 5), "float32")
    boxes = [Region((0, 0), (4, 5)), Region((2, 0), (6, 5)), Region((1, 1), (3, 4))]
    source = TensorCollection.build([spec], [(0, Box("weight", spec.region))])
    target = TensorCollection.build(
        [spec], [(1, Box("weight", box)) for box in boxes] + [(0, Box("weight", spec.region))]
    )
    nodes = {0: "a", 1: "b" if far else "a"}
    plan, movements = run(source, target, Topology({0: "a"}, nodes))
    assert_counted(plan, movements)
    assert movements[1].received_bytes == (spec.nbytes if far else 0)


dtypes = st.sampled_from(["uint8", "bfloat16", "float32", "int64", "float16", "bool"])
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8), st.sampled_from([0, 16, 1000]))
@settings(max_examples=40)
def test_tensors_of_all_types_share_messages(
    tensors: list[tuple[tuple[int, ...], str]], alone: int
) -> None:
    specs = [TensorSpec(f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(tensors)]
    source = TensorCollection.build(specs, [(0, Box(spec.name, spec.region)) for spec in specs])
    held: dict[int, list[Box]] = {0: [], 1: [], 2: []}
    for spec in specs:
        for rank, region in enumerate(_halves(spec.region)):
            held[rank].append(Box(spec.name, region))
            held[2].append(Box(spec.name, region))
    target = TensorCollection(
        {spec.name: spec for spec in specs}, {rank: tuple(boxes) for rank, boxes in held.items()}
    )
    nodes = {rank: f"node{rank}" for rank in range(3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coalesce, "ALONE_BYTES", alone)
        assert_counted(*run(source, target, Topology({0: "node0"}, nodes)))


def _halves(region: Region) -> list[Region]:
    """A region cut in two along its last dim, so that rows of the halves are scattered."""
    if not region.ndim or region.shape[-1] < 2:
        return [region]
    middle = region.shape[-1] // 2
    return [
        Region(region.start, (*region.stop[:-1], middle)),
        Region((*region.start[:-1], middle), region.stop),
    ]


def alone(
    plan: ReshardPlan, source: TensorCollection | None, targets: Sequence[Target], rank: int = 0
) -> None:
    reader = None if source is None else MemoryReader(source, source.ranks)
    transport = LoopbackTransport.world(1)[0]
    execute_plan(plan, rank, reader=reader, targets=targets, transport=transport, timeout_s=5)


@pytest.fixture
def world() -> tuple[ReshardPlan, TensorCollection]:
    specs = [TensorSpec(name, (4, 4), "float32") for name in ("first", "second")]
    held = TensorCollection.build(specs, [(0, Box(spec.name, spec.region)) for spec in specs])
    return plan_reshard(held, held, Topology({0: "a"}, {0: "a"})), held


def break_source(plan: ReshardPlan, held: TensorCollection, targets: list[Target]) -> None:
    less = TensorCollection(held.tensors, {0: held.partition(0)[:1]})
    alone(plan, less, targets)


def break_region(plan: ReshardPlan, held: TensorCollection, targets: list[Target]) -> None:
    rows = Region((0, 0), (2, 4))
    less = TensorCollection(held.tensors, {0: (held.partition(0)[0], Box("second", rows))})
    alone(plan, less, targets)


def break_target(plan: ReshardPlan, held: TensorCollection, targets: list[Target]) -> None:
    alone(plan, held, targets[:1])


def break_node(plan: ReshardPlan, held: TensorCollection, targets: list[Target]) -> None:
    alone(plan, None, targets)


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (break_source, r"second: old rank 0 holds no box with \[0:4, 0:4\] on this node"),
        (break_region, r"second: old rank 0 holds no box with \[0:4, 0:4\] on this node"),
        (break_target, r"second: the plan fills \[0:4, 0:4\], which rank 0 does not hold"),
        (break_node, r"first: the plan reads \[0:4, 0:4\] of old rank 0 on this node, which"),
    ],
)
def test_what_is_lacking_is_named_before_anything_is_written(
    world: tuple[ReshardPlan, TensorCollection],
    breaks: Callable[[ReshardPlan, TensorCollection, list[Target]], None],
    says: str,
) -> None:
    plan, held = world
    targets = blank_targets(held, 0)
    untouched = [target.flat.view(torch.uint8).clone() for target in targets]
    with pytest.raises(LayoutError, match=says):
        breaks(plan, held, targets)
    for target, before in zip(targets, untouched, strict=True):
        assert torch.equal(target.flat.view(torch.uint8), before)


def test_a_box_of_another_number_of_dims_holds_nothing(
    world: tuple[ReshardPlan, TensorCollection],
) -> None:
    plan, held = world
    wrong = replace(plan.transfers[0], region=Region((0,), (4,)))
    with pytest.raises(LayoutError, match="first"):
        alone(replace(plan, transfers=(wrong,)), held, blank_targets(held, 0))


def test_a_peer_that_leaves_is_an_error() -> None:
    spec = TensorSpec("weight", (4, 4), "float32")
    whole = Box("weight", spec.region)
    source = TensorCollection.build([spec], [(0, whole)])
    target = TensorCollection.build([spec], [(1, whole)])
    plan = plan_reshard(source, target, Topology({0: "a"}, {0: "a", 1: "b"}))
    sender, receiver = LoopbackTransport.world(2)
    sender.leave()
    with pytest.raises(TransportError, match="rank 0 is gone"):
        execute_plan(
            plan,
            1,
            reader=None,
            targets=blank_targets(target, 1),
            transport=receiver,
            timeout_s=5,
        )
