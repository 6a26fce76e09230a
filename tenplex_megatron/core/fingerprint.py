"""Is the state bit for bit the same in two layouts?  One number per tensor that no layout changes.

Every element contributes a mix of its place in the global tensor and its bits; contributions are
added modulo 2^64, so ranks add up what they hold in any order.  Replicas count once: an element
belongs to the lowest rank that holds it.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.tensors import Box, TensorSpec

__all__ = ["add_fingerprints", "fingerprint_part", "owned_parts"]

_MASK = (1 << 64) - 1
# Odd constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def owned_parts(collection: TensorCollection, rank: int) -> tuple[Box, ...]:
    """The parts of a rank's boxes that no lower rank holds, disjoint and sorted."""
    holders = collection.all_holders()
    parts: list[Box] = []
    seen: dict[str, list[Region]] = {}
    for box in collection.partition(rank):
        mine = seen.setdefault(box.tensor, [])
        lower = [region for holder, region in holders[box.tensor] if holder < rank]
        left = [box.region]
        for taken in (*lower, *mine):
            left = [rest for region in left for rest in region.subtract(taken)]
        mine.append(box.region)
        parts.extend(Box(box.tensor, region) for region in left)
    return tuple(sorted(parts))


def fingerprint_part(
    spec: TensorSpec, region: Region, bits: npt.NDArray[np.unsignedinteger]
) -> int:
    """The contribution of `region`; `bits` has its shape and holds the elements as integers."""
    place = np.zeros(region.shape, dtype=np.uint64)
    stride = 1
    for dim in reversed(range(region.ndim)):
        along = np.arange(region.start[dim], region.stop[dim], dtype=np.uint64)
        shape = [1] * region.ndim
        shape[dim] = region.shape[dim]
        place += along.reshape(shape) * np.uint64(stride)
        stride *= spec.shape[dim]
    salt = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        mixed = (place + np.uint64(salt)) * _PLACE
        mixed ^= bits.astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        mixed ^= mixed >> np.uint64(31)
        return int(mixed.sum(dtype=np.uint64))


def add_fingerprints(*tables: Mapping[str, int]) -> dict[str, int]:
    """The tables of several ranks as one.

    >>> add_fingerprints({"a": 1}, {"a": 2, "b": 3})
    {'a': 3, 'b': 3}
    """
    total: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = (total.get(name, 0) + value) & _MASK
    return dict(sorted(total.items()))
