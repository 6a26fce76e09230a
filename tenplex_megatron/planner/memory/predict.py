"""How much memory does every pipeline stage of a strategy take?

Parameters, gradients and optimizer state are exact (`parameters`); activations count what the
schedule keeps in flight on each stage; `transient` is what comes on top at the worst moment.  All
are bytes that torch's allocator counts as allocated on the fullest data-parallel rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.memory.activations import (
    Choices,
    Floats,
    embedding_bytes,
    layer_bytes,
    loss_bytes,
)
from tenplex_megatron.planner.memory.in_flight import Flights, flights
from tenplex_megatron.planner.memory.parameters import has_padding, stage_elements
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import LossFusion, Precision, Strategy

__all__ = [
    "MemoryPrediction",
    "MemoryTable",
    "StageMemory",
    "predict_memories",
    "predict_memory",
]

WORKSPACE_BYTES = 96 * 2**20
"""Workspaces of 32 MiB: cuBLAS in the forward and in the backward thread, Transformer Engine."""
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


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Predictions for many strategies; the stages of all of them in one row of arrays."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    transient: Floats
    starts: NDArray[np.int64]
    """Place of every strategy's first stage, and behind the last one."""
    context_bytes: float

    @property
    def totals(self) -> Floats:
        """The peak of every stage."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.transient

    @property
    def peak_bytes(self) -> Floats:
        """Of every strategy; see `MemoryPrediction`."""
        return np.maximum.reduceat(self.totals, self.starts[:-1])

    @property
    def required_bytes(self) -> Floats:
        """Of every strategy; see `MemoryPrediction`."""
        return self.peak_bytes * ALLOCATOR_FACTOR + self.context_bytes

    def prediction(self, index: int) -> MemoryPrediction:
        """The prediction for one strategy."""
        columns = (
            *(self.parameters, self.gradients, self.optimizer),
            *(self.activations, self.transient),
        )
        places = range(self.starts[index], self.starts[index + 1])
        stages = tuple(StageMemory(*(float(column[at]) for column in columns)) for at in places)
        peak = max(stage.total for stage in stages)
        return MemoryPrediction(stages, peak, peak * ALLOCATOR_FACTOR + self.context_bytes)


def predict_memory(
    model: ModelProfile, cluster: ClusterProfile, strategy: Strategy
) -> MemoryPrediction:
    """The memory of one strategy."""
    return predict_memories(model, cluster, [strategy]).prediction(0)


def predict_memories(
    model: ModelProfile, cluster: ClusterProfile, strategies: Sequence[Strategy]
) -> MemoryTable:
    """The memory of many strategies of one model at once, much faster than one by one.

    Raises:
        ConfigError: there are no strategies.
    """
    if not strategies:
        raise ConfigError("memory: expected at least one strategy to predict, got none")
    columns = _Columns(*np.array([_column(one) for one in strategies], dtype=np.float64).T)
    flight = flights(model, strategies)
    parameters, gradients, optimizer, step = _state(model, strategies, columns, flight)
    activations, transient = _activations(model, columns, flight)
    return MemoryTable(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        # What the optimizer's step holds counts only where backward passes hold less.
        transient=WORKSPACE_BYTES + np.maximum(transient, step - activations),
        starts=flight.starts,
        context_bytes=cluster.context_bytes,
    )


class _Columns(NamedTuple):
    """Numbers of every strategy."""

    tp: Floats
    cp: Floats
    shards: Floats
    expert_shards: Floats
    zero_stage: Floats
    samples: Floats
    """Of a micro-batch, divided by the context-parallel ranks."""
    per_logit: Floats
    splits_sequence: Floats
    is_flash: Floats
    is_selective: Floats
    element: Floats
    """Bytes of one activation and of one weight."""
    gradient: Floats
    state: Floats
    """Bytes the optimizer keeps of one parameter."""
    weight_copies: Floats
    gradient_copies: Floats
    """Bytes of one gradient that only the optimizer's step holds."""


_BYTES: Mapping[Precision, tuple[float, float, float, float, float]] = {
    "fp32": (4, 4, 8, 0, 0),
    "fp16": (2, 2, 12, 0, 4),
    "bf16": (2, 4, 12, 0, 0),
    # Every weight is also kept in 8 bits, once as it is and once transposed.
    "fp8": (2, 4, 12, 2, 0),
}
"""The last five columns of `_Columns` (megatron/core/optimizer/optimizer.py)."""


def _column(strategy: Strategy) -> tuple[float, ...]:
    layout = strategy.layout
    element = _BYTES[strategy.precision][0]
    shards = layout.dp * layout.cp
    return (
        *(layout.tp, layout.cp, shards, shards // layout.ep, strategy.zero_stage),
        strategy.micro_batch_size / layout.cp,
        _logit_bytes(strategy.loss_fusion, element),
        *(strategy.sequence_parallel, strategy.is_flash, strategy.recompute == "selective"),
        *_BYTES[strategy.precision],
    )


def _logit_bytes(fusion: LossFusion, element: float) -> float:
    """Bytes of every logit in the loss: the logits, and what is computed from them in float32.

    Without fusion the softmax is computed in place in a float32 copy
    (megatron/core/tensor_parallel/cross_entropy.py); compiled, it is not in place
    (fusions/fused_cross_entropy.py).  Transformer Engine writes the gradient over the logits.
    """
    if fusion == "te":
        return element
    copy = 0 if element == 4 else 4
    return element + copy + (4 if fusion == "native" else 0)


def _state(
    model: ModelProfile, strategies: Sequence[Strategy], columns: _Columns, flight: Flights
) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes of parameters, gradients, optimizer state, and of copies for the optimizer's step."""
    names = columns.zero_stage, columns.shards, columns.expert_shards
    zero_stage, shards, expert_shards = _each_stage(flight, *names)
    allocated = flight.replicated + flight.expert
    owned = flight.replicated / shards + flight.expert / expert_shards
    owned = np.where(zero_stage > 0, owned, allocated)
    for index in _padded(model, strategies):
        found = stage_elements(
            model,
            strategies[index].layout,
            is_sharded=True,
            is_bucketed=strategies[index].overlaps_gradients,
        )
        places = slice(flight.starts[index], flight.starts[index + 1])
        allocated[places] = [stage.allocated for stage in found]
        owned[places] = [max(stage.owned) for stage in found]
    weight, gradient, state, step = _each_stage(
        flight,
        columns.element + columns.weight_copies,
        columns.gradient,
        columns.state,
        columns.gradient_copies,
    )
    # Stages 2 and 3 are DeepSpeed's: gradients, and weights too, exist in shards only.
    return (
        np.where(zero_stage < 3, allocated, owned) * weight,
        np.where(zero_stage < 2, allocated, owned) * gradient,
        owned * state,
        owned * step,
    )


def _padded(model: ModelProfile, strategies: Sequence[Strategy]) -> list[int]:
    """Strategies whose buffers may have padding."""
    known: dict[tuple[int, int, int], bool] = {}
    found = []
    for index, strategy in enumerate(strategies):
        if strategy.zero_stage == 1:
            layout = strategy.layout
            key = (layout.tp, layout.ep, layout.dp * layout.cp)
            if key not in known:
                known[key] = has_padding(model, *key)
            if known[key]:
                found.append(index)
    return found


def _each_stage(flight: Flights, *values: Floats) -> Floats:
    """Every value of a strategy as often as it has stages, `[values, stages]`."""
    return np.repeat(np.stack(values), np.diff(flight.starts), axis=1)


def _activations(model: ModelProfile, columns: _Columns, flight: Flights) -> tuple[Floats, Floats]:
    """Bytes kept for the backward pass, and those held at the worst moment besides."""
    choices = Choices(
        tp=columns.tp,
        cp=columns.cp,
        element=columns.element,
        splits_sequence=columns.splits_sequence > 0,
        is_flash=columns.is_flash > 0,
        is_selective=columns.is_selective > 0,
    )
    tokens = columns.samples * model.seq_length
    layer = layer_bytes(model, choices, has_experts=False)
    kept, backward, recomputed, embedded, loss = _each_stage(
        flight,
        tokens * layer.kept,
        tokens * layer.backward,
        tokens * layer.recomputed,
        tokens * embedding_bytes(model, choices),
        loss_bytes(model, choices, columns.per_logit, tokens),
    )
    activations = flight.dense * kept + flight.recomputed * recomputed
    # The last normalization keeps its input and its result.
    activations += flight.embedded * embedded + flight.has_output * 2 * recomputed
    worst = flight.has_dense * (backward + flight.recomputes * kept)
    if model.num_experts:
        layer = layer_bytes(model, choices, has_experts=True)
        kept, backward = _each_stage(flight, tokens * layer.kept, tokens * layer.backward)
        activations += flight.experts * kept
        worst = np.maximum(worst, flight.has_experts * (backward + flight.recomputes * kept))
    (element,) = _each_stage(flight, columns.element)
    return activations, element * flight.matrices + np.maximum(worst, flight.has_output * loss)
