"""How are many frontiers combined at once, and what did each point choose?

Tracking holds a frontier for every configuration of an operator and for every pair of an edge. A
table keeps them all in flat arrays, so that one numpy call works on all of them. Costs are whole
multiples of a quantum: sums are exact in any order, so equal strategies cost the same.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.frontier import undominated

__all__ = ["COST_BITS", "Choice", "Integers", "Pair", "Table", "Trace", "chosen", "join"]

type Integers = NDArray[np.int64]

COST_BITS = 46
"""Every total stays below 2 ** COST_BITS quanta: a cell's number fits above it in 64 bits."""
CELLS_AT_ONCE = 1 << 16
CANDIDATES_AT_ONCE = 1 << 19
# The coarse look: from how many points of a cell on it saves more than it costs, how many points
# share a slot of memory, and how many of a frontier are looked at together. All three were measured
# on chains of 24 to 500 operators; twice or half of each makes little difference.
FILTER_FROM = 64
SLOT_POINTS = 4
RUN_POINTS = 8
HIGHEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Each point is one configuration of one operator."""

    operator: str
    configuration: Integers


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Each point is the sum of one point of either operand."""

    left: "Trace"
    right: "Trace"
    left_index: Integers
    right_index: Integers


type Trace = Choice | Pair | None
"""What the points of a table were made from; None where no choice is behind them."""


def chosen(trace: Trace, points: Integers) -> dict[str, Integers]:
    """The configuration of every operator behind these points."""
    found = {}
    pending = [(trace, points)]
    while pending:
        trace, points = pending.pop()
        if isinstance(trace, Choice):
            found[trace.operator] = trace.configuration[points]
        elif isinstance(trace, Pair):
            pending.append((trace.left, trace.left_index[points]))
            pending.append((trace.right, trace.right_index[points]))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An array of frontiers, each a run of points: `memory[start[cell] :][: size[cell]]`.

    `start` and `size` have the same shape, one entry for each cell; cells may share their points.
    """

    start: Integers
    size: Integers
    memory: Integers
    time: Integers
    trace: Trace = None

    @classmethod
    def of(
        cls,
        memory: Integers,
        time: Integers,
        possible: NDArray[np.bool_],
        operator: str | None = None,
    ) -> Self:
        """One point in every cell that is possible; with `operator`, cells are configurations."""
        cells = np.arange(memory.size)
        return cls(
            cells.reshape(memory.shape),
            possible.astype(np.int64),
            memory.ravel(),
            time.ravel(),
            Choice(operator, cells) if operator is not None else None,
        )

    def __getitem__(self, cells: Any) -> Self:  # noqa: ANN401  # whatever numpy takes as an index
        return replace(self, start=self.start[cells], size=self.size[cells])

    def spread(self, axes: tuple[int, ...], onto: tuple[int, ...]) -> Self:
        """The same frontiers with the named axes in the order of `onto`, length 1 for new ones."""
        order = sorted(range(len(axes)), key=lambda number: onto.index(axes[number]))
        index = tuple(slice(None) if axis in axes else None for axis in onto)
        start, size = (cells.transpose(order)[index] for cells in (self.start, self.size))
        return replace(self, start=start, size=size)

    def thinned(self, width: int) -> "Table":
        """At most one point for every `width` of time in each frontier, and both its end points.

        What is left out has a substitute that needs no more memory and less than `width` more time.
        Only for what `join` returned.
        """
        assert isinstance(self.trace, Pair)
        cell = np.repeat(np.arange(self.size.size), self.size.ravel())
        slot = self.time // width
        is_last = np.ones(len(cell), dtype=np.bool_)
        np.not_equal(cell[1:], cell[:-1], out=is_last[:-1])
        stays = is_last.copy()
        stays[:1] = True
        stays[1:] |= is_last[:-1] | (slot[1:] != slot[:-1])
        if stays.all():
            return self
        left, right = self.trace.left_index, self.trace.right_index
        points = _Points(cell, self.memory, self.time, left, right).at(stays)
        return _table(points, self.size.shape, self.trace.left, self.trace.right)


class _Rows(NamedTuple):
    """Sums to form: a left point with each of `length` right points from `right` on, for a cell."""

    cell: Integers
    left: Integers
    right: Integers
    length: Integers

    def cut(self, stops: Integers) -> Iterator["_Rows"]:
        """The rows between every two neighbours of the ascending `stops`, and on either side."""
        if len(stops) == 0:
            yield self
            return
        for start, stop in pairwise(np.unique([0, *stops, len(self.cell)]).tolist()):
            yield _Rows(*(column[start:stop] for column in self))


class _Points(NamedTuple):
    """Sums by ascending cell and, in a frontier, by ascending memory within each."""

    cell: Integers
    memory: Integers
    time: Integers
    left: Integers
    right: Integers

    def at(self, kept: NDArray[Any]) -> "_Points":
        return _Points(*(column[kept] for column in self))


def join(left: Table, right: Table, *, unites: bool = False) -> Table:
    """The frontier of all sums of a left and a right point, cell by cell.

    The shapes broadcast against each other; with `unites`, the frontiers along the first axis
    become one.
    """
    shape = np.broadcast_shapes(left.start.shape, right.start.shape)
    depth = shape[0] if unites else 1
    zeros = np.zeros(shape, dtype=np.int64)  # adding them broadcasts, much faster for small tables
    left_start, left_size, right_start, right_size = (
        (column + zeros).reshape(depth, -1).T.ravel()
        for column in (left.start, left.size, right.start, right.size)
    )
    shape = shape[1:] if unites else shape
    cell = np.repeat(np.arange(math.prod(shape)), depth)
    # Few long rows sort faster than many short ones.
    if left_size @ (right_size > 0) <= right_size @ (left_size > 0):
        rows = _rows(cell, left_start, left_size, right_start, right_size)
        points = _frontiers(rows, left, right)
        return _table(points, shape, left.trace, right.trace)
    rows = _rows(cell, right_start, right_size, left_start, left_size)
    return _table(_frontiers(rows, right, left), shape, right.trace, left.trace)


def _rows(
    cell: Integers,
    left_start: Integers,
    left_size: Integers,
    right_start: Integers,
    right_size: Integers,
) -> _Rows:
    count = np.where(right_size > 0, left_size, 0)
    pair = np.repeat(np.arange(len(cell)), count)
    left = np.arange(len(pair)) + (left_start - (np.cumsum(count) - count))[pair]
    return _Rows(cell[pair], left, right_start[pair], right_size[pair])


def _table(points: _Points, shape: tuple[int, ...], left: Trace, right: Trace) -> Table:
    size = np.bincount(points.cell, minlength=math.prod(shape)).astype(np.int64)
    start = np.cumsum(size) - size
    trace = Pair(left, right, points.left, points.right)
    return Table(start.reshape(shape), size.reshape(shape), points.memory, points.time, trace)


def _frontiers(rows: _Rows, left: Table, right: Table) -> _Points:
    """The frontier of every cell that has rows."""
    if len(rows.cell) == 0 or (rows.cell[1:] > rows.cell[:-1]).all():
        return _sums(rows, left, right)  # one row a cell: a frontier moved by one point
    blocks = np.arange(CELLS_AT_ONCE, rows.cell[-1] + 1, CELLS_AT_ONCE)
    parts = [
        _frontiers_of_block(block, left, right)
        for block in rows.cut(np.searchsorted(rows.cell, blocks))
    ]
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def _frontiers_of_block(rows: _Rows, left: Table, right: Table) -> _Points:
    formed = np.cumsum(rows.length)
    stops = np.arange(CANDIDATES_AT_ONCE, formed[-1], CANDIDATES_AT_ONCE)
    parts = [
        _frontiers_of_part(part, left, right) for part in rows.cut(np.searchsorted(formed, stops))
    ]
    # A cell may have rows in several parts.
    return parts[0] if len(parts) == 1 else _reduced(_concatenated(parts))


def _frontiers_of_part(rows: _Rows, left: Table, right: Table) -> _Points:
    if rows.length.sum() > 2 * RUN_POINTS * len(rows.length):
        rows = _promising_rows(_short(rows), left, right)
    points = _sums(rows, left, right)
    kept = _promising(points.cell, points.memory, points.memory, points.time)
    return _reduced(points if kept is None else points.at(kept))


def _short(rows: _Rows) -> _Rows:
    """The same rows in pieces of at most RUN_POINTS."""
    count = (rows.length + (RUN_POINTS - 1)) // RUN_POINTS
    row = np.repeat(np.arange(len(count)), count)
    done = (np.arange(len(row)) - (np.cumsum(count) - count)[row]) * RUN_POINTS
    return _Rows(
        rows.cell[row],
        rows.left[row],
        rows.right[row] + done,
        np.minimum(rows.length[row] - done, RUN_POINTS),
    )


def _promising_rows(rows: _Rows, left: Table, right: Table) -> _Rows:
    last = rows.right + (rows.length - 1)
    base = left.memory[rows.left]
    kept = _promising(
        rows.cell,
        base + right.memory[rows.right],
        base + right.memory[last],
        left.time[rows.left] + right.time[last],
    )
    return rows if kept is None else _Rows(*(column[kept] for column in rows))


def _concatenated(parts: list[_Points]) -> _Points:
    return _Points(*map(np.concatenate, zip(*parts, strict=True)))


def _sums(rows: _Rows, left: Table, right: Table) -> _Points:
    first = np.cumsum(rows.length) - rows.length
    left_index = np.repeat(rows.left, rows.length)
    right_index = np.arange(len(left_index)) + np.repeat(rows.right - first, rows.length)
    return _Points(
        np.repeat(rows.cell, rows.length),
        left.memory[left_index] + right.memory[right_index],
        left.time[left_index] + right.time[right_index],
        left_index,
        right_index,
    )


def _reduced(points: _Points) -> _Points:
    """The frontier of every cell; the first and the last cell are less than CELLS_AT_ONCE apart."""
    offset = (points.cell - points.cell[0]) << COST_BITS
    return points.at(undominated(offset + points.memory, points.time - offset))


def _promising(cell: Integers, low: Integers, high: Integers, time: Integers) -> Integers | None:
    """Which runs of points a coarse look doesn't rule out, None for all of them.

    A run has memory from `low` up to `high`, where its best `time` is. The memory of each cell's
    points is cut into slots. A run is out when a slot before its first one, where every point needs
    less memory, holds a time as good as its best.
    """
    first = np.concatenate([[0], np.flatnonzero(cell[1:] != cell[:-1]) + 1])
    if len(cell) < FILTER_FROM * len(first):
        return None
    row = np.repeat(np.arange(len(first)), np.diff(first, append=len(cell)))
    lowest = np.minimum.reduceat(low, first)
    spread = np.maximum.reduceat(high, first) - lowest
    slot_bits = (len(cell) // (SLOT_POINTS * len(first))).bit_length()
    shift = np.maximum(np.frexp(spread.astype(np.float64))[1] - slot_bits, 0)
    # One slot more than there can be, ahead of them, so that each has one before it.
    width = (1 << slot_bits) + 1
    base = row * width + 1
    lowest, shift = lowest[row], shift[row]
    best = np.full(len(first) * width, HIGHEST)
    np.minimum.at(best, base + ((high - lowest) >> shift), time)
    best = np.minimum.accumulate(best.reshape(-1, width), axis=1).ravel()
    return np.flatnonzero(time < best[base + ((low - lowest) >> shift) - 1])
