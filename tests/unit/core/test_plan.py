"""The rules of a plan, each on the smallest example that shows it."""

import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.plan import ReshardPlan, Topology, Transfer, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import split_even
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

WEIGHT = TensorSpec("weight", (240, 10), "float32")
WHOLE = Box("weight", WEIGHT.region)


def rows(start: int, stop: int) -> Box:
    return Box("weight", Region((start, 0), (stop, 10)))


def holding(*boxes: tuple[int, Box], specs: tuple[TensorSpec, ...] = (WEIGHT,)) -> TensorCollection:
    return TensorCollection.build(specs, boxes)


def plan(
    source: TensorCollection, target: TensorCollection, old: dict[int, str], new: dict[int, str]
) -> ReshardPlan:
    return plan_reshard(source, target, Topology(old, new))


def test_a_local_replica_is_preferred_to_the_first_rank() -> None:
    source = holding((0, WHOLE), (1, WHOLE))
    made = plan(source, holding((0, WHOLE)), {0: "far", 1: "near"}, {0: "near"})
    assert made.transfers == (Transfer(0, "weight", WHOLE.region, 1, 0),)
    assert made.bytes_moved == 0


def test_a_part_held_by_the_node_is_local_and_only_the_rest_moves() -> None:
    source = holding((0, WHOLE), (1, rows(100, 140)))
    made = plan(source, holding((0, WHOLE), (1, rows(0, 1))), *[{0: "b", 1: "a"}, {0: "a", 1: "b"}])
    assert made.bytes_moved == made.bytes_lower_bound == 200 * 10 * 4
    local = [one.region for one in made.local_for(0)]
    assert local == [rows(100, 140).region]
    assert {one.source_rank for one in made.receives_for(0)} == {0}
    assert {one.sender_rank for one in made.receives_for(0)} == {1}


def test_replica_nodes_share_the_sending_of_one_tensor_in_straight_cuts() -> None:
    source = holding((0, WHOLE), (1, WHOLE), (2, WHOLE))
    nodes = {0: "a", 1: "b", 2: "c"}
    made = plan(
        source,
        holding((0, rows(0, 1)), (1, rows(0, 1)), (2, rows(0, 1)), (3, WHOLE)),
        nodes,
        {**nodes, 3: "d"},
    )
    assert made.sent_by_node == {"a": 3200, "b": 3200, "c": 3200, "d": 0}
    assert [one.region for one in made.receives_for(3)] == list(split_even(WHOLE.region, 0, 3))


def test_a_node_that_must_send_alone_is_spared_the_shared_work() -> None:
    source = holding((0, rows(0, 120)), (1, rows(120, 240)), (0, rows(120, 240)))
    made = plan(
        source,
        holding((0, rows(0, 1)), (1, rows(120, 121)), (2, WHOLE)),
        {0: "a", 1: "b"},
        {0: "a", 1: "b", 2: "c"},
    )
    assert made.sent_by_node == {"a": 4800, "b": 4800, "c": 0}


def test_the_new_ranks_of_a_node_share_its_sending() -> None:
    parts = split_even(WHOLE.region, 0, 8)
    source = holding((0, WHOLE))
    target = holding(
        *[(rank, Box("weight", part)) for rank, part in enumerate(parts)],
    )
    old, new = {0: "a"}, {rank: "ab"[rank >= 4] for rank in range(8)}
    made = plan(source, target, old, new)
    assert made.sent_by_rank == {**dict.fromkeys(range(4), 1200), **dict.fromkeys(range(4, 8), 0)}
    assert made.received_by_rank == {
        **dict.fromkeys(range(4), 0),
        **dict.fromkeys(range(4, 8), 1200),
    }
    assert sum(len(made.sends_for(rank)) for rank in range(4)) == 4


def test_bytes_are_counted_per_rank_even_when_two_ranks_want_the_same() -> None:
    made = plan(
        holding((0, WHOLE)),
        holding((0, rows(0, 1)), (1, WHOLE), (2, WHOLE)),
        {0: "a"},
        {0: "a", 1: "b", 2: "b"},
    )
    assert made.bytes_moved == made.bytes_lower_bound == 2 * WEIGHT.nbytes
    assert made.bytes_total == 2 * WEIGHT.nbytes + 40


def test_elements_wanted_in_two_boxes_of_one_rank_come_once() -> None:
    made = plan(
        holding((0, WHOLE)),
        holding((0, rows(0, 100)), (0, rows(50, 240)), (0, rows(50, 240))),
        {0: "a"},
        {0: "a"},
    )
    assert [one.region for one in made.transfers] == [
        rows(0, 50).region,
        rows(50, 100).region,
        rows(100, 240).region,
    ]


def test_scalars_and_empty_boxes_are_planned() -> None:
    step = TensorSpec("step", (), "int64")
    count = Box("step", Region((), ()))
    specs = (WEIGHT, step)
    made = plan(
        holding((0, count), (0, WHOLE), specs=specs),
        holding((0, count), (0, rows(3, 3)), specs=specs),
        {0: "a"},
        {0: "a"},
    )
    assert made.transfers == (Transfer(0, "step", Region((), ()), 0, 0),)


def test_tensors_that_no_target_asks_for_are_named() -> None:
    other = TensorSpec("other", (2,), "int64")
    source = holding((0, WHOLE), (0, Box("other", other.region)), specs=(WEIGHT, other))
    assert plan(source, holding((0, WHOLE)), {0: "a"}, {0: "a"}).unused == ("other",)


def test_rows_of_padding_that_the_source_lacks_are_created() -> None:
    narrow, wide = (TensorSpec("weight", (size, 4), "float32", padded=True) for size in (6, 8))
    old = holding((0, Box("weight", narrow.region)), specs=(narrow,))
    new = holding(
        *[(rank, Box("weight", half)) for rank, half in enumerate(split_even(wide.region, 0, 2))],
        specs=(wide,),
    )
    made = plan(old, new, {0: "a"}, {0: "a", 1: "a"})
    assert made.created == ((1, Box("weight", Region((6, 0), (8, 4)))),)
    assert made.created_for(1) == (Box("weight", Region((6, 0), (8, 4))),)
    assert made.created_for(0) == ()
    assert made.bytes_total == narrow.nbytes
    back = plan(new, old, {0: "a", 1: "a"}, {0: "a"})
    assert not back.created
    assert back.bytes_total == narrow.nbytes


def test_a_box_without_a_surviving_holder_is_named_with_who_wants_it() -> None:
    with pytest.raises(LayoutError, match=r"no surviving rank holds weight\[120:240, 0:10\] \(wan"):
        plan(holding((0, rows(0, 120))), holding((0, WHOLE)), {0: "a"}, {0: "a"})


def test_many_lost_boxes_are_counted_not_listed() -> None:
    specs = tuple(TensorSpec(f"t{index}", (2,), "int8") for index in range(9))
    target = holding(*[(0, Box(spec.name, spec.region)) for spec in specs], specs=specs)
    with pytest.raises(LayoutError, match="and 4 more"):
        plan(TensorCollection.build(specs, []), target, {}, {0: "a"})


def test_a_holder_on_a_node_without_new_ranks_cannot_send_and_the_error_says_so() -> None:
    source = holding((0, rows(0, 120)), (1, rows(120, 240)))
    with pytest.raises(LayoutError, match=r"no new rank runs on nodes \['b'\]"):
        plan(source, holding((0, WHOLE)), {0: "a", 1: "b"}, {0: "a"})


def test_a_node_without_new_ranks_is_not_needed_when_another_holds_the_same() -> None:
    source = holding((0, WHOLE), (1, WHOLE))
    made = plan(source, holding((5, rows(0, 1)), (6, WHOLE)), {0: "a", 1: "b"}, {5: "b", 6: "c"})
    assert {one.source_rank for one in made.transfers} == {1}
    assert made.sent_by_node == {"b": WEIGHT.nbytes, "c": 0}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("weight", (240, 10), "bfloat16"), "source has float32, the target bfloat16"),
        (TensorSpec("weight", (240, 12), "float32"), "source has shape"),
        (TensorSpec("weight", (256, 10), "float32", padded=True), "source has shape"),
        (TensorSpec("bias", (240, 10), "float32"), "bias: .* the source has no such tensor"),
    ],
)
def test_contradicting_tensors_are_refused(spec: TensorSpec, message: str) -> None:
    target = holding((0, Box(spec.name, spec.region)), specs=(spec,))
    with pytest.raises(LayoutError, match=message):
        plan(holding((0, WHOLE)), target, {0: "a"}, {0: "a"})


def test_padding_only_excuses_rows() -> None:
    old, new = (TensorSpec("weight", (6, size), "float32", padded=True) for size in (4, 5))
    source = holding((0, Box("weight", old.region)), specs=(old,))
    target = holding((0, Box("weight", new.region)), specs=(new,))
    with pytest.raises(LayoutError, match="source has shape"):
        plan(source, target, {0: "a"}, {0: "a"})


def test_every_rank_needs_a_node() -> None:
    one = holding((3, WHOLE))
    with pytest.raises(LayoutError, match=r"source ranks \[3\] have no node"):
        plan(one, one, {0: "a"}, {3: "a"})
    with pytest.raises(LayoutError, match=r"target ranks \[3\] have no node"):
        plan(one, one, {3: "a"}, {0: "a"})


def test_pieces_too_coarse_for_even_rows_are_cut_inside_a_row() -> None:
    row = TensorSpec("row", (1, 900), "float32")
    whole = Box("row", row.region)
    nodes = {0: "a", 1: "b", 2: "c"}
    source = holding(*[(rank, whole) for rank in nodes], specs=(row,))
    target = holding(*[(rank, Box("row", Region((0, 0), (1, 1)))) for rank in nodes], (3, whole),
                     specs=(row,))  # fmt: skip
    made = plan(source, target, nodes, {**nodes, 3: "d"})
    assert made.sent_by_node == {"a": 1200, "b": 1200, "c": 1200, "d": 0}


def test_rows_too_coarse_for_a_fair_share_are_not_rounded_to() -> None:
    coarse = TensorSpec("coarse", (5, 120), "float32")
    whole, one = Box("coarse", coarse.region), Box("coarse", Region((0, 0), (1, 1)))
    nodes = {0: "a", 1: "b", 2: "c"}
    source = holding(*[(rank, whole) for rank in nodes], specs=(coarse,))
    target = holding(*[(rank, one) for rank in nodes], (3, whole), specs=(coarse,))
    made = plan(source, target, nodes, {**nodes, 3: "d"})
    assert max(made.sent_by_node.values()) <= 1.1 * coarse.nbytes / 3
