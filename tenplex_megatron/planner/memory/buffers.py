"""How does Megatron lay the parameters of a model chunk out in a buffer, and who owns which part?

One buffer holds one kind of parameter, from the last to the first
(megatron/core/distributed/param_and_grad_buffer.py).  With the distributed optimizer every
parameter starts at a multiple of 64 elements, every bucket ends at a multiple of the number of
shards and of 128 (megatron/core/optimizer/param_layout.py), and every data-parallel rank owns an
equal part of each bucket.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["BUCKET_END", "TENSOR_START", "BufferElements", "buffer_elements"]

TENSOR_START = 64
"""Every parameter of a sharded buffer starts at a multiple of this."""
BUCKET_END = 128
"""Every bucket of a sharded buffer ends at a multiple of this and of the number of shards."""


@dataclass(frozen=True, slots=True)
class BufferElements:
    """Elements of one buffer on one rank."""

    parameters: int
    """Without padding."""
    allocated: int
    """With the padding that the distributed optimizer needs."""
    owned: tuple[int, ...]
    """Elements whose optimizer state each data-parallel rank keeps; one entry when it is whole."""


def buffer_elements(
    sizes: Sequence[int], shards: int, bucket_size: int | None = None, *, alone: int = -1
) -> BufferElements:
    """Elements of one buffer.

    Args:
        sizes: its tensors in the order of the modules.
        shards: data-parallel ranks that share the optimizer's state; 0: every rank keeps all.
        bucket_size: elements at which a bucket is closed; None: there is one.
        alone: place in `sizes` of a tensor that gets a bucket of its own.
    """
    total = sum(sizes)
    if not shards:
        return BufferElements(total, total, (total,))
    owned = [0] * shards
    stop = 0
    for start, stop, spans in _buckets(sizes, shards, bucket_size, alone):
        for rank, count in _owned(start, (stop - start) // shards, spans):
            owned[rank] += count
    return BufferElements(total, stop, tuple(owned))


def _buckets(
    sizes: Sequence[int], shards: int, bucket_size: int | None, alone: int
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(start, padded stop, spans of its tensors) of every bucket of a sharded buffer."""
    end = math.lcm(shards, BUCKET_END)
    start = position = 0
    spans: list[tuple[int, int]] = []
    for place in range(len(sizes) - 1, -1, -1):
        position = _up(position, TENSOR_START)
        if place == alone and spans:
            stop = _up(position, end)
            yield start, stop, spans
            start, position, spans = stop, stop, []
        spans.append((position, position + sizes[place]))
        position += sizes[place]
        is_full = bucket_size is not None and position - start >= bucket_size
        if is_full or place == alone:
            stop = _up(position, end)
            yield start, stop, spans
            start, position, spans = stop, stop, []
    if spans:
        yield start, _up(position, end), spans


def _owned(start: int, shard: int, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(data-parallel rank, elements of a tensor in its shard of the bucket); ranks repeat."""
    for low, high in spans:
        position = low
        while position < high:
            rank = (position - start) // shard
            stop = min(high, start + (rank + 1) * shard)
            yield rank, stop - position
            position = stop


def _up(value: int, divisor: int) -> int:
    """The next multiple of `divisor`."""
    return -(-value // divisor) * divisor
