"""Specs know their bytes and refuse what has none."""

import pytest

from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import DTYPE_BYTES, Box, TensorSpec
from tenplex_megatron.errors import LayoutError, UnsupportedLayoutError


@pytest.mark.parametrize(("dtype", "size"), sorted(DTYPE_BYTES.items()))
def test_bytes_are_elements_times_the_size_of_the_dtype(dtype: str, size: int) -> None:
    spec = TensorSpec("weight", (3, 5), dtype)
    assert (spec.numel, spec.itemsize, spec.nbytes) == (15, size, 15 * size)


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert TensorSpec("step", (), "int64").nbytes == 8
    assert TensorSpec("nothing", (0, 4), "int64").nbytes == 0
    assert TensorSpec("step", (), "int64").region == Region((), ())


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLayoutError, match=r"weight: dtype 'float12'"):
        TensorSpec("weight", (1,), "float12")


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="sizes >= 0"):
        TensorSpec("weight", (2, -1), "float32")


def test_a_scalar_cannot_be_padded() -> None:
    with pytest.raises(LayoutError, match="no rows to pad"):
        TensorSpec("step", (), "int64", padded=True)


def test_boxes_sort_by_tensor_and_read_well() -> None:
    first, second = Box("a", Region((1,), (2,))), Box("b", Region((0,), (1,)))
    assert sorted([second, first]) == [first, second]
    assert str(first) == "a[1:2]"
