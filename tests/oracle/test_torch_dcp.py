"""torch's distributed checkpoint cuts the same pieces as a plan on one node.

The oracle is `create_read_items_for_chunk_list` of torch 2.14.1.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.plan import plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import flat_range, split_even
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.testing.generate import ModelShape, megatron_collection, topology_of

ORACLE = "2.14.1"

type Piece = tuple[Region, Region, Region]
"""The source box, the target box, and what they share."""


def chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(region.start), torch.Size(region.shape))


def dcp_pieces(shape: tuple[int, ...], held: list[Region], wanted: list[Region]) -> set[Piece]:
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(shape), list(map(chunk, held)))
    pieces: set[Piece] = set()
    for item in create_read_items_for_chunk_list("tensor", stored, list(map(chunk, wanted))):
        assert item.storage_index.index is not None
        assert item.dest_index.index is not None
        source, target = held[item.storage_index.index], wanted[item.dest_index.index]
        lengths = Region.full(item.lengths)
        inside = lengths.translate(tuple(item.storage_offsets)).translate(source.start)
        assert inside == lengths.translate(tuple(item.dest_offsets)).translate(target.start)
        pieces.add((source, target, inside))
    return pieces


def plan_pieces(spec: TensorSpec, held: list[Region], wanted: list[Region]) -> set[Piece]:
    """The same from a plan in which every box has its own rank."""
    source, target = (
        TensorCollection.build(
            [spec], [(rank, Box(spec.name, box)) for rank, box in enumerate(boxes)]
        )
        for boxes in (held, wanted)
    )
    plan = plan_reshard(source, target, topology_of(len(held), len(wanted), 1))
    return {(held[one.source_rank], wanted[one.target_rank], one.region) for one in plan.transfers}


def ranges(shape: tuple[int, ...], places: set[int]) -> list[Region]:
    """Boxes of consecutive flat ranges of a tensor, as a distributed optimizer owns them."""
    whole = Region.full(shape)
    edges = [0, *sorted(places), whole.numel]
    return [
        box for start, stop in itertools.pairwise(edges) for box in flat_range(whole, start, stop)
    ]


def test_the_oracle_is_the_version_that_was_read() -> None:
    assert torch.__version__.split("+")[0] == ORACLE


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.sets(st.integers(1, 124), max_size=4),
    st.sets(st.integers(1, 124), max_size=4),
)
def test_flat_ranges_are_cut_into_the_same_pieces(
    shape: tuple[int, ...], old: set[int], new: set[int]
) -> None:
    spec = TensorSpec("tensor", shape, "float32")
    held, wanted = (
        ranges(shape, {place for place in places if place < spec.numel}) for places in (old, new)
    )
    assert plan_pieces(spec, held, wanted) == dcp_pieces(shape, held, wanted)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("old", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 6])
def test_tensor_parallel_cuts_give_the_same_pieces(dim: int, old: int, new: int) -> None:
    spec = TensorSpec("tensor", (12, 12), "float32")
    held = list(split_even(spec.region, 0, old))
    wanted = list(split_even(spec.region, dim, new))
    assert plan_pieces(spec, held, wanted) == dcp_pieces(spec.shape, held, wanted)


def test_a_scalar_is_one_piece() -> None:
    spec, scalar = TensorSpec("step", (), "int64"), [Region((), ())]
    assert plan_pieces(spec, scalar, scalar) == dcp_pieces((), scalar, scalar)


@pytest.mark.parametrize("old", ["TP2,PP2,DP2", "DP4", "TP2,DP3"])
@pytest.mark.parametrize("new", ["TP1,PP2", "TP4,DP2", "PP2,DP2,VPP2"])
def test_optimizer_tensors_of_a_model_give_the_same_pieces(old: str, new: str) -> None:
    model = ModelShape(groups=8, weights=False, states=("master",), tied=False)
    source, target = (megatron_collection(model, ParallelLayout.parse(text)) for text in (old, new))
    for name, spec in source.tensors.items():
        held, wanted = list(source.slice(name)), list(target.slice(name))
        assert plan_pieces(spec, held, wanted) == dcp_pieces(spec.shape, held, wanted), name
