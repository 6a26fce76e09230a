"""Which stage holds which layers, and how many of them does each stage recompute?

For every layout, all cuts of the layers into stages and all numbers N of layers that each stage
recomputes fully are searched, exactly: under the predictions of `timing` and `memory` the frontier
of time and memory misses nothing. A cut is any list of layers per stage that gives stages between
the first and the last at least one; with leading layers of another kind the first stage holds them.
Interleaved stages are not cut here.

Two facts make that fast. *Time* sees of a cut only the layers of the first, the last and the
largest stage: a step is as slow as its slowest stage. *Memory* is that of the fullest stage, and a
stage needs more with every layer. So frontiers of stages combine by the maximum: to place B layers
on the stages in between takes the B-th smallest cost of all the layers they could hold. What is
left is a walk over (N, layers of the largest stage, of the first, of the last), in which bounds on
time and memory skip what a strategy that is known already beats. If neither the first nor the last
stage is the largest, the one before the last is: it keeps fewest micro-batches in flight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.columns import Columns, Cut, Integers, repeated
from tenplex_megatron.planner.incumbents import Incumbents
from tenplex_megatron.planner.paces import Paces
from tenplex_megatron.planner.stage_costs import StageCosts
from tenplex_megatron.planner.tracked import Tracked, filled

__all__ = ["LayerSearch"]

type Floats = NDArray[np.float64]
type Flags = NDArray[np.bool_]

COSTS_AT_ONCE = 1 << 18
"""Costs of layers looked at together; what is found in one part spares work in the next."""
CUTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What is still open of its cuts: the sizes of all stages but the largest."""

    layout: Integers
    recomputed: Integers
    largest: Integers
    least_s: Floats
    """No cut is faster."""

    def at(self, places: Integers | Flags) -> "_Rows":
        return _Rows(*(getattr(self, field.name)[places] for field in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Bytes by number of layers, for each row; infinite past the largest stage."""

    first: Floats
    """`[row, layers]` from 0 layers on."""
    last: Floats
    between: Floats
    """`[row, stage, layers - 1]`."""

    def at(self, places: Integers | Flags) -> "_Costs":
        return _Costs(self.first[places], self.last[places], self.between[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSearch:
    """The search over cuts and recomputed layers of layouts that are columns."""

    layouts: Columns
    num_layers: int
    paces: Paces
    costs: StageCosts
    may_none: bool
    """Whether nothing may be recomputed."""
    may_some: bool
    """Whether some layers of a stage may be."""
    may_all: bool

    def run(self, layout: Integers, known: Incumbents) -> Tracked:
        """The cuts of these layouts that belong to the frontier, which `known` becomes.

        The layouts have at least two stages and are not interleaved.
        """
        parts = []
        for rows in self._parts(self._promising(layout, known)):
            still = rows.at(self._have_room(rows, known))
            if len(still.layout):
                parts.append(self._cuts(still, known))
                known.add(parts[-1].memory_bytes, parts[-1].step_s)
        if not parts:
            none = np.empty(0, dtype=np.int64)
            return Tracked(none, none, none, none, none, np.empty(0), np.empty(0))
        found = Tracked.joined(parts)
        return found.at(known.holds(found.memory_bytes, found.step_s))

    # ---- what is worth a look ---------------------------------------------------------------

    def _promising(self, layout: Integers, known: Incumbents) -> _Rows:
        """Recomputed layers and largest stages with which a cut can be new to the frontier."""
        pp = self.layouts.pp[layout]
        whole = np.full_like(layout, self.num_layers)
        smallest = -(-whole // pp)
        below = known.memory_to_beat(self.paces.least_step_s(layout, smallest))
        open_ = self.costs.have_room(layout, below, largest=whole)
        layout, pp, smallest = layout[open_], pp[open_], smallest[open_]
        row, largest = repeated(smallest, self.num_layers - np.maximum(pp - 3, 0) - smallest + 1)
        layout = layout[row]
        below = known.memory_to_beat(self.paces.least_step_s(layout, largest))
        # Neighbours often have the same bytes to stay below: they need one look.
        is_new = np.ones(len(layout), dtype=np.bool_)
        is_new[1:] = (layout[1:] != layout[:-1]) | (below[1:] != below[:-1])
        look, whole = np.flatnonzero(is_new), np.full_like(layout, self.num_layers)
        has_room = self.costs.have_room(layout[look], below[look], largest=whole[look])
        open_ = has_room[np.cumsum(is_new) - 1]
        layout, largest = layout[open_], largest[open_]
        row, recomputed = repeated(np.zeros_like(largest), largest + 1)
        layout, largest = layout[row], largest[row]
        is_plain = self.layouts.recompute[layout] == 0
        allowed = np.where(
            recomputed == 0,
            self.may_none | ~is_plain,
            is_plain & np.where(recomputed == largest, self.may_all, self.may_some),
        )
        layout, recomputed, largest = (one[allowed] for one in (layout, recomputed, largest))
        least_s = self.paces.least_step_s(layout, largest, recomputed)
        rows = _Rows(layout, recomputed, largest, least_s)
        return rows.at(self._have_room(rows, known))

    def _have_room(self, rows: _Rows, known: Incumbents) -> Flags:
        """Whether a cut of each row can still be new to the frontier."""
        return self.costs.have_room(
            rows.layout,
            known.memory_to_beat(rows.least_s),
            largest=rows.largest,
            recomputed=rows.recomputed,
        )

    def _parts(self, rows: _Rows) -> Iterator[_Rows]:
        """Rows of similar numbers of stages, not too many at once, the fastest first."""
        pp = self.layouts.pp[rows.layout]
        size = np.frexp(pp.astype(np.float64))[1]
        for kind in np.unique(size):
            some = rows.at(size == kind)
            some = some.at(np.argsort(some.least_s, kind="stable"))
            most = int(pp[size == kind].max()) * int(some.largest.max() + 1)
            step = max(1, COSTS_AT_ONCE // most)
            for start in range(0, len(some.layout), step):
                yield some.at(np.arange(start, min(start + step, len(some.layout))))

    # ---- cuts -------------------------------------------------------------------------------

    def _stage_costs(self, rows: _Rows | Tracked) -> _Costs:
        most = int(rows.largest.max())
        layers = np.arange(most + 1)
        is_past = layers > rows.largest[:, None]
        first = self.costs.first(rows.layout, rows.recomputed, most)
        last = self.costs.last(rows.layout, rows.recomputed, most)
        between = self.costs.between(rows.layout, rows.recomputed, most)
        first[is_past] = last[is_past] = np.inf
        return _Costs(first, last, np.where(is_past[:, None, 1:], np.inf, between))

    def _cuts(self, rows: _Rows, known: Incumbents) -> Tracked:
        """The cuts of some rows that `known` does not beat."""
        costs = self._stage_costs(rows)
        row, first, last = self._ends(rows, costs, known.memory_to_beat(rows.least_s))
        layout, recomputed, largest = (
            column[row] for column in (rows.layout, rows.recomputed, rows.largest)
        )
        found = Tracked(
            layout,
            recomputed,
            largest,
            first,
            last,
            self.paces.step_s(layout, recomputed, largest=largest, first=first, last=last),
            np.maximum(costs.first[row, first], costs.last[row, last]),
        )
        if costs.between.shape[1]:
            found = found.in_need_of(np.where(self._between(layout), costs.between[row, 0, 0], 0.0))
            # Where neither end is as large as the largest stage, the last before the end is.
            largest_needs = costs.between[row, self._between(layout) - 1, largest - 1]
            found = found.in_need_of(np.where(found.is_largest_between, largest_needs, 0.0))
            open_ = np.flatnonzero(~known.beat(found.memory_bytes, found.step_s))
            row, found = row[open_], found.at(open_)
            found = found.in_need_of(self._shared(costs.between, row, found))
        return found.at(~known.beat(found.memory_bytes, found.step_s))

    def _between(self, layout: Integers) -> Integers:
        """Stages between the first and the last."""
        return self.layouts.pp[layout] - 2

    def _shared(self, between: Floats, row: Integers, found: Tracked) -> Floats:
        """What the fullest stage needs of those that share what the others leave."""
        used, place = np.unique(row, return_inverse=True)
        between = between[used]
        rest = self.num_layers - found.first - found.last
        is_between = found.is_largest_between
        shared = _fullest(between, place, np.where(is_between, 0, rest))
        # The last of them holds the largest number of layers: the others share what is left.
        between[place, self._between(found.layout) - 1] = np.inf
        others = np.where(is_between, rest - found.largest, 0)
        return np.maximum(shared, _fullest(between, place, others))

    def _ends(
        self, rows: _Rows, costs: _Costs, below: Floats
    ) -> tuple[Integers, Integers, Integers]:
        """Rows with layers of the first and of the last stage that leave a cut `below` so much."""
        leading, whole, between = (
            self.costs.num_leading,
            self.num_layers,
            self._between(rows.layout),
        )
        first_most = leading - 1 + (costs.first[:, leading:] < below[:, None]).sum(axis=1)
        last_most = (costs.last < below[:, None]).sum(axis=1) - 1
        room = (costs.between < below[:, None, None]).sum(axis=(1, 2))
        is_possible = last_most >= 0
        if costs.between.shape[1]:
            is_possible &= (between == 0) | (costs.between[:, 0, 0] < below)
        least = np.maximum(leading, whole - last_most - room)
        most = np.minimum(first_most, whole - between)
        row, first = repeated(least, np.where(is_possible, np.maximum(most - least + 1, 0), 0))
        least = np.maximum(0, whole - room[row] - first)
        most = np.minimum(last_most[row], whole - between[row] - first)
        part, last = repeated(least, np.maximum(most - least + 1, 0))
        row, first = row[part], first[part]
        largest, between = rows.largest[row], between[row]
        is_whole = (first == largest) | (last == largest)
        if costs.between.shape[1]:
            fits = costs.between[row, between - 1, largest - 1] < below[row]
            fits &= whole - first - last >= largest + between - 1
            is_whole |= fits & (between > 0)
        return row[is_whole], first[is_whole], last[is_whole]

    # ---- what was found ---------------------------------------------------------------------

    def cuts_of(self, found: Tracked) -> list[Cut]:
        """Their stages: as equal as the memory they were found with allows."""
        cuts: list[Cut] = []
        for start in range(0, len(found.layout), CUTS_AT_ONCE):
            some = found.at(np.arange(start, min(start + CUTS_AT_ONCE, len(found.layout))))
            costs = self._stage_costs(some).between
            room = (costs <= some.memory_bytes[:, None, None]).sum(axis=2)
            for number, between in enumerate(self._between(some.layout).tolist()):
                first, last, largest = (
                    int(column[number]) for column in (some.first, some.last, some.largest)
                )
                rest = self.num_layers - first - last
                forced = 0 if max(first, last) == largest else largest
                stages = filled(room[number, :between].tolist(), rest, forced)
                cuts.append((between + 2, 1, (first, *stages, last)))
        return cuts


def _fullest(costs: Floats, row: Integers, layers: Integers) -> Floats:
    """The least that the fullest stage of a row needs when they hold so many layers together."""
    if costs.size == 0:
        return np.zeros(len(row))
    ordered = np.sort(costs.reshape(len(costs), -1), axis=1)
    return np.where(layers > 0, ordered[row, np.maximum(layers - 1, 0)], 0.0)
