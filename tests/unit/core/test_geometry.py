"""Routes of one tensor, with holders that overlap in every way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core import geometry
from tenplex_megatron.core.geometry import find_routes, overlapping_pairs
from tenplex_megatron.core.region import Region

SHAPE = (6, 5)
NODES = {0: "a", 1: "a", 2: "b", 3: "c"}


def boxes() -> st.SearchStrategy[Region]:
    bounds = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in SHAPE]
    return st.tuples(*bounds).map(
        lambda pairs: Region(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))
    )


holders = st.lists(st.tuples(st.sampled_from(sorted(NODES)), boxes()), max_size=6).map(tuple)


def mask(*regions: Region) -> np.ndarray:
    array = np.zeros(SHAPE, dtype=np.int64)
    for region in regions:
        array[region.slices()] += 1
    return array


@given(holders, holders)
def test_routes_part_what_is_wanted_into_local_remote_and_missing(
    held: tuple[tuple[int, Region], ...], wanted: tuple[tuple[int, Region], ...]
) -> None:
    routes = find_routes(Region.full(SHAPE), held, wanted, source_nodes=NODES, target_nodes=NODES)
    assert not routes.created
    for rank, node in NODES.items():
        want = mask(*[region for owner, region in wanted if owner == rank]) > 0
        near = mask(*[region for owner, region in held if NODES[owner] == node]) > 0
        anywhere = mask(*[region for _, region in held]) > 0
        local = mask(*[region for target, region, _ in routes.local if target == rank])
        remote = mask(*[one.region for one in routes.remote if one.target_rank == rank])
        missing = mask(*[region for target, region in routes.missing if target == rank])
        assert (local == (want & near)).all()
        assert (remote == (want & ~near & anywhere)).all()
        assert (missing == (want & ~anywhere)).all()


@given(holders, holders)
def test_every_route_lies_in_one_box_of_each_end(
    held: tuple[tuple[int, Region], ...], wanted: tuple[tuple[int, Region], ...]
) -> None:
    routes = find_routes(Region.full(SHAPE), held, wanted, source_nodes=NODES, target_nodes=NODES)
    ends = [(rank, region, source) for rank, region, source in routes.local]
    ends += [
        (one.target_rank, one.region, rank) for one in routes.remote for _, rank in one.sources
    ]
    for target, region, source in ends:
        assert any(box.contains(region) for rank, box in held if rank == source)
        inside = [box for rank, box in wanted if rank == target and box.intersect(region)]
        assert inside
        assert all(box.contains(region) for box in inside)


@given(holders, holders)
def test_every_node_that_holds_a_remote_piece_is_offered(
    held: tuple[tuple[int, Region], ...], wanted: tuple[tuple[int, Region], ...]
) -> None:
    routes = find_routes(Region.full(SHAPE), held, wanted, source_nodes=NODES, target_nodes=NODES)
    for one in routes.remote:
        owners = [rank for rank, box in held if box.contains(one.region)]
        lowest = {NODES[rank]: rank for rank in sorted(owners, reverse=True)}
        assert dict(one.sources) == lowest


@given(st.lists(boxes(), max_size=5), st.lists(boxes(), max_size=5))
def test_overlapping_pairs_are_the_pairs_that_intersect(
    first: list[Region], second: list[Region]
) -> None:
    expected = [
        [i, j]
        for i, one in enumerate(first)
        for j, two in enumerate(second)
        if one.intersect(two) is not None
    ]
    assert overlapping_pairs(first, second).tolist() == expected


def test_large_products_of_regions_are_compared_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [Region((index,), (index + 2,)) for index in range(9)]
    whole = overlapping_pairs(first, first).tolist()
    monkeypatch.setattr(geometry, "_PAIRS_AT_ONCE", 20)
    assert overlapping_pairs(first, first).tolist() == whole
