import enum
import json
import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.errors import StoreError
from tenplex_megatron.store.values import PlainValue, decode_value, dump_compact, encode_value

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
KEYS = st.text(max_size=6) | st.integers() | st.sampled_from(["$tuple", "$dict", "$", ""])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(value: object) -> PlainValue:
    return decode_value(json.loads(dump_compact(encode_value(value))))


def typed(value: object) -> object:
    """The value with the type of every part and the order of dictionaries."""
    if isinstance(value, dict):
        return ("dict", [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(item) for item in value])
    return (type(value).__name__, repr(value))


@given(VALUES)
def test_every_plain_value_survives_json_in_value_type_and_order(value: object) -> None:
    assert typed(through_json(value)) == typed(value)


@pytest.mark.parametrize(
    "value",
    [False, True, 0, 1, 0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, 2**200, (), ((),), "", b"", None],
)
def test_false_zero_and_nothing_stay_what_they_are(value: object) -> None:
    assert typed(through_json({"value": value})) == typed({"value": value})


def test_nan_and_infinity_are_written_as_words() -> None:
    assert through_json([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert repr(through_json((math.nan,))) == "(nan,)"


class Pair(NamedTuple):
    first: int
    second: float


class Kind(enum.IntEnum):
    LINEAR = 3


def test_subclasses_of_plain_types_are_kept_by_value() -> None:
    value = {
        "float": np.float64(0.1),
        "enum": Kind.LINEAR,
        "pair": Pair(1, 2.0),
        "ordered": OrderedDict(b=1, a=2),
        "buffer": bytearray(b"ab"),
    }
    expected = {
        "float": 0.1, "enum": 3, "pair": (1, 2.0), "ordered": {"b": 1, "a": 2}, "buffer": b"ab"
    }  # fmt: skip
    assert typed(through_json(value)) == typed(expected)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2}]}, r"progress\['a'\]\[1\]: builtins.set"),
        ({"a": {"b": np.int64(1)}}, r"progress\['a'\]\['b'\]: numpy.int64"),
        ((np.bool_(True),), r"progress\[0\]: numpy.bool"),
        ({"x": 1j}, r"progress\['x'\]: builtins.complex"),
    ],
)
def test_another_value_is_refused_by_its_place(value: object, place: str) -> None:
    with pytest.raises(StoreError, match=place):
        encode_value(value)


def test_a_kind_from_a_later_version_is_refused() -> None:
    with pytest.raises(StoreError, match=r"\$set"):
        decode_value({"$set": [1]})
