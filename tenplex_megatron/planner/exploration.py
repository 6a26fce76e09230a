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
    repeated,
)
from tenplex_megatron.planner.cuts import balanced_cuts, stage_sizes
from tenplex_megatron.planner.estimate import memory_bytes, step_times
from tenplex_megatron.planner.incumbents import Incumbents
from tenplex_megatron.planner.layers import LayerSearch
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.paces import Paces
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.stage_costs import StageCosts

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
        layout, cut, step_s = self._balanced()
        kinds = self.scope.recompute
        is_plain = self.layouts.recompute[layout] == 0
        none = np.zeros_like(layout)
        none_bytes, full_bytes = self._memory_bytes(
            layout, cut, np.stack([none, none + self.model.num_layers])
        )
        # Layouts that are not plain recompute attention, and no layer besides.
        kept = np.flatnonzero(~is_plain | ("none" in kinds))
        self._add(layout[kept], cut[kept], none[kept], step_s[kept], none_bytes[kept])
        if "full" in kinds:
            plain = np.flatnonzero(is_plain)
            layout, cut, full_bytes = layout[plain], cut[plain], full_bytes[plain]
            self._add(layout, cut, none[plain] + ALL_LAYERS, memory=full_bytes)
            if self.scope.some_layers:
                if "none" in kinds:
                    self._make_fit(layout, cut, step_s[plain], none_bytes[plain], full_bytes)
                self._recompute_some(layout, cut, full_bytes)
        if self.scope.uneven_stages:
            self._track()
        columns = Columns.joined(self.columns, tuple(self.cuts))
        return (
            Strategies(columns),
            np.concatenate(self.step_s),
            np.concatenate(self.memory_bytes),
        )

    def _balanced(self) -> tuple[Integers, Integers, Floats]:
        """Every layout with its balanced cuts, and their times without full recomputation.

        Where all cuts are searched, the fastest balanced one is enough to begin with.
        """
        pairs, pair = distinct(self.layouts.pp, self.layouts.vpp)
        starts = []
        for pp, vpp in pairs:
            starts.append(len(self.cuts))
            self.cuts += balanced_cuts(
                self.model.num_layers, pp, vpp, uneven=self.scope.uneven_stages
            )
        counts = np.diff(starts, append=len(self.cuts))
        layout, cut = repeated(np.array(starts)[pair], counts[pair])
        step_s = step_times(
            self.model, self.cluster, self._columns(layout, cut, np.zeros_like(layout))
        )
        best = np.minimum.reduceat(step_s, np.flatnonzero(np.diff(layout, prepend=-1)))
        fastest = np.flatnonzero(step_s == best[layout])
        kept = ~self._is_covered(layout, cut)
        kept[fastest[np.diff(layout[fastest], prepend=-1) > 0]] = True
        return layout[kept], cut[kept], step_s[kept]

    def _make_fit(
        self,
        layout: Integers,
        cut: Integers,
        step_s: Floats,
        none_bytes: Floats,
        full_bytes: Floats,
    ) -> None:
        """Balanced cuts that are nearly the best, with the fewest recomputed layers that fit."""
        limit = self.cluster.memory_bytes
        is_near = step_s <= NEAR * self.known.least_time(limit)
        near = np.flatnonzero(is_near & (none_bytes > limit) & (full_bytes <= limit))
        layout, cut = layout[near], cut[near]
        low, high = np.ones_like(near), self._largest_chunks[cut]
        most = high.copy()
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            fits = self._memory_bytes(layout[open_], cut[open_], middle) <= limit
            high[open_] = np.where(fits, middle, high[open_])
            low[open_] = np.where(fits, low[open_], middle + 1)
        some = np.flatnonzero(high < most)
        self._add(layout[some], cut[some], high[some])

    def _recompute_some(self, layout: Integers, cut: Integers, full: Floats) -> None:
        """Balanced cuts that recompute some layers of each stage or chunk."""
        most = self._largest_chunks[cut]
        open_ = np.flatnonzero(~self._is_covered(layout, cut) & (most > 1))
        layout, cut, most, full = layout[open_], cut[open_], most[open_], full[open_]
        # More layers take more time and leave less to keep.
        least_s = step_times(
            self.model, self.cluster, self._columns(layout, cut, np.ones_like(layout))
        )
        open_ = np.flatnonzero(~self.known.beat(full, least_s))
        row, layers = repeated(np.ones_like(open_), most[open_] - 1)
        layout, cut = layout[open_][row], cut[open_][row]
        needed = self._memory_bytes(layout, cut, layers)
        step_s = step_times(self.model, self.cluster, self._columns(layout, cut, layers))
        open_ = np.flatnonzero(~self.known.beat(needed, step_s))
        self._add(layout[open_], cut[open_], layers[open_], step_s[open_])

    @property
    def _largest_chunks(self) -> Integers:
        """Layers of the largest chunk of every cut."""
        layers = self.model.num_layers
        return np.array(
            [layers // (pp * vpp) if sizes is None else max(sizes) for pp, vpp, sizes in self.cuts]
        )

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

    def _add(
        self,
        layout: Integers,
        cut: Integers,
        layers: Integers,
        step_s: Floats | None = None,
        memory: Floats | None = None,
    ) -> None:
        """Strategies that recompute so many layers fully are found."""
        if not len(layout):
            return
        columns = self._columns(layout, cut, layers)
        if step_s is None:
            step_s = step_times(self.model, self.cluster, columns)
        if memory is None:
            memory = self._memory_bytes(layout, cut, layers)
        self.columns.append(columns)
        self.step_s.append(step_s)
        self.memory_bytes.append(memory)
        self.known.add(memory, step_s)

    def _memory_bytes(self, layout: Integers, cut: Integers, layers: Integers) -> Floats:
        """Bytes of strategies that recompute so many layers, or of variants of them."""
        if not len(layout):
            return np.empty(0)
        return memory_bytes(
            self.model,
            self.cluster,
            self._columns(layout, cut, np.zeros_like(layout)),
            layouts=(self.layouts, self.prices, layout),
            recomputed=np.where(layers == ALL_LAYERS, self.model.num_layers, layers),
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
