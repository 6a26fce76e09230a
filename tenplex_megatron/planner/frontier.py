"""Which strategies are worth having when both memory and time count?

A frontier holds the costs no other cost beats in both. Dropping the others early never loses an
answer, because sums keep the order in both coordinates: that is the whole correctness argument of
Frontier Tracking (TensorOpt, arXiv 2004.10856), and why memory is part of every comparison.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tenplex_megatron.errors import ConfigError

__all__ = ["Frontier", "check_epsilon", "first_of_each_cell", "product", "undominated", "union"]

type Floats = NDArray[np.float64]
type Indices = NDArray[np.int64]

# Sums of two frontiers are formed in blocks, so that a product never holds all of them.
BLOCK_POINTS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Costs of which none is dominated: `memory` strictly ascending, `time` strictly descending.

    Build one with `of`, `union` or `product`; the arrays can't be written to.

    >>> Frontier.of([3, 1, 2, 1], [1, 9, 9, 7])
    Frontier(memory=array([1., 3.]), time=array([7., 1.]), sources=(array([3, 0]),), \
was_thinned=False)
    """

    memory: Floats
    """Per device; the unit is the caller's, bytes within this package."""
    time: Floats
    """Per step; the unit is the caller's, seconds within this package."""
    sources: tuple[Indices, ...]
    """Where each point comes from: `of`: (index given,); `union`: (operand, index in it);
    `product`: (index in the left operand, index in the right one)."""
    was_thinned: bool = False
    """Whether points that no other dominates were left out, here or in an operand."""

    def __post_init__(self) -> None:
        for array in (self.memory, self.time, *self.sources):
            array.flags.writeable = False

    @classmethod
    def of(cls, memory: ArrayLike, time: ArrayLike) -> Self:
        """The frontier of these costs; of equal costs the first one given stays.

        An infinite cost marks what is impossible and is left out.

        Raises:
            ConfigError: the arrays differ in length, or hold a negative number or no number.
        """
        memory, time = (np.asarray(costs, dtype=np.float64) for costs in (memory, time))
        if memory.ndim != 1 or memory.shape != time.shape:
            raise ConfigError(
                f"frontier: expected one memory and one time for each point, got arrays of shape "
                f"{memory.shape} and {time.shape}"
            )
        for name, costs in (("memory", memory), ("time", time)):
            wrong = np.flatnonzero(~(costs >= 0))
            if len(wrong):
                raise ConfigError(
                    f"frontier: {name} of point {wrong[0]} is {costs[wrong[0]]}, expected 0 or more"
                )
        possible = np.flatnonzero(np.isfinite(memory) & np.isfinite(time))
        kept = possible[undominated(memory[possible], time[possible])]
        return cls(memory[kept], time[kept], (kept,))

    def __len__(self) -> int:
        return len(self.memory)

    def fastest_within(self, memory_limit: float) -> int | None:
        """Index of the fastest point that needs at most `memory_limit`, None where none does.

        >>> Frontier.of([1, 3], [7, 1]).fastest_within(2.5)
        0
        """
        count = int(np.searchsorted(self.memory, memory_limit, side="right"))
        return count - 1 if count else None

    def thinned(self, epsilon: float) -> Self:
        """Fewer points: under every memory limit the best time grows to at most 1 + epsilon times.

        Time is cut into cells whose ends differ by 1 + epsilon; the point with the least memory
        stays of each, so that what is left out has a substitute that needs no more memory. Both end
        points stay. `sources` still says where the points come from.

        >>> Frontier.of([1, 2, 3, 4], [9.0, 8.9, 8.8, 2.0]).thinned(0.1).memory
        array([1., 4.])

        Raises:
            ConfigError: epsilon is negative or no number.
        """
        check_epsilon(epsilon)
        # A cell a little narrower than asked for, so that rounding can't break the promise.
        width = math.log1p(epsilon) * (1 - 1e-9)
        if width == 0 or len(self) < 3:
            return self
        logarithm = np.log(np.maximum(self.time, np.finfo(np.float64).tiny))
        kept = first_of_each_cell(np.floor((logarithm[0] - logarithm) / width))
        if len(kept) == len(self):
            return self
        return self._pick(kept)

    def _pick(self, kept: Indices) -> Self:
        return replace(
            self,
            memory=self.memory[kept],
            time=self.time[kept],
            sources=tuple(index[kept] for index in self.sources),
            was_thinned=True,
        )


def check_epsilon(epsilon: float) -> None:
    """Refuse what can't be the relative error of a thinning.

    Raises:
        ConfigError: epsilon is negative, infinite or no number.
    """
    if not 0 <= epsilon < math.inf:
        raise ConfigError(f"thinning: epsilon is {epsilon}, expected a number of 0 or more")


def undominated(memory: NDArray[Any], time: NDArray[Any]) -> Indices:
    """Indices of the points that no other one beats or equals in both, by ascending memory.

    Of equal points the first one stays, so that the answer is the same on every machine.

    >>> undominated(np.array([2, 1, 2, 3]), np.array([5, 6, 4, 4]))
    array([1, 2])
    """
    order = np.argsort(memory, kind="stable")
    ordered = time[order]
    best = np.minimum.accumulate(ordered)
    falls = np.ones(len(order), dtype=np.bool_)
    np.less(ordered[1:], best[:-1], out=falls[1:])
    kept = order[falls]
    # Among points of the same memory every one that is left is faster than the one before it.
    is_last = np.ones(len(kept), dtype=np.bool_)
    reached = memory[kept]
    np.not_equal(reached[1:], reached[:-1], out=is_last[:-1])
    return kept[is_last]


def first_of_each_cell(cell: NDArray[Any]) -> Indices:
    """Indices that stay when neighbours of one cell become one, and the last one besides.

    >>> first_of_each_cell(np.array([7, 7, 5, 5, 5]))
    array([0, 2, 4])
    """
    stays = np.ones(len(cell), dtype=np.bool_)
    np.not_equal(cell[1:-1], cell[:-2], out=stays[1:-1])
    return np.flatnonzero(stays)


def union(frontiers: Sequence[Frontier]) -> Frontier:
    """What is worth having when one of the operands may be chosen."""
    memory = np.concatenate([np.empty(0), *(frontier.memory for frontier in frontiers)])
    time = np.concatenate([np.empty(0), *(frontier.time for frontier in frontiers)])
    sizes = [len(frontier) for frontier in frontiers]
    operand = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(memory)) - np.repeat(np.cumsum(sizes) - sizes, sizes).astype(np.int64)
    kept = undominated(memory, time)
    was_thinned = any(frontier.was_thinned for frontier in frontiers)
    return Frontier(memory[kept], time[kept], (operand[kept], index[kept]), was_thinned)


def product(left: Frontier, right: Frontier) -> Frontier:
    """What is worth having when a point of each is taken and their costs add up."""
    rows = max(1, BLOCK_POINTS // max(1, len(right)))
    blocks = [
        _sums(left, right, start, min(start + rows, len(left)))
        for start in range(0, len(left), rows)
    ]
    memory, time, index = (
        np.concatenate([np.empty(0, dtype=kind), *(block[column] for block in blocks)])
        for column, kind in enumerate((np.float64, np.float64, np.int64))
    )
    kept = undominated(memory, time)
    sources = np.divmod(index[kept].astype(np.int64), max(1, len(right)))
    return Frontier(memory[kept], time[kept], sources, left.was_thinned or right.was_thinned)


def _sums(left: Frontier, right: Frontier, start: int, stop: int) -> tuple[Floats, Floats, Indices]:
    """The undominated sums of some points of the left operand with all of the right one."""
    memory = np.add.outer(left.memory[start:stop], right.memory).ravel()
    time = np.add.outer(left.time[start:stop], right.time).ravel()
    kept = undominated(memory, time)
    return memory[kept], time[kept], kept + start * len(right)
