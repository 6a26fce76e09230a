"""How much memory does every pipeline stage of a strategy take?

Parameters, gradients and optimizer state are exact (`parameters`); activations count what the
schedule keeps in flight on each stage; `transient` is what comes on top at the worst moment.  All
are bytes that torch's allocator counts as allocated on the fullest data-parallel rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import ALL_LAYERS, RECOMPUTES, Columns, Integers
from tenplex_megatron.planner.memory.activations import Floats
from tenplex_megatron.planner.memory.chunks import CutTable
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.memory.stages import StageBytes, in_flight, stage_bytes
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = [
    "ALLOCATOR_FACTOR",
    "MemoryPrediction",
    "MemoryTable",
    "StageMemory",
    "predict_memories",
    "predict_memory",
    "required_bytes",
]

ALLOCATOR_FACTOR = 1.1
"""Reserved over allocated memory; 1.046 on average and 1.093 at most on eight B200."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on a rank of one pipeline stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward pass, of all micro-batches in flight."""
    transient: float
    """Held at the worst moment besides all that."""

    @property
    def total(self) -> float:
        """The peak of the stage."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.transient


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Bytes of every stage of a strategy."""

    stages: tuple[StageMemory, ...]
    peak_bytes: float
    """Allocated on the fullest stage."""
    required_bytes: float
    """What a device must have: the peak, what the allocator loses, and the device's context."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """Predictions for many strategies."""

    stages: StageBytes
    """Of all strategies, one after the other; all of each, or those that can be the fullest."""
    starts: Integers
    """Place of every strategy's first stage, and behind the last one."""
    context_bytes: float

    @property
    def peak_bytes(self) -> Floats:
        """Of every strategy; see `MemoryPrediction`."""
        return np.maximum.reduceat(self.stages.total, self.starts[:-1], axis=-1)

    @property
    def required_bytes(self) -> Floats:
        """Of every strategy; see `MemoryPrediction`."""
        return required_bytes(self.peak_bytes, self.context_bytes)

    def prediction(self, index: int) -> MemoryPrediction:
        """The prediction for one strategy."""
        found = self.stages
        columns = (
            *(found.parameters, found.gradients, found.optimizer),
            *(found.activations, found.transient),
        )
        places = range(self.starts[index], self.starts[index + 1])
        stages = tuple(StageMemory(*(float(column[at]) for column in columns)) for at in places)
        peak = max(stage.total for stage in stages)
        return MemoryPrediction(stages, peak, peak * ALLOCATOR_FACTOR + self.context_bytes)


def required_bytes(peak_bytes: Floats, context_bytes: float) -> Floats:
    """What a device must have; see `MemoryPrediction`."""
    return peak_bytes * ALLOCATOR_FACTOR + context_bytes


def predict_memory(
    model: ModelProfile, cluster: ClusterProfile, strategy: Strategy
) -> MemoryPrediction:
    """The memory of one strategy."""
    return predict_memories(model, cluster, [strategy]).prediction(0)


def predict_memories(
    model: ModelProfile,
    cluster: ClusterProfile,
    strategies: Sequence[Strategy] | Columns,
    *,
    layouts: tuple[Columns, Prices, Integers] | None = None,
    recomputed: Integers | None = None,
    is_decisive: bool = False,
) -> MemoryTable:
    """The memory of many strategies of one model at once, much faster than one by one.

    Args:
        model: what is trained.
        cluster: on what.
        strategies: how, as values or as columns.
        layouts: strategies of which these differ in cuts and recomputed layers only, their prices,
            and the one that each of these is like.
        recomputed: leading layers of a chunk that keep only their input, `[variant, strategy]`, in
            place of what the strategies say.
        is_decisive: whether to look only at the stages that can be the fullest.

    Raises:
        ConfigError: there are no strategies.
    """
    if not len(strategies):
        raise ConfigError("memory: expected at least one strategy to predict, got none")
    columns = strategies if isinstance(strategies, Columns) else Columns.of(strategies)
    used, cut = np.unique(columns.cut, return_inverse=True)
    table = CutTable.of(model, [columns.cuts[place] for place in used], is_decisive=is_decisive)
    chunks = table.chunks(cut)
    row = chunks.strategy
    of, prices = columns, layouts[1] if layouts else Prices.of(model, columns)
    if layouts:
        of = layouts[0]
        chunks = chunks.of(layouts[2][row])
    if recomputed is None:
        recomputed = _recomputed_layers(model, columns)
    stages = stage_bytes(
        model,
        of,
        prices,
        chunks,
        flight=in_flight(of, chunks),
        recomputed=recomputed[..., row],
    )
    starts = np.searchsorted(row[chunks.stages], np.arange(len(columns) + 1))
    return MemoryTable(stages, starts, cluster.context_bytes)


def _recomputed_layers(model: ModelProfile, columns: Columns) -> Integers:
    """Leading layers of every chunk that keep only their input."""
    layers = columns.recompute_layers
    layers = np.where(layers == ALL_LAYERS, model.num_layers, layers)
    return np.where(columns.recompute == RECOMPUTES.index("full"), layers, 0)
