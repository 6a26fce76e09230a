"""Cuts cover what they cut, once, in the order that Megatron stores."""

import itertools

import numpy as np
import pytest

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import (
    cut_after,
    flat_range,
    narrow,
    padded_size,
    prepend_axis,
    replicate,
    split_blocks,
    split_even,
    split_groups,
    split_uneven,
)
from tenplex_megatron.errors import LayoutError

SHAPES = [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (1, 3, 2), (2, 2, 2, 2)]


def elements(whole: Region, region: Region) -> list[int]:
    index = np.arange(whole.numel).reshape(whole.shape)
    return index[region.relative_to(whole).slices()].reshape(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 3])
def test_a_flat_range_is_its_elements_in_order_in_few_contiguous_boxes(
    shape: tuple[int, ...], offset: int
) -> None:
    whole = Region.full(shape).translate((offset,) * len(shape))
    for start, stop in itertools.combinations_with_replacement(range(whole.numel + 1), 2):
        boxes = flat_range(whole, start, stop)
        assert len(boxes) <= 2 * len(shape) - 1
        found = [elements(whole, box) for box in boxes]
        assert list(itertools.chain(*found)) == list(range(start, stop))
        for part in found:
            assert part == list(range(part[0], part[-1] + 1))


def test_a_flat_range_of_a_scalar_is_all_or_nothing() -> None:
    assert flat_range(Region((), ()), 0, 1) == (Region((), ()),)
    assert flat_range(Region((), ()), 0, 0) == ()


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_flat_range_outside_the_region_is_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match="leaves its 12 elements"):
        flat_range(Region.full((3, 4)), start, stop)


@pytest.mark.parametrize("shape", SHAPES)
def test_cutting_after_a_count_parts_the_region_there(shape: tuple[int, ...]) -> None:
    whole = Region.full(shape)
    for count, tolerance in itertools.product(range(-1, whole.numel + 2), (0, 1, 4)):
        first, rest = cut_after(whole, count, tolerance=tolerance)
        parts = [elements(whole, box) for box in first + rest]
        assert sorted(itertools.chain(*parts)) == list(range(whole.numel))
        wanted = min(max(count, 0), whole.numel)
        assert abs(sum(box.numel for box in first) - wanted) <= tolerance


def test_a_tolerant_cut_is_one_straight_cut() -> None:
    first, rest = cut_after(Region.full((100, 100)), 4950, tolerance=50)
    assert (len(first), len(rest)) == (1, 1)


@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (1, 3), (0, 1)])
def test_even_parts_tile_the_region(dim: int, parts: int) -> None:
    whole = Region((2, 1), (6, 7))
    cut = split_even(whole, dim, parts)
    assert len({part.shape for part in cut}) == 1
    assert sum(part.numel for part in cut) == whole.numel
    assert [part.start[dim] for part in cut] == sorted(part.start[dim] for part in cut)


def test_uneven_parts_have_their_sizes_and_may_be_empty() -> None:
    cut = split_uneven(Region.full((7, 2)), 0, (3, 0, 4))
    assert [part.shape for part in cut] == [(3, 2), (0, 2), (4, 2)]


def test_cuts_that_do_not_divide_are_refused() -> None:
    whole = Region.full((7, 2))
    with pytest.raises(LayoutError, match="7 cannot be split into 2 equal parts"):
        split_even(whole, 0, 2)
    with pytest.raises(LayoutError, match="7 cannot be split into 0 equal parts"):
        split_even(whole, 0, 0)
    with pytest.raises(LayoutError, match="sum to 6"):
        split_uneven(whole, 0, (3, 3))
    with pytest.raises(LayoutError, match="sum to 7"):
        split_uneven(whole, 0, (8, -1))
    with pytest.raises(LayoutError, match="has no dim 2"):
        split_even(whole, 2, 1)
    with pytest.raises(LayoutError, match="leaves dim 0"):
        narrow(whole, 0, 2, 8)


def test_fused_blocks_are_each_split_over_all_parts() -> None:
    gate_up = split_blocks(Region.full((12, 3)), 0, (4, 8), 2)
    assert gate_up[1] == (Region((2, 0), (4, 3)), Region((8, 0), (12, 3)))


def test_whole_groups_stay_together_while_there_are_enough() -> None:
    cut = split_groups(Region.full((16,)), 0, groups=4, blocks=(2, 1, 1), parts=2)
    assert cut == ((Region((0,), (8,)),), (Region((8,), (16,)),))


def test_parts_of_one_group_share_queries_and_copy_keys_and_values() -> None:
    cut = split_groups(Region.full((8,)), 0, groups=1, blocks=(4, 2, 2), parts=2)
    key_value = (Region((4,), (6,)), Region((6,), (8,)))
    assert cut == ((Region((0,), (2,)), *key_value), (Region((2,), (4,)), *key_value))


def test_groups_that_do_not_fit_are_refused() -> None:
    whole = Region.full((16,))
    with pytest.raises(LayoutError, match="groups"):
        split_groups(whole, 0, groups=4, blocks=(2, 1, 1), parts=3)
    with pytest.raises(LayoutError, match="parts over groups"):
        split_groups(whole, 0, groups=2, blocks=(4, 2, 2), parts=3)
    with pytest.raises(LayoutError, match="sum to 12"):
        split_groups(whole, 0, groups=2, blocks=(4, 1, 1), parts=1)
    with pytest.raises(LayoutError, match="at least one group"):
        split_groups(whole, 0, groups=0, blocks=(4, 2, 2), parts=1)


def test_replicas_are_the_same_region() -> None:
    assert replicate(Region.full((4,)), 2) == (Region.full((4,)),) * 2


def test_a_prepended_axis_places_one_layer_or_several() -> None:
    assert prepend_axis(Region.full((4,)), 3) == Region((3, 0), (4, 4))
    assert prepend_axis(Region.full((4,)), 3, 6) == Region((3, 0), (6, 4))


@pytest.mark.parametrize(
    ("size", "divisible_by", "parts", "padded"),
    [(101, 8, 1, 104), (101, 8, 4, 128), (50257, 128, 2, 50432), (128, 128, 1, 128), (0, 4, 1, 0)],
)
def test_a_vocabulary_is_padded_as_megatron_pads_it(
    size: int, divisible_by: int, parts: int, padded: int
) -> None:
    assert padded_size(size, divisible_by=divisible_by, parts=parts) == padded


def test_padding_to_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot pad"):
        padded_size(5, divisible_by=0, parts=1)
