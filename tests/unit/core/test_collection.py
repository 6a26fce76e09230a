"""Collections are canonical values, and know what is missing."""

import pytest

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec
from tenplex_megatron.errors import LayoutError

WEIGHT = TensorSpec("weight", (4, 2), "float32")
STEP = TensorSpec("step", (), "int64")
TOP, BOTTOM = (
    Box("weight", Region((0, 0), (2, 2))),
    Box("weight", Region((2, 0), (4, 2))),
)
COUNT = Box("step", Region((), ()))


def halves() -> TensorCollection:
    return TensorCollection.build(
        [WEIGHT, STEP], [(0, TOP), (1, BOTTOM), (2, TOP), (0, COUNT), (2, COUNT)]
    )


def test_equal_collections_are_equal_in_any_order() -> None:
    other = TensorCollection.build(
        [STEP, WEIGHT, STEP], [(2, COUNT), (2, TOP), (0, COUNT), (1, BOTTOM), (0, TOP)]
    )
    assert other == halves()
    assert list(other.tensors) == ["step", "weight"]
    assert list(other.holdings) == [0, 1, 2]


def test_slices_partitions_and_allocations_are_views_of_one_table() -> None:
    held = halves()
    assert held.slice("weight") == (TOP.region, BOTTOM.region)
    assert held.partition(0) == (COUNT, TOP)
    assert held.allocate(TOP) == (0, 2)
    assert held.holders("weight") == ((0, TOP.region), (1, BOTTOM.region), (2, TOP.region))


def test_bytes_count_boxes_per_rank_and_tensors_once() -> None:
    held = halves()
    assert [held.nbytes(rank) for rank in held.ranks] == [24, 16, 24]
    assert held.total_bytes == 40


def test_a_box_held_twice_counts_twice_for_the_rank_and_is_one_holder() -> None:
    held = TensorCollection({"weight": WEIGHT}, {0: (TOP, TOP)})
    assert held.nbytes(0) == 32
    assert held.holders("weight") == ((0, TOP.region),)
    assert held.partition(0) == (TOP,)


def test_a_complete_collection_is_valid_even_when_boxes_overlap_or_ranks_hold_nothing() -> None:
    whole = Box("weight", WEIGHT.region)
    TensorCollection({"weight": WEIGHT}, {0: (whole, TOP), 1: ()}).validate()
    halves().validate()


def test_an_unheld_box_is_named() -> None:
    held = TensorCollection.build([WEIGHT, STEP], [(0, TOP), (0, COUNT)])
    assert held.missing() == (BOTTOM,)
    with pytest.raises(LayoutError, match=r"no rank holds weight\[2:4, 0:2\]"):
        held.validate()


def test_a_scalar_nobody_holds_is_missing() -> None:
    assert TensorCollection({"step": STEP}, {0: ()}).missing() == (COUNT,)


@pytest.mark.parametrize("region", [Region((0, 0), (5, 2)), Region((0,), (4,))])
def test_a_box_outside_its_tensor_is_named_with_its_rank(region: Region) -> None:
    held = TensorCollection({"weight": WEIGHT}, {3: (Box("weight", region),)})
    with pytest.raises(LayoutError, match=r"rank 3 holds weight.* does not fit"):
        held.validate()


def test_a_box_of_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="no tensor spec"):
        TensorCollection({}, {0: (TOP,)}).validate()


def test_survivors_keep_what_they_hold_and_losses_are_named() -> None:
    held = halves()
    assert held.restrict([1, 2]).ranks == (1, 2)
    assert held.restrict([2, 1]) == held.restrict((1, 2))
    with pytest.raises(LayoutError, match=r"ranks \(0, 2\) hold nothing of weight\[2:4, 0:2\]"):
        held.restrict([0, 2])
    assert held.survivors([0, 2]).missing() == (BOTTOM,)


def test_unknown_ranks_and_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="rank 7 is not in this collection"):
        halves().restrict([7])
    with pytest.raises(LayoutError, match="'bias' is not among the 2 known tensors"):
        halves().holders("bias")


def test_contradicting_descriptions_of_a_tensor_are_refused() -> None:
    other = TensorSpec("weight", (4, 2), "bfloat16")
    with pytest.raises(LayoutError, match="weight: described as"):
        TensorCollection.build([WEIGHT, other], [])
    with pytest.raises(LayoutError, match="filed under the name 'bias'"):
        TensorCollection({"bias": WEIGHT}, {})
