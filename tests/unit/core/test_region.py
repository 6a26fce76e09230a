"""Regions behave as the sets of indices they stand for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core.region import Region, missing_parts
from tenplex_megatron.errors import LayoutError

SIDE = 5


def regions(ndim: int) -> st.SearchStrategy[Region]:
    bounds = st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(sorted)
    return st.lists(bounds, min_size=ndim, max_size=ndim).map(
        lambda pairs: Region(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))
    )


def indices(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, region.start, region.stop)))


two_regions = st.integers(0, 3).flatmap(lambda ndim: st.tuples(regions(ndim), regions(ndim)))


@given(two_regions)
def test_an_intersection_has_the_shared_indices(pair: tuple[Region, Region]) -> None:
    one, two = pair
    shared = one.intersect(two)
    assert (indices(shared) if shared else set()) == indices(one) & indices(two)


@given(two_regions)
def test_a_difference_is_disjoint_sorted_and_complete(pair: tuple[Region, Region]) -> None:
    one, two = pair
    parts = one.subtract(two)
    assert list(parts) == sorted(parts)
    assert sum(part.numel for part in parts) == len(indices(one) - indices(two))
    assert set().union(*map(indices, parts)) == indices(one) - indices(two)


@given(two_regions)
def test_containing_means_having_every_index(pair: tuple[Region, Region]) -> None:
    one, two = pair
    assert one.contains(two) == (indices(two) <= indices(one))


@given(st.integers(0, 2).flatmap(lambda n: st.tuples(regions(n), st.lists(regions(n), max_size=4))))
def test_missing_parts_are_what_overlapping_parts_leave(
    case: tuple[Region, list[Region]],
) -> None:
    whole, parts = case
    missing = missing_parts(whole, parts)
    expected = indices(whole).difference(*map(indices, parts))
    assert sum(part.numel for part in missing) == len(expected)
    assert set().union(*map(indices, missing)) == expected


@given(st.integers(0, 3).flatmap(regions))
def test_slices_select_the_region_of_an_array(region: Region) -> None:
    array = np.arange(SIDE**region.ndim).reshape((SIDE,) * region.ndim)
    assert np.asarray(array[region.slices()]).shape == region.shape
    assert region.numel == np.asarray(array[region.slices()]).size
    assert region.is_empty == (region.numel == 0)


def test_a_region_without_dims_has_one_element_and_is_its_own_intersection() -> None:
    scalar = Region((), ())
    assert scalar.numel == 1
    assert not scalar.is_empty
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == ()
    assert scalar.contains(scalar)
    assert scalar.slices() == ()
    assert Region.full(()) == scalar


def test_relative_regions_start_at_their_origin_and_translate_back() -> None:
    inner, origin = Region((4, 6), (5, 9)), Region((3, 6), (8, 10))
    assert inner.relative_to(origin) == Region((1, 0), (2, 3))
    assert inner.relative_to(origin).translate(origin.start) == inner
    assert str(inner) == "[4:5, 6:9]"


@pytest.mark.parametrize(("start", "stop"), [((2,), (1,)), ((-1,), (1,)), ((0, 0), (1,))])
def test_impossible_bounds_are_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="region start"):
        Region(start, stop)


def test_regions_of_different_dims_never_meet() -> None:
    one, two = Region((0,), (1,)), Region((0, 0), (1, 1))
    for operation in (one.intersect, one.subtract, one.contains, one.relative_to):
        with pytest.raises(LayoutError, match="dims"):
            operation(two)
    with pytest.raises(LayoutError, match="expected 1 offsets"):
        one.translate((1, 2))


def test_a_region_before_its_origin_is_refused() -> None:
    with pytest.raises(LayoutError):
        Region((0,), (2,)).relative_to(Region((1,), (2,)))
