"""Which strategies of some layouts are worth a look?

First every layout with balanced stages that recompute no or all layers; then the recomputation of
some layers, and cuts of any kind, as far as they belong to the frontier.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import (
    ALL_LAYERS,
    RECOMPUTES,
    Columns,
    Cut,
    Integers,
    Strategies,
    distinct,
)
from tenplex_megatron.planner.cuts import balanced_cuts, stage_sizes
from tenplex_megatron.planner.estimate import memory_bytes, step_times
from tenplex_megatron.planner.incumbents import Incumbents
from tenplex_megatron.planner.layers import LayerSearch
from tenplex_megatron.planner.memory.chunks import repeated
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.paces import Paces
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.stage_costs import StageCosts
from tenplex_megatron.planner.strategy import Recompute

__all__ = ["Exploration"]

type Floats = NDArray[np.float64]
type Flags = NDArray[np.bool_]

NEAR = 1.25
"""Strategies that take at most so many times the best time that fits are runners-up."""


class Exploration:
    """The strategies found so far, and the best costs among them."""

    def __init__(
        self, model: ModelProfile, cluster: ClusterProfile, found: Columns, scope: Scope
    ) -> None:
        self.model, self.cluster, self.layouts, self.scope = model, cluster, found, scope
        self.prices = Prices.of(model, found)
        self.cuts: list[Cut] = []
        self.known = Incumbents()
        self.columns: list[Columns] = []
        self.step_s: list[Floats] = []
        self.memory_bytes: list[Floats] = []

    def run(self) -> tuple[Strategies, Floats, Floats]:
        """The strategies, their times and the bytes they need."""
        layout, cut = self._balanced()
        if "full" in self.scope.recompute and self.scope.some_layers:
            self._recompute_some(layout, cut)
        if self.scope.uneven_stages:
            self._track()
        columns = Columns.joined(self.columns, tuple(self.cuts))
        return (
            Strategies(columns),
            np.concatenate(self.step_s),
            np.concatenate(self.memory_bytes),
        )

    def _balanced(self) -> tuple[Integers, Integers]:
        """Every layout with its balanced cuts, which recomputes no or all layers."""
        pairs, pair = distinct(self.layouts.pp, self.layouts.vpp)
        starts = []
        for pp, vpp in pairs:
            starts.append(len(self.cuts))
            self.cuts += balanced_cuts(
                self.model.num_layers, pp, vpp, uneven=self.scope.uneven_stages
            )
        starts_ = np.array(starts)
        counts = np.diff(starts_, append=len(self.cuts))
        layout, cut = repeated(starts_[pair], counts[pair])
        if self.scope.uneven_stages:
            kept = self._fastest_or_untracked(layout, cut)
            layout, cut = layout[kept], cut[kept]
        for kind in ("none", "full"):
            places = np.flatnonzero(self._may(layout, kind))
            layers = np.full(len(places), 0 if kind == "none" else ALL_LAYERS)
            self._add(layout[places], cut[places], layers)
        return layout, cut

    def _fastest_or_untracked(self, layout: Integers, cut: Integers) -> Flags:
        """Of layouts of which all cuts are searched one balanced cut is enough, the fastest."""
        step_s = step_times(
            self.model, self.cluster, self._columns(layout, cut, np.zeros_like(layout))
        )
        best = np.full(len(self.layouts), np.inf)
        np.minimum.at(best, layout, step_s)
        is_best = np.flatnonzero(step_s == best[layout])
        kept = ~self._is_covered(layout, cut)
        _, first = np.unique(layout[is_best], return_index=True)
        kept[is_best[first]] = True
        return kept

    def _recompute_some(self, layout: Integers, cut: Integers) -> None:
        """Balanced cuts that recompute some layers of each stage or chunk."""
        chunk = np.array([_largest_chunk(one, self.model.num_layers) for one in self.cuts])
        kept = (self.layouts.recompute[layout] == 0) & (chunk[cut] > 1)
        layout, cut = layout[kept], cut[kept]
        one = np.ones_like(layout)
        # More layers take more time and leave less to keep.
        fastest = step_times(self.model, self.cluster, self._columns(layout, cut, one))
        smallest = self._memory_bytes(layout, cut, one * ALL_LAYERS)
        self._add_near(layout, cut, fastest=fastest, smallest=smallest, most=chunk[cut])
        open_ = ~self.known.beat(smallest, fastest) & ~self._is_covered(layout, cut)
        row, layers = repeated(one[open_], chunk[cut[open_]] - 1)
        layout, cut = layout[open_][row], cut[open_][row]
        needed = self._memory_bytes(layout, cut, layers)
        step_s = step_times(self.model, self.cluster, self._columns(layout, cut, layers))
        open_ = ~self.known.beat(needed, step_s)
        self._add(layout[open_], cut[open_], layers[open_])

    def _add_near(
        self,
        layout: Integers,
        cut: Integers,
        *,
        fastest: Floats,
        smallest: Floats,
        most: Integers,
    ) -> None:
        """Add the fewest recomputed layers with which layouts fit that are nearly the best."""
        limit = self.cluster.memory_bytes
        best = self.known.least_time(limit)
        near = np.flatnonzero((fastest <= NEAR * best) & (smallest <= limit))
        near = near[self._memory_bytes(layout[near], cut[near], np.zeros_like(near)) > limit]
        layout, cut = layout[near], cut[near]
        low, high = np.ones_like(near), most[near]
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            fits = self._memory_bytes(layout[open_], cut[open_], middle) <= limit
            high[open_] = np.where(fits, middle, high[open_])
            low[open_] = np.where(fits, low[open_], middle + 1)
        some = np.flatnonzero(high < most[near])
        self._add(layout[some], cut[some], high[some])

    def _is_tracked(self, layout: Integers) -> Flags:
        """Whether other cuts of these layouts are searched than balanced ones."""
        is_tracked: Flags = (self.layouts.vpp[layout] == 1) & (self.layouts.pp[layout] > 1)
        return is_tracked & self.scope.uneven_stages

    def _is_covered(self, layout: Integers, cut: Integers) -> Flags:
        """Whether these cuts are among those that are searched."""
        first = [stage_sizes(one, self.model.num_layers)[0] for one in self.cuts]
        leading = self.model.num_dense_layers if self.model.num_experts else 0
        is_covered: Flags = np.array(first)[cut] >= leading
        return is_covered & self._is_tracked(layout)

    def _track(self) -> None:
        """Any cut into stages, with any number of recomputed layers."""
        layout = np.arange(len(self.layouts))
        layout = layout[self._is_tracked(layout)]
        recompute = self.scope.recompute
        tracking = LayerSearch(
            layouts=self.layouts,
            num_layers=self.model.num_layers,
            paces=Paces(self.model, self.cluster, self.layouts),
            costs=StageCosts(self.model, self.cluster, self.layouts, self.prices),
            may_none="none" in recompute,
            may_some="full" in recompute and self.scope.some_layers,
            may_all="full" in recompute,
        )
        found = tracking.run(layout, self.known)
        cut = np.arange(len(found.layout)) + len(self.cuts)
        self.cuts += tracking.cuts_of(found)
        is_all = found.recomputed == found.largest
        self._add(found.layout, cut, np.where(is_all, ALL_LAYERS, found.recomputed))

    def _may(self, layout: Integers, kind: Recompute) -> Flags:
        is_plain: Flags = self.layouts.recompute[layout] == 0
        if kind == "full":
            return is_plain & ("full" in self.scope.recompute)
        return ~is_plain | ("none" in self.scope.recompute)

    def _add(self, layout: Integers, cut: Integers, layers: Integers) -> None:
        if not len(layout):
            return
        columns = self._columns(layout, cut, layers)
        step_s = step_times(self.model, self.cluster, columns)
        needed = self._memory_bytes(layout, cut, layers)
        self.columns.append(columns)
        self.step_s.append(step_s)
        self.memory_bytes.append(needed)
        self.known.add(needed, step_s)

    def _memory_bytes(self, layout: Integers, cut: Integers, layers: Integers) -> Floats:
        if not len(layout):
            return np.empty(0)
        return memory_bytes(
            self.model,
            self.cluster,
            self._columns(layout, cut, layers),
            layouts=(self.layouts, self.prices, layout),
        )

    def _columns(self, layout: Integers, cut: Integers, layers: Integers) -> Columns:
        """Strategies that recompute so many layers fully."""
        some = self.layouts.at(layout)
        return replace(
            some,
            recompute=np.where(layers == 0, some.recompute, RECOMPUTES.index("full")),
            recompute_layers=np.where(layers == 0, ALL_LAYERS, layers),
            cut=cut,
            cuts=tuple(self.cuts),
        )


def _largest_chunk(cut: Cut, num_layers: int) -> int:
    pp, vpp, sizes = cut
    return num_layers // (pp * vpp) if sizes is None else max(sizes)
