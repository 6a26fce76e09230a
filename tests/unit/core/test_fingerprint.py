"""One number per tensor that no layout changes and every flipped bit does."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.fingerprint import add_fingerprints, fingerprint_part, owned_parts
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import TensorSpec
from tenplex_megatron.testing.generate import ModelShape, megatron_collection, numbered

MODEL = ModelShape(num_layers=4, hidden=4, heads=4, groups=4, ffn=4, states=("master",))
LAYOUTS = ("TP1", "TP2", "TP4", "PP2", "PP4", "DP2", "DP3", "TP2,PP2", "TP2,PP2,DP2", "PP2,VPP2")


def fingerprint(collection: TensorCollection) -> dict[str, int]:
    """Of numbered tensors, the way all ranks compute it together."""
    full = {name: numbered(spec).astype(np.uint32) for name, spec in collection.tensors.items()}
    return add_fingerprints(
        *(
            {
                part.tensor: fingerprint_part(
                    collection.tensors[part.tensor],
                    part.region,
                    full[part.tensor][part.region.slices()],
                )
            }
            for rank in collection.ranks
            for part in owned_parts(collection, rank)
        )
    )


def test_a_fingerprint_is_the_same_in_all_layouts() -> None:
    found = {
        text: fingerprint(megatron_collection(MODEL, ParallelLayout.parse(text)))
        for text in LAYOUTS
    }
    assert len(found["TP1"]) > 10
    for text, values in found.items():
        assert values == found["TP1"], text


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_element_belongs_to_one_rank(text: str) -> None:
    collection = megatron_collection(MODEL, ParallelLayout.parse(text))
    counts = {
        name: np.zeros(spec.shape, dtype=np.int64) for name, spec in collection.tensors.items()
    }
    for rank in collection.ranks:
        for part in owned_parts(collection, rank):
            counts[part.tensor][part.region.slices()] += 1
    for name, count in counts.items():
        assert (count == 1).all(), name


def bits(shape: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(0).integers(0, 1 << 32, shape, dtype=np.uint32)


@given(st.data(), st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
def test_any_flipped_bit_changes_the_fingerprint(
    data: st.DataObject, kind: type[np.unsignedinteger]
) -> None:
    values = bits((3, 4)).astype(kind)
    names = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}
    spec = TensorSpec("weight", (3, 4), names[values.itemsize])
    before = fingerprint_part(spec, spec.region, values)
    place = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    values[place] ^= kind(1 << data.draw(st.integers(0, 8 * values.itemsize - 1)))
    assert fingerprint_part(spec, spec.region, values) != before


def test_swapped_elements_change_the_fingerprint() -> None:
    spec = TensorSpec("weight", (3, 4), "float32")
    values = bits(spec.shape)
    before = fingerprint_part(spec, spec.region, values)
    for first, second in itertools.combinations(np.ndindex(3, 4), 2):
        swapped = values.copy()
        swapped[first], swapped[second] = values[second], values[first]
        assert fingerprint_part(spec, spec.region, swapped) != before


def test_equal_values_under_two_names_differ() -> None:
    found = {
        fingerprint_part(TensorSpec(name, (3, 4), "float32"), Region.full((3, 4)), bits((3, 4)))
        for name in ("first", "second")
    }
    assert len(found) == 2


def test_a_tensor_without_dims_has_a_fingerprint() -> None:
    spec = TensorSpec("step", (), "int64")
    found = {fingerprint_part(spec, spec.region, np.array(n, dtype=np.uint64)) for n in range(9)}
    assert len(found) == 9


@given(st.permutations(range(4)))
def test_tables_add_up_in_any_order(order: list[int]) -> None:
    tables = [{"a": (1 << 63) + n, f"only {n}": n} for n in range(4)]
    expected = add_fingerprints(*tables)
    assert add_fingerprints(*(tables[n] for n in order)) == expected
    assert all(0 <= value < 1 << 64 for value in expected.values())
