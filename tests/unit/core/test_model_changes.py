"""Kinds of faults that layout changes are known for, each with the right values as the law."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology, plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import replicate, split_blocks, split_even, split_groups
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.testing.generate import (
    Arrays,
    ModelShape,
    fill,
    local_tensors,
    megatron_collection,
    numbered,
    run_plan,
    topology_of,
)

type Array = npt.NDArray[np.int64]
type Parts = tuple[tuple[Region, ...], ...]


def change(model: ModelShape, old: str, new: str) -> tuple[ReshardPlan, TensorCollection, Arrays]:
    """A plan between two layouts of a model on one node, and the arrays it leaves."""
    before, after = map(ParallelLayout.parse, (old, new))
    source, target = megatron_collection(model, before), megatron_collection(model, after)
    plan = plan_reshard(source, target, topology_of(before.world_size, after.world_size, 1))
    return plan, target, run_plan(plan, fill(source), target)


def stored(filled: Arrays, rank: int, tensor: str, boxes: tuple[Region, ...], dim: int) -> Array:
    """The tensor as a rank stores it: its boxes one after the other along `dim`."""
    return np.concatenate([filled[rank, Box(tensor, box)] for box in boxes], axis=dim)


def reshard(spec: TensorSpec, old: Parts, new: Parts) -> Arrays:
    """One tensor, from the boxes of old ranks to those of new ranks."""
    source, target = (
        TensorCollection.build(
            [spec],
            [(rank, Box(spec.name, box)) for rank, boxes in enumerate(parts) for box in boxes],
        )
        for parts in (old, new)
    )
    plan = plan_reshard(source, target, topology_of(len(old), len(new), 1))
    return run_plan(plan, fill(source), target)


def whole_parts(parts: tuple[Region, ...]) -> Parts:
    return tuple((part,) for part in parts)


@pytest.mark.parametrize(
    ("old", "new"),
    list(
        itertools.permutations(
            ["PP1", "PP2", "PP4", "PP2,VPP2", "PP2,STAGES1-3", "PP4,STAGES0-1-2-1"], 2
        )
    ),
)
def test_a_stage_gets_the_layers_of_its_global_numbers(old: str, new: str) -> None:
    model = ModelShape(states=())
    _, target, filled = change(model, old, new)
    layout = ParallelLayout.parse(new)
    layers = numbered(target.tensors["layers.proj"])
    for rank in target.ranks:
        expected = [
            layer
            for chunk in range(layout.vpp)
            for layer in layout.layers(model.num_layers, layout.coordinates(rank).pp, chunk)
        ]
        boxes = [box for box in target.partition(rank) if box.tensor == "layers.proj"]
        assert [box.region.start[0] for box in boxes] == sorted(expected)
        for box in boxes:
            layer = box.region.start[0]
            np.testing.assert_array_equal(filled[rank, box], layers[layer : layer + 1])


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_fused_gate_and_up_are_split_before_they_are_sharded(
    unit: int, hidden: int, old: int, new: int
) -> None:
    ffn = 4 * unit
    spec = TensorSpec("fc1", (2 * ffn, hidden), "float32")
    cut = [split_blocks(spec.region, 0, (ffn, ffn), parts) for parts in (old, new)]
    filled = reshard(spec, cut[0], cut[1])
    gate, up = np.split(numbered(spec), 2)
    for rank in range(new):
        expected = np.concatenate([np.split(gate, new)[rank], np.split(up, new)[rank]])
        np.testing.assert_array_equal(stored(filled, rank, "fc1", cut[1][rank], 0), expected)


@given(
    groups=st.sampled_from([1, 2, 4, 8]),
    queries=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.integers(1, 2),
    old=st.sampled_from([1, 2, 4, 8]),
    new=st.sampled_from([1, 2, 4, 8]),
)
def test_fused_query_key_value_rows_keep_their_heads(
    groups: int, queries: int, head_dim: int, old: int, new: int
) -> None:
    """Also with fewer groups than tensor-parallel ranks, which then replicate keys and values."""
    for parts in (old, new):
        assume(parts <= groups or queries % (parts // groups) == 0)
    blocks = (queries * head_dim, head_dim, head_dim)
    spec = TensorSpec("qkv", (groups * sum(blocks), 3), "float32")
    cut = [
        split_groups(spec.region, 0, groups=groups, blocks=blocks, parts=parts)
        for parts in (old, new)
    ]
    filled = reshard(spec, cut[0], cut[1])
    runs = np.split(numbered(spec), groups)
    for rank in range(new):
        if new <= groups:
            share = groups // new
            expected = np.concatenate(runs[rank * share : (rank + 1) * share])
        else:
            sharers = new // groups
            query, key_value = np.split(runs[rank // sharers], [blocks[0]])
            expected = np.concatenate([np.split(query, sharers)[rank % sharers], key_value])
        np.testing.assert_array_equal(stored(filled, rank, "qkv", cut[1][rank], 0), expected)


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 12))
def test_raw_rows_of_a_fused_tensor_land_whatever_the_heads(rows: int, old: int, new: int) -> None:
    """Megatron may cut the fused rows evenly, through the middle of a group or a head."""
    spec = TensorSpec("qkv", (rows * old * new, 2), "float32")
    cut = split_even(spec.region, 0, new)
    filled = reshard(spec, whole_parts(split_even(spec.region, 0, old)), whole_parts(cut))
    for rank, expected in enumerate(np.split(numbered(spec), new)):
        np.testing.assert_array_equal(filled[rank, Box("qkv", cut[rank])], expected)


@pytest.mark.parametrize("new", ["EP1", "DP4,EP4", "DP2,EP1", "TP2,DP4,EP2", "PP2,DP2,EP2"])
def test_every_expert_is_filled_with_its_global_number(new: str) -> None:
    model = ModelShape(num_layers=2, experts=4, parts=("mlp",))
    _, target, filled = change(model, "DP4,EP2", new)
    layout = ParallelLayout.parse(new)
    for rank in target.ranks:
        ep = layout.expert_coordinates(rank).ep
        mine = range(ep * 4 // layout.ep, (ep + 1) * 4 // layout.ep)
        boxes = [box for box in target.partition(rank) if box.tensor == "layers.experts.fc2"]
        assert {box.region.start[1] for box in boxes} == set(mine)
        for box in boxes:
            full = numbered(target.tensors[box.tensor])
            np.testing.assert_array_equal(filled[rank, box], full[box.region.slices()])
    for name in ("master", "exp_avg"):
        assert target.slice(f"{name}.layers.experts.fc1")


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations([1, 2, 4, 8], 2)))
def test_replicated_norms_keep_their_shape_when_tensor_parallelism_changes(
    old: int, new: int
) -> None:
    spec = TensorSpec("norm", (6,), "float32")
    parts = [whole_parts(replicate(spec.region, size)) for size in (old, new)]
    filled = reshard(spec, parts[0], parts[1])
    assert len(filled) == new
    for array in filled.values():
        np.testing.assert_array_equal(array, numbered(spec))


@pytest.mark.parametrize(("old", "new"), [("TP1", "TP4"), ("TP1", "TP2,DP2"), ("TP2", "TP4")])
def test_a_wider_padded_vocabulary_keeps_its_rows_and_reports_the_new_ones(
    old: str, new: str
) -> None:
    model = ModelShape(vocab=101, divisible_by=8, pad_by_tp=True, parts=())
    plan, target, filled = change(model, old, new)
    old_rows = {"TP1": 104, "TP2": 112}[old]
    new_rows = {"TP4": 128, "TP2,DP2": 112}[new]
    for name in ("embedding", "master.embedding", "exp_avg.embedding", "exp_avg_sq.embedding"):
        assert target.tensors[name].shape == (new_rows, model.hidden)
        rows = np.full((new_rows, model.hidden), -1)
        for (_, box), array in filled.items():
            if box.tensor == name:
                rows[box.region.slices()] = array
        full = numbered(target.tensors[name])
        np.testing.assert_array_equal(rows[:old_rows], full[:old_rows])
        assert (rows[old_rows:] == 0).all()
        made = {
            index
            for _, box in plan.created
            if box.tensor == name
            for index in range(box.region.start[0], box.region.stop[0])
        }
        assert made == set(range(old_rows, new_rows))


def test_a_narrower_padded_vocabulary_keeps_every_logical_row() -> None:
    model = ModelShape(vocab=101, divisible_by=8, pad_by_tp=True, parts=(), states=("master",))
    plan, target, filled = change(model, "TP4", "TP1")
    assert not plan.created
    full = numbered(target.tensors["embedding"])
    np.testing.assert_array_equal(filled[0, Box("embedding", Region.full(full.shape))], full)


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(["PP1", "PP2", "PP4"], 2)))
def test_tied_embeddings_are_one_tensor_with_a_holder_at_both_ends(old: str, new: str) -> None:
    _, target, filled = change(ModelShape(), old, new)
    ends = sorted({0, ParallelLayout.parse(new).pp - 1})
    for name in ("embedding", "master.embedding", "exp_avg.embedding"):
        whole = Box(name, target.tensors[name].region)
        assert target.allocate(whole) == tuple(ends)
        for rank in ends:
            np.testing.assert_array_equal(filled[rank, whole], numbered(target.tensors[name]))
    assert "output" not in target.tensors


def test_untied_embeddings_stay_two_tensors() -> None:
    _, target, filled = change(ModelShape(tied=False), "PP2", "PP1")
    for name in ("embedding", "output"):
        whole = Box(name, target.tensors[name].region)
        np.testing.assert_array_equal(filled[0, whole], numbered(target.tensors[name]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_shards_merge_by_their_offset_not_by_the_order_of_their_holders(
    order: tuple[int, ...],
) -> None:
    spec = TensorSpec("weight", (8, 3), "float32")
    parts = split_even(spec.region, 0, 4)
    old = tuple((parts[index],) for index in order)
    filled = reshard(spec, old, ((spec.region,),))
    np.testing.assert_array_equal(filled[0, Box("weight", spec.region)], numbered(spec))


@pytest.mark.parametrize("home", [0, 1, 2])
def test_a_replica_on_the_same_node_is_used_before_that_of_the_first_rank(home: int) -> None:
    layout = ParallelLayout(tp=2, dp=3)
    model = ModelShape(distributed_optimizer=False)
    source = megatron_collection(model, layout)
    target = megatron_collection(model, ParallelLayout(tp=2))
    nodes = {rank: f"node{layout.coordinates(rank).dp}" for rank in source.ranks}
    plan = plan_reshard(source, target, Topology(nodes, dict.fromkeys((0, 1), f"node{home}")))
    assert plan.bytes_moved == 0
    assert {one.source_rank for one in plan.transfers} == {2 * home, 2 * home + 1}


@pytest.mark.parametrize("text", ["TP2,PP2,DP2", "TP8", "PP2,VPP2", "DP4,EP2"])
def test_a_distributed_optimizer_owns_every_element_of_its_group_once(text: str) -> None:
    layout = ParallelLayout.parse(text)
    model = ModelShape(states=("master",), experts=4 if layout.ep > 1 else 0)
    held = megatron_collection(model, layout)
    for group in layout.groups("dp", "cp"):
        owned: dict[str, Array] = {}
        for rank in group:
            for box in held.partition(rank):
                if box.tensor.startswith("master."):
                    shape = held.tensors[box.tensor].shape
                    count = owned.setdefault(box.tensor, np.zeros(shape, dtype=np.int64))
                    count[box.region.slices()] += 1
        stored_once = {tensor.spec.name for tensor in local_tensors(model, layout, group[0])}
        assert {name.removeprefix("master.") for name in owned} >= stored_once
        assert all(count.max() == 1 for count in owned.values())
