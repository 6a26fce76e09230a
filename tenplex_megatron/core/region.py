"""Which elements of a tensor a box names, and how boxes intersect and subtract.

A region is a value: it never refers to storage. Every other module leaves offset arithmetic to it.
"""

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tenplex_megatron.errors import LayoutError

__all__ = ["Region", "missing_parts"]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The indices `start[d] <= i < stop[d]` of every tensor dim `d`.

    A tensor without dims has one element, and one region: `Region((), ())`.

    >>> Region((0, 0), (4, 6)).intersect(Region((2, 3), (8, 9)))
    Region(start=(2, 3), stop=(4, 6))
    >>> Region((), ()).numel
    1
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(
                f"region start {self.start} and stop {self.stop} name different numbers of dims"
            )
        for low, high in zip(self.start, self.stop, strict=True):
            if not 0 <= low <= high:
                raise LayoutError(
                    f"region start {self.start}, stop {self.stop}: "
                    f"expected 0 <= start <= stop in every dim, got {low} and {high}"
                )

    @classmethod
    def full(cls, shape: Iterable[int]) -> Self:
        """The region of a whole tensor.

        >>> Region.full((4, 6))
        Region(start=(0, 0), stop=(4, 6))
        """
        stop = tuple(shape)
        return cls((0,) * len(stop), stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """The extent along every dim."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.start)

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a region without dims."""
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def is_empty(self) -> bool:
        """Whether there is no element."""
        return any(map(operator.eq, self.start, self.stop))

    def intersect(self, other: "Region") -> "Region | None":
        """The shared box, or None when nothing is shared."""
        self._check_same_ndim(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(operator.ge, start, stop)):
            return None
        return Region(start, stop)

    def contains(self, other: "Region") -> bool:
        """Whether every index of `other` lies in this region.

        >>> Region((0,), (4,)).contains(Region((1,), (4,)))
        True
        """
        self._check_same_ndim(other)
        if other.is_empty:
            return True
        return all(map(operator.le, self.start, other.start)) and all(
            map(operator.ge, self.stop, other.stop)
        )

    def subtract(self, other: "Region") -> "tuple[Region, ...]":
        """Disjoint, sorted boxes that cover what is here and not in `other`.

        >>> for part in Region((0, 0), (3, 3)).subtract(Region((1, 1), (2, 2))):
        ...     print(part.start, part.stop)
        (0, 0) (1, 3)
        (1, 0) (2, 1)
        (1, 2) (2, 3)
        (2, 0) (3, 3)
        """
        if self.is_empty:
            return ()
        shared = self.intersect(other)
        if shared is None:
            return (self,)
        parts: list[Region] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(self.ndim):
            low, high = shared.start[dim], shared.stop[dim]
            if start[dim] < low:
                parts.append(Region(tuple(start), (*stop[:dim], low, *stop[dim + 1 :])))
            if high < stop[dim]:
                parts.append(Region((*start[:dim], high, *start[dim + 1 :]), tuple(stop)))
            start[dim], stop[dim] = low, high
        return tuple(sorted(parts))

    def relative_to(self, origin: "Region") -> "Region":
        """The same elements, counted from the start of `origin`.

        >>> Region((5,), (7,)).relative_to(Region((4,), (8,)))
        Region(start=(1,), stop=(3,))

        Raises:
            LayoutError: when this region begins before `origin`.
        """
        self._check_same_ndim(origin)
        return self.translate(tuple(-low for low in origin.start))

    def translate(self, offsets: tuple[int, ...]) -> "Region":
        """This region moved by one offset per dim.

        >>> Region((0, 2), (1, 4)).translate((3, -2))
        Region(start=(3, 0), stop=(4, 2))
        """
        if len(offsets) != self.ndim:
            raise LayoutError(f"{self}: expected {self.ndim} offsets, got {offsets}")
        return Region(
            tuple(map(operator.add, self.start, offsets)),
            tuple(map(operator.add, self.stop, offsets)),
        )

    def slices(self) -> tuple[slice, ...]:
        """The index that selects this region of an array.

        >>> Region((1, 0), (3, 2)).slices()
        (slice(1, 3, None), slice(0, 2, None))
        """
        return tuple(map(slice, self.start, self.stop))

    def __str__(self) -> str:
        ranges = (f"{low}:{high}" for low, high in zip(self.start, self.stop, strict=True))
        return f"[{', '.join(ranges)}]"

    def _check_same_ndim(self, other: "Region") -> None:
        if len(self.start) != len(other.start):
            raise LayoutError(f"{self} has {self.ndim} dims, {other} has {other.ndim}")


def missing_parts(whole: Region, parts: Iterable[Region]) -> tuple[Region, ...]:
    """Disjoint, sorted boxes of `whole` that no part covers; parts may overlap.

    >>> missing_parts(Region((0,), (9,)), [Region((0,), (4,)), Region((2,), (6,))])
    (Region(start=(6,), stop=(9,)),)
    """
    left: list[Region] = [] if whole.is_empty else [whole]
    for part in parts:
        if not left:
            break
        left = [rest for box in left for rest in box.subtract(part)]
    return tuple(sorted(left))
