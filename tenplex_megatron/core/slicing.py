"""How a tensor is cut into the boxes that ranks hold (the paper's slicing functions).

Every function takes a region and returns regions; cut shapes compose by cutting the parts again.
The parts of one cut cover the region exactly, and are disjoint unless the name says replicate.
"""

import itertools
import math
from collections.abc import Sequence

from tenplex_megatron.core.region import Region
from tenplex_megatron.errors import LayoutError

__all__ = [
    "cut_after",
    "flat_range",
    "narrow",
    "padded_size",
    "prepend_axis",
    "replicate",
    "split_blocks",
    "split_even",
    "split_groups",
    "split_uneven",
]


def narrow(region: Region, dim: int, start: int, stop: int) -> Region:
    """The part of `region` whose index along `dim`, counted from its start, is in the range.

    >>> narrow(Region((4, 0), (8, 2)), 0, 1, 3)
    Region(start=(5, 0), stop=(7, 2))
    """
    _check_dim(region, dim)
    if not 0 <= start <= stop <= region.shape[dim]:
        raise LayoutError(
            f"{region}: range {start}:{stop} leaves dim {dim} of size {region.shape[dim]}"
        )
    low = region.start[dim]
    return Region(
        (*region.start[:dim], low + start, *region.start[dim + 1 :]),
        (*region.stop[:dim], low + stop, *region.stop[dim + 1 :]),
    )


def split_uneven(region: Region, dim: int, sizes: Sequence[int]) -> tuple[Region, ...]:
    """Consecutive parts of the given sizes along `dim`.

    >>> [str(part) for part in split_uneven(Region((0,), (7,)), 0, (3, 4))]
    ['[0:3]', '[3:7]']
    """
    _check_dim(region, dim)
    if sum(sizes) != region.shape[dim] or any(size < 0 for size in sizes):
        raise LayoutError(
            f"{region}: sizes {tuple(sizes)} sum to {sum(sizes)}, dim {dim} has {region.shape[dim]}"
        )
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return tuple(narrow(region, dim, low, high) for low, high in bounds)


def split_even(region: Region, dim: int, parts: int) -> tuple[Region, ...]:
    """Equal consecutive parts along `dim`: column and row parallel weights.

    >>> [str(part) for part in split_even(Region((0, 0), (4, 6)), 1, 2)]
    ['[0:4, 0:3]', '[0:4, 3:6]']

    Raises:
        LayoutError: when the size is not a multiple of `parts`.
    """
    _check_dim(region, dim)
    size = _divide(region.shape[dim], parts, f"{region}: dim {dim}")
    return split_uneven(region, dim, (size,) * parts)


def split_blocks(
    region: Region, dim: int, blocks: Sequence[int], parts: int
) -> tuple[tuple[Region, ...], ...]:
    """Fused blocks along `dim`, each split over all parts: gate and up of a SwiGLU.

    A part holds its share of the first block, then its share of the second, and so on; in the
    global tensor these are separate boxes.

    >>> [[str(box) for box in part] for part in split_blocks(Region((0,), (8,)), 0, (4, 4), 2)]
    [['[0:2]', '[4:6]'], ['[2:4]', '[6:8]']]
    """
    cut = [split_even(block, dim, parts) for block in split_uneven(region, dim, blocks)]
    return tuple(zip(*cut, strict=True))


def split_groups(
    region: Region, dim: int, *, groups: int, blocks: Sequence[int], parts: int
) -> tuple[tuple[Region, ...], ...]:
    """Fused query, key and value rows, ordered per group, cut over tensor-parallel parts.

    Along `dim` the region is `groups` runs of the rows in `blocks` (query rows of all heads of
    the group, key rows, value rows). With at least one group per part, a part holds whole runs.
    With fewer groups than parts, the parts of one group share out its first block and replicate
    the others.

    >>> cut = split_groups(Region((0,), (16,)), 0, groups=2, blocks=(4, 2, 2), parts=4)
    >>> [[str(box) for box in part] for part in cut[:2]]
    [['[0:2]', '[4:6]', '[6:8]'], ['[2:4]', '[4:6]', '[6:8]']]
    """
    if groups < 1:
        raise LayoutError(f"{region}: expected at least one group, got {groups}")
    if groups >= parts:
        _divide(groups, parts, f"{region}: groups")
        split_uneven(region, dim, tuple(blocks) * groups)
        return tuple((part,) for part in split_even(region, dim, parts))
    sharers = _divide(parts, groups, f"{region}: parts over groups")
    cut: list[tuple[Region, ...]] = []
    for run in split_uneven(region, dim, (sum(blocks),) * groups):
        shared, *copied = split_uneven(run, dim, blocks)
        cut.extend((share, *copied) for share in split_even(shared, dim, sharers))
    return tuple(cut)


def replicate(region: Region, parts: int) -> tuple[Region, ...]:
    """The whole region for every part: layer norms under tensor parallelism.

    >>> len(replicate(Region((0,), (4,)), 3))
    3
    """
    return (region,) * parts


def prepend_axis(region: Region, start: int, stop: int | None = None) -> Region:
    """The region with one more dim in front: the place of a layer in a stack of layers.

    >>> str(prepend_axis(Region((0,), (4,)), 3))
    '[3:4, 0:4]'
    """
    last = start + 1 if stop is None else stop
    return Region((start, *region.start), (last, *region.stop))


def padded_size(size: int, *, divisible_by: int, parts: int) -> int:
    """Rows of a vocabulary of `size` once every one of `parts` holds a multiple of rows.

    >>> padded_size(101, divisible_by=8, parts=4)
    128
    """
    multiple = divisible_by * parts
    if multiple < 1 or size < 0:
        raise LayoutError(f"cannot pad {size} rows to a multiple of {divisible_by} x {parts}")
    return math.ceil(size / multiple) * multiple


def flat_range(region: Region, start: int, stop: int) -> tuple[Region, ...]:
    """Boxes of the elements `start:stop` of the row-major flattening of `region`, in that order.

    There are at most `2 * ndim - 1` of them, and each is contiguous in the flattening. A
    distributed optimizer owns such a range of a local shard.

    >>> [str(box) for box in flat_range(Region((0, 0), (4, 3)), 2, 10)]
    ['[0:1, 2:3]', '[1:3, 0:3]', '[3:4, 0:1]']
    """
    if not 0 <= start <= stop <= region.numel:
        raise LayoutError(f"{region}: flat range {start}:{stop} leaves its {region.numel} elements")
    if start == stop:
        return ()
    if stop - start == region.numel:
        return (region,)
    return tuple(_flat_boxes(region, 0, start, stop))


def _flat_boxes(region: Region, dim: int, start: int, stop: int) -> list[Region]:
    """Boxes of `start:stop` of a region whose dims before `dim` have size one."""
    row = math.prod(region.shape[dim + 1 :])
    first, last = start // row, (stop - 1) // row
    if first == last and dim + 1 < region.ndim:
        inner = narrow(region, dim, first, first + 1)
        return _flat_boxes(inner, dim + 1, start - first * row, stop - first * row)
    boxes: list[Region] = []
    whole_start, whole_stop = math.ceil(start / row), stop // row
    if start % row:
        head = narrow(region, dim, first, first + 1)
        boxes += _flat_boxes(head, dim + 1, start % row, row)
    if whole_start < whole_stop:
        boxes.append(narrow(region, dim, whole_start, whole_stop))
    if stop % row:
        tail = narrow(region, dim, last, last + 1)
        boxes += _flat_boxes(tail, dim + 1, 0, stop % row)
    return boxes


def cut_after(
    region: Region, count: int, *, tolerance: int = 0
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """About the first `count` elements of `region`, and the rest; both as few boxes as possible.

    One straight cut is made where it misses `count` by at most `tolerance` elements, along the
    outermost such dim; otherwise the flattening is cut exactly.

    >>> first, rest = cut_after(Region((0, 0), (4, 3)), 5, tolerance=1)
    >>> [str(box) for box in first], [str(box) for box in rest]
    (['[0:2, 0:3]'], ['[2:4, 0:3]'])
    """
    if count <= 0:
        return (), (region,)
    if count >= region.numel:
        return (region,), ()
    for dim, size in enumerate(region.shape):
        row = region.numel // size
        rows = (count + row // 2) // row
        if 0 < rows < size and abs(rows * row - count) <= tolerance:
            first, rest = split_uneven(region, dim, (rows, size - rows))
            return (first,), (rest,)
    return flat_range(region, 0, count), flat_range(region, count, region.numel)


def _check_dim(region: Region, dim: int) -> None:
    if not 0 <= dim < region.ndim:
        raise LayoutError(f"{region} has no dim {dim}")


def _divide(size: int, parts: int, what: str) -> int:
    if parts < 1 or size % parts:
        raise LayoutError(f"{what}: {size} cannot be split into {parts} equal parts")
    return size // parts
