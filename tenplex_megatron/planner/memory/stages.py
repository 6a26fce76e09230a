"""How many bytes do stages take, given what each of their model chunks holds and keeps?"""

from dataclasses import dataclass

import numpy as np

from tenplex_megatron.planner.columns import Columns, Integers
from tenplex_megatron.planner.memory.activations import Floats
from tenplex_megatron.planner.memory.chunks import Chunks
from tenplex_megatron.planner.memory.in_flight import chunks_in_flight
from tenplex_megatron.planner.memory.padding import padded_buffers
from tenplex_megatron.planner.memory.prices import Prices
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["WORKSPACE_BYTES", "StageBytes", "in_flight", "stage_bytes"]

WORKSPACE_BYTES = 96 * 2**20
"""Workspaces of 32 MiB: cuBLAS in the forward and in the backward thread, Transformer Engine."""


@dataclass(frozen=True, slots=True, eq=False)
class StageBytes:
    """Bytes on a rank of pipeline stages, one entry each."""

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    """Kept for the backward pass, of all micro-batches in flight."""
    moment: Floats
    """Held at the worst moment of the passes besides all that."""
    step: Floats
    """Held by the optimizer's step, when nothing is kept."""

    @property
    def transient(self) -> Floats:
        """Held at the worst moment of all besides state and activations.

        What the optimizer's step holds counts only where backward passes hold less.
        """
        return WORKSPACE_BYTES + np.maximum(self.moment, self.step - self.activations)

    @property
    def total(self) -> Floats:
        """The peak of every stage."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.transient


def in_flight(columns: Columns, chunks: Chunks) -> Integers:
    """Micro-batches of every chunk in flight when its stage keeps most."""
    pp, vpp, micro_batches = (
        column[chunks.strategy] for column in (columns.pp, columns.vpp, columns.num_micro_batches)
    )
    return chunks_in_flight(chunks.stage, chunks.number, pp, vpp, micro_batches)


def stage_bytes(
    model: ModelProfile,
    columns: Columns,
    prices: Prices,
    chunks: Chunks,
    *,
    flight: Integers,
    recomputed: Integers,
) -> StageBytes:
    """The bytes of every stage.

    Args:
        model: what is trained.
        columns: the strategies.
        prices: their prices.
        chunks: the chunks of the stages.
        flight: micro-batches in flight of every chunk.
        recomputed: leading layers of every chunk that keep only their input; axes ahead of that
            of the chunks are variants, which the result has too.
    """
    strategy = chunks.strategy[chunks.stages]
    parameters, gradients, optimizer, step = _state(model, columns, prices, chunks)

    def by_stage(column: Floats | Integers) -> Floats:
        if len(chunks.stages) == len(chunks):
            return column.astype(np.float64)
        return np.add.reduceat(column, chunks.stages, axis=-1).astype(np.float64)

    # The first layers of a chunk are recomputed (transformer_block.py, "block").
    of_dense = np.minimum(recomputed, chunks.dense)
    again = by_stage(flight * of_dense)
    dense = by_stage(flight * (chunks.dense - of_dense))
    has_dense = by_stage(chunks.dense) > 0
    has_output = by_stage(chunks.has_output) > 0
    embedded = by_stage(flight * chunks.has_embedding)
    price = prices.recomputed[strategy]
    kept = prices.dense_kept[strategy]
    matrices = has_dense * prices.dense_matrices[strategy]
    if model.num_experts:
        of_experts = np.minimum(recomputed - of_dense, chunks.experts)
        again += by_stage(flight * of_experts)
    activations = dense * kept + again * price
    worst = has_dense * (prices.dense_backward[strategy] + (again > 0) * kept)
    if model.num_experts:
        has_experts = by_stage(chunks.experts) > 0
        kept = prices.expert_kept[strategy]
        activations += by_stage(flight * (chunks.experts - of_experts)) * kept
        moment = has_experts * (prices.expert_backward[strategy] + (again > 0) * kept)
        worst = np.maximum(worst, moment)
        matrices += has_experts * prices.expert_matrices[strategy]
    # The last normalization keeps its input and its result.
    activations += embedded * prices.embedded[strategy] + has_output * 2 * price
    element = prices.element[strategy]
    return StageBytes(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        moment=element * matrices + np.maximum(worst, has_output * prices.loss[strategy]),
        step=step,
    )


def _state(
    model: ModelProfile, columns: Columns, prices: Prices, chunks: Chunks
) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes of parameters, gradients, optimizer state, and of copies for the optimizer's step."""
    of = chunks.strategy
    both = chunks.has_embedding * chunks.has_output
    replicated = (
        chunks.dense * prices.dense_elements[of]
        + chunks.has_embedding * prices.embedding_elements[of]
        + (chunks.has_output - both) * prices.output_elements[of]
        + both * prices.tied_output_elements[of]
    )
    expert = np.zeros(len(chunks))
    if model.num_experts:
        replicated += chunks.experts * prices.expert_layer_elements[of]
        expert = chunks.experts * prices.expert_elements[of]
    is_padded = prices.is_padded[of]
    strategy = of[chunks.stages]
    held = np.add.reduceat(replicated, chunks.stages)
    of_experts = np.add.reduceat(expert, chunks.stages)
    allocated = held + of_experts
    owned = held / prices.shards[strategy] + of_experts / prices.expert_shards[strategy]
    owned = np.where(prices.zero_stage[strategy] > 0, owned, allocated)
    if is_padded.any():
        some = chunks.at(is_padded)
        found = padded_buffers(
            model,
            some,
            groups=(
                columns.tp[some.strategy],
                columns.ep[some.strategy],
                (columns.dp * columns.cp)[some.strategy],
            ),
            is_bucketed=columns.overlaps_gradients[some.strategy],
            elements=(replicated[is_padded], expert[is_padded]),
        )
        places = is_padded[chunks.stages]
        allocated[places], owned[places] = found
    zero = prices.zero_stage[strategy]
    # Stages 2 and 3 are DeepSpeed's: gradients, and weights too, exist in shards only.
    return (
        np.where(zero < 3, allocated, owned) * prices.weight[strategy],
        np.where(zero < 2, allocated, owned) * prices.gradient[strategy],
        owned * prices.state[strategy],
        owned * prices.step[strategy],
    )
