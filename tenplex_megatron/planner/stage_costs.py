"""How many bytes does a stage need for any number of layers it may hold?

For layouts without interleaving a stage is known by its place: the first has the embedding, the
last the loss, those in between differ only in how many micro-batches are in flight.
"""

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import Columns, Integers
from tenplex_megatron.planner.memory.chunks import Chunks
from tenplex_megatron.planner.memory.predict import ALLOCATOR_FACTOR, required_bytes
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.memory.stages import (
    WORKSPACE_BYTES,
    StageBytes,
    stage_bytes,
)
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["StageCosts"]

type Floats = NDArray[np.float64]

ROWS_AT_ONCE = 1024


class StageCosts:
    """What devices of a stage need, in the bytes of `MemoryPrediction.required_bytes`."""

    def __init__(
        self, model: ModelProfile, cluster: ClusterProfile, layouts: Columns, prices: Prices
    ) -> None:
        self.model, self.cluster, self.layouts, self.prices = model, cluster, layouts, prices
        self.num_leading = model.num_dense_layers if model.num_experts else 0
        """Layers of another kind, all of which the first stage holds."""

    def have_room(
        self,
        layout: Integers,
        below: Floats,
        *,
        largest: Integers,
        recomputed: Integers | None = None,
    ) -> NDArray[np.bool_]:
        """Whether the stages of a cut can stay below so many bytes; False only where none can.

        Of a stage only what grows with its layers is counted, and what its backward pass holds.
        Without `recomputed` any number of its layers may be.
        """
        has_room = np.empty(len(layout), dtype=np.bool_)
        order = np.argsort(self.layouts.pp[layout])
        # Rows of similar numbers of stages waste least room in a table.
        for start in range(0, len(layout), ROWS_AT_ONCE):
            some = order[start : start + ROWS_AT_ONCE]
            again = None if recomputed is None else recomputed[some]
            has_room[some] = self._have_room(layout[some], below[some], largest[some], again)
        return has_room

    def _have_room(
        self, layout: Integers, below: Floats, largest: Integers, recomputed: Integers | None
    ) -> NDArray[np.bool_]:
        prices, layers = self.prices, self.model.num_layers - self.num_leading
        has_experts = self.model.num_experts > 0
        pp = self.layouts.pp[layout]
        stage = np.arange(pp.max(initial=1))
        flight = np.minimum(self.layouts.num_micro_batches[layout][:, None], pp[:, None] - stage)
        flight = np.maximum(flight, 1)
        state = prices.layer_state(has_experts=has_experts)[layout][:, None]
        kept = (prices.expert_kept if has_experts else prices.dense_kept)[layout]
        moment = prices.layer_moment(has_experts=has_experts)[layout]
        if recomputed is not None:
            moment = moment + np.where(recomputed > 0, kept, 0.0)
        peak = (below - self.cluster.context_bytes) / ALLOCATOR_FACTOR
        room = (peak - WORKSPACE_BYTES - moment)[:, None]
        first = state + flight * prices.recomputed[layout][:, None]
        count = room / first
        if recomputed is not None:
            again = recomputed[:, None]
            others = state + flight * kept[:, None]
            count = np.where(count > again, again + (room - again * first) / others, count)
        count = np.clip(np.floor(count * (1 + 1e-9)), 0, largest[:, None])
        has_room: NDArray[np.bool_] = np.where(stage < pp[:, None], count, 0).sum(axis=1) >= layers
        return has_room

    def first(self, layout: Integers, recomputed: Integers, most: int) -> Floats:
        """`[row, layers]` of the first stage, for 0 to `most` layers; infinite where impossible."""
        flight = np.minimum(self.layouts.num_micro_batches[layout], self.layouts.pp[layout])
        found = self._stages(layout, recomputed, most, stage=0, flight=flight)
        costs = required_bytes(found.total, self.cluster.context_bytes).reshape(-1, most + 1)
        costs[:, : self.num_leading] = np.inf
        return costs

    def last(self, layout: Integers, recomputed: Integers, most: int) -> Floats:
        """`[row, layers]` of the last stage, for 0 to `most` layers."""
        one = np.ones_like(layout)
        found = self._stages(layout, recomputed, most, stage=-1, flight=one)
        return required_bytes(found.total, self.cluster.context_bytes).reshape(-1, most + 1)

    def between(self, layout: Integers, recomputed: Integers, most: int) -> Floats:
        """`[row, stage, layers]` of the other stages, for 1 to `most` layers.

        Infinite past the stages that a layout has.
        """
        one = np.ones_like(layout)
        found = self._stages(layout, recomputed, most, stage=1, flight=one)
        pp = self.layouts.pp[layout][:, None]
        # Nothing but activations grows with the micro-batches in flight.
        in_flight = pp - 1 - np.arange(max(int(pp.max(initial=0)) - 2, 0))
        flight = np.minimum(self.layouts.num_micro_batches[layout][:, None], in_flight)
        kept, *others = (
            column.reshape(-1, 1, most + 1)[:, :, 1:]
            for column in (
                *(found.activations, found.parameters, found.gradients, found.optimizer),
                *(found.moment, found.step),
            )
        )
        parameters, gradients, optimizer, moment, step = others
        kept = flight[:, :, None] * kept
        peak = StageBytes(parameters, gradients, optimizer, kept, moment, step).total
        costs = required_bytes(peak, self.cluster.context_bytes)
        costs[in_flight < 2] = np.inf
        return costs

    def _stages(
        self, layout: Integers, recomputed: Integers, most: int, *, stage: int, flight: Integers
    ) -> StageBytes:
        """Stages at one place, with 0 to `most` layers for each row."""
        count = most + 1
        place = np.repeat(layout, count)
        layers = np.tile(np.arange(count), len(layout))
        of_experts = self.model.num_experts > 0
        leading = np.minimum(layers, self.num_leading if stage == 0 else 0)
        dense = leading if of_experts else layers
        nothing = np.zeros_like(layers)
        chunks = Chunks(
            strategy=place,
            stage=nothing + stage if stage >= 0 else self.layouts.pp[place] - 1,
            number=nothing,
            dense=dense,
            experts=layers - dense,
            has_embedding=nothing + (stage == 0),
            has_output=nothing + (stage == -1),
            stages=np.arange(len(layers)),
        )
        return stage_bytes(
            self.model,
            self.layouts,
            self.prices,
            chunks,
            flight=np.repeat(flight, count),
            recomputed=np.repeat(recomputed, count),
        )
