"""The plan gives what concatenating all shards and slicing again gives, with numpy alone."""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.plan import plan_reshard
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.testing.generate import fill, numbered, run_plan, topology_of


@dataclass(frozen=True)
class Grid:
    """A tensor cut at some places along each dim, its cells dealt to ranks."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def bounds(self, dim: int) -> list[tuple[int, int]]:
        edges = [0, *self.cuts[dim], self.shape[dim]]
        return list(itertools.pairwise(edges))

    def cells(self) -> list[Region]:
        cells = [Region((), ())]
        for dim in range(len(self.shape)):
            cells = [
                Region((*cell.start, low), (*cell.stop, high))
                for cell in cells
                for low, high in self.bounds(dim)
            ]
        return cells


def grids(shape: tuple[int, ...]) -> st.SearchStrategy[Grid]:
    cuts = [
        st.sets(st.integers(1, size - 1), max_size=3) if size > 1 else st.just(set())
        for size in shape
    ]
    return st.tuples(*cuts).map(
        lambda found: Grid(shape, tuple(tuple(sorted(places)) for places in found))
    )


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
grid_pairs = shapes.flatmap(lambda shape: st.tuples(grids(shape), grids(shape)))


def nested(arrays: list[npt.NDArray[np.int64]], grid: Grid, dim: int) -> npt.NDArray[np.int64]:
    """All cells of a grid, in order, concatenated to the full tensor."""
    if dim == len(grid.shape):
        return arrays[0]
    portion = len(arrays) // len(grid.bounds(dim))
    parts = [
        nested(arrays[start : start + portion], grid, dim + 1)
        for start in range(0, len(arrays), portion)
    ]
    return np.concatenate(parts, axis=dim)


@given(grid_pairs, st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_a_plan_equals_concatenating_and_slicing_again(
    pair: tuple[Grid, Grid], old_ranks: int, new_ranks: int, num_nodes: int
) -> None:
    old, new = pair
    spec = TensorSpec("weight", old.shape, "float32")
    source, target = (
        TensorCollection.build(
            [spec],
            [(index * 7 % ranks, Box("weight", cell)) for index, cell in enumerate(grid.cells())],
        )
        for grid, ranks in ((old, old_ranks), (new, new_ranks))
    )
    shards = fill(source)
    where = topology_of(old_ranks, new_ranks, num_nodes)
    used = {where.target_nodes[rank] for rank in target.ranks}
    if not {where.source_nodes[rank] for rank in source.ranks} <= used:
        where = topology_of(old_ranks, new_ranks, 1)
    filled = run_plan(plan_reshard(source, target, where), shards, target)

    by_cell = {box.region: array for (_, box), array in shards.items()}
    full = nested([by_cell[cell] for cell in old.cells()], old, 0)
    np.testing.assert_array_equal(full, numbered(spec))
    assert {box.region for _, box in filled} == set(new.cells())
    for (_, box), array in filled.items():
        np.testing.assert_array_equal(array, full[box.region.slices()])
