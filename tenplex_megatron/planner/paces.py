"""How long does a step take, given only the layers of the first, the largest and the last stage?

That is all that `timing` sees of a cut. Of a cut whose first and last stage are still open there is
a lower bound, from the same formulas: a step is no faster than with the fewest recomputed layers
and with no stage slower than the largest.
"""

from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import Columns, Integers
from tenplex_megatron.planner.estimate import candidates
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.timing import communication, pipeline
from tenplex_megatron.planner.timing.candidates import FULL, SELECTIVE, Candidates
from tenplex_megatron.planner.timing.predict import (
    edge_times,
    layer_times,
    outside_passes,
    predict_times,
)

__all__ = ["Paces"]

type Floats = NDArray[np.float64]

ROUNDING = 1 - 1e-12
"""A bound is this much lower than computed, so that rounding can't make it one that isn't."""


class Paces:
    """Step times of layouts by the sizes of their stages; layouts recompute no layer fully."""

    def __init__(self, model: ModelProfile, cluster: ClusterProfile, layouts: Columns) -> None:
        self.num_layers, self.cluster = model.num_layers, cluster
        self.candidates = candidates(model, layouts)
        layer = layer_times(cluster, self.candidates)
        selective_s = np.where(
            self.candidates.recompute == SELECTIVE, layer.selective_recompute_s, 0.0
        )
        self.backward_s = layer.backward_s + selective_s
        self.layer_s = layer.forward_s + self.backward_s
        self.recompute_s = layer.full_recompute_s
        self.edges_s = np.sum(edge_times(cluster, self.candidates), axis=0)
        self.send_s = communication.send_s(cluster, self.candidates)

    def least_step_s(
        self, layout: Integers, largest: Integers, recomputed: Integers | None = None
    ) -> Floats:
        """No cut with a largest stage of so many layers is faster.

        Every stage recomputes `recomputed` layers, all of it if it has fewer; None for any number.
        """
        again_s, nothing = self.recompute_s[layout], np.zeros(len(layout))
        layers = np.zeros_like(largest) if recomputed is None else recomputed
        # What is recomputed takes time, and gives reductions time to hide in.
        hiding_s = np.where(layers > 0, again_s, 0.0) if recomputed is not None else again_s
        chosen = self._chosen(layout, layers, largest, largest, largest)
        slowest_s = largest * self.layer_s[layout] + np.minimum(largest, layers) * again_s
        total_s = self.num_layers * self.layer_s[layout] + self.edges_s[layout]
        total_s += self._fewest_recomputed(chosen.pp, layers, largest) * again_s
        (busy_s, bubble_s), (_, least_bubble_s) = (
            pipeline.schedule_s(
                chosen, pipeline.StageTimes(slow_s, nothing, nothing, total_s), self.send_s[layout]
            )
            for slow_s in (slowest_s, slowest_s + self.edges_s[layout])
        )
        # A slower stage costs more than the bubble around it shrinks, unless gathering hides it.
        bubble_s = np.where(chosen.zero_stage < 3, bubble_s, least_bubble_s)
        rest = outside_passes(
            self.cluster,
            chosen,
            busy_s=busy_s,
            last_backward_s=largest * (self.backward_s[layout] + hiding_s),
        )
        return (busy_s + bubble_s + sum(rest.values())) * ROUNDING

    def _fewest_recomputed(self, pp: Floats, recomputed: Integers, largest: Integers) -> Floats:
        """The fewest layers that `pipeline.stage_times` counts as recomputed.

        Their number is concave in the layers of the first and the last stage, so that it is least
        where both have as few or as many as they may.
        """
        between = np.maximum(pp - 2, 0)
        most = np.minimum(largest, self.num_layers - between)
        rest = np.minimum(largest, self.num_layers - between - most)

        def counted(first: Floats | int, last: Floats | int) -> Floats:
            middle = np.minimum(self.num_layers - first - last, recomputed * between)
            return np.minimum(first, recomputed) + np.minimum(last, recomputed) + middle

        fewest = np.minimum(counted(most, 0), counted(most, rest))
        return np.where(between > 0, np.minimum(counted(0, 0), fewest), counted(most, rest))

    def step_s(
        self,
        layout: Integers,
        recomputed: Integers,
        *,
        largest: Integers,
        first: Integers,
        last: Integers,
    ) -> Floats:
        """Seconds of one step."""
        middle = np.where(self.candidates.pp[layout] > 2, largest, 0)
        chosen = self._chosen(layout, recomputed, first, middle, last)
        return np.asarray(predict_times(self.cluster, chosen).step_s)

    def _chosen(
        self,
        layout: Integers,
        recomputed: Integers,
        first: Integers,
        middle: Integers,
        last: Integers,
    ) -> Candidates:
        some = Candidates(
            **{
                field.name: getattr(self.candidates, field.name)[layout]
                for field in fields(Candidates)
            }
        )
        return replace(
            some,
            first_stage_layers=first.astype(np.float64),
            middle_stage_layers=middle.astype(np.float64),
            last_stage_layers=last.astype(np.float64),
            recompute=np.where(recomputed > 0, FULL, some.recompute),
            recompute_layers=np.where(recomputed > 0, recomputed, self.num_layers) * 1.0,
        )
