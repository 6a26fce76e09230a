"""What does a layer, a micro-batch or a parameter cost in bytes, under each of many strategies?

These numbers depend neither on how layers are cut into stages nor on how many are recomputed, so
all cuts of a layout share them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.columns import FUSIONS, PRECISIONS, Columns, Integers, distinct
from tenplex_megatron.planner.memory.activations import (
    Choices,
    Floats,
    embedding_bytes,
    layer_bytes,
    loss_bytes,
)
from tenplex_megatron.planner.memory.parameters import Chunk, chunk_totals, has_padding
from tenplex_megatron.planner.memory.tensors import matrix_elements
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import LossFusion, Precision

__all__ = ["Prices"]

_BYTES: Mapping[Precision, tuple[float, float, float, float, float]] = {
    "fp32": (4, 4, 8, 0, 0),
    "fp16": (2, 2, 12, 0, 4),
    "bf16": (2, 4, 12, 0, 0),
    # Every weight is also kept in 8 bits, once as it is and once transposed.
    "fp8": (2, 4, 12, 2, 0),
}
"""Bytes of a weight or activation, of a gradient, of the optimizer's state of a parameter, of a
weight's copies, and of a gradient's copy that only the optimizer's step holds
(megatron/core/optimizer/optimizer.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """Bytes if not said otherwise; an entry per strategy."""

    dense_elements: Floats
    """Parameters of a layer without experts on one rank."""
    expert_layer_elements: Floats
    """Parameters of a layer with experts that all data-parallel ranks hold."""
    expert_elements: Floats
    """Parameters of the experts of such a layer on one rank."""
    embedding_elements: Floats
    output_elements: Floats
    """Of what is behind the last layer on another stage than the embedding."""
    tied_output_elements: Floats
    """The same beside the embedding."""
    dense_matrices: Floats
    """Of one matrix of every shape."""
    expert_matrices: Floats
    dense_kept: Floats
    """Of a layer and micro-batch in flight."""
    expert_kept: Floats
    recomputed: Floats
    """The same of a layer that is recomputed."""
    dense_backward: Floats
    """Held for a moment by a layer's backward pass."""
    expert_backward: Floats
    embedded: Floats
    """Of a micro-batch in flight behind the embedding."""
    loss: Floats
    """Held for a moment by the loss."""
    element: Floats
    """Of one activation."""
    weight: Floats
    """Of one parameter, as are the next three."""
    gradient: Floats
    state: Floats
    step: Floats
    shards: Floats
    """Ranks that share the optimizer's state."""
    expert_shards: Floats
    zero_stage: Integers
    is_padded: NDArray[np.bool_]
    """Whether buffers may be larger than what they hold."""

    @classmethod
    def of(cls, model: ModelProfile, columns: Columns) -> Self:
        """The prices of these strategies."""
        element, gradient, state, weight_copies, step = np.array(list(_BYTES.values()))[
            [list(_BYTES).index(name) for name in PRECISIONS]
        ][columns.precision].T
        shards = columns.dp * columns.cp
        return cls(
            **_elements(model, columns.tp, columns.ep),
            **_activations(model, columns, element),
            element=element,
            weight=element + weight_copies,
            gradient=gradient,
            state=state,
            step=step,
            shards=shards.astype(np.float64),
            expert_shards=(shards // columns.ep).astype(np.float64),
            zero_stage=columns.zero_stage,
            is_padded=(columns.zero_stage == 1) & _padded(model, columns.tp, columns.ep, shards),
        )

    def layer_moment(self, *, has_experts: bool) -> Floats:
        """Bytes a stage with such layers holds for a moment at least."""
        if has_experts:
            return self.element * self.expert_matrices + self.expert_backward
        return self.element * self.dense_matrices + self.dense_backward

    def layer_state(self, *, has_experts: bool) -> Floats:
        """Bytes of weights, gradients and optimizer of a layer, padding left out."""
        elements, of_experts = self.dense_elements, np.zeros_like(self.dense_elements)
        if has_experts:
            elements, of_experts = self.expert_layer_elements, self.expert_elements
        held = elements + of_experts
        shared = elements / self.shards + of_experts / self.expert_shards
        weight, gradient, state = (
            np.where(self.zero_stage < first, held, shared) for first in (3, 2, 1)
        )
        return weight * self.weight + gradient * self.gradient + state * self.state


def _activations(model: ModelProfile, columns: Columns, element: Floats) -> dict[str, Floats]:
    choices = Choices(
        tp=columns.tp.astype(np.float64),
        cp=columns.cp.astype(np.float64),
        element=element,
        splits_sequence=columns.sequence_parallel > 0,
        is_flash=columns.is_flash > 0,
        is_selective=columns.recompute == 1,
    )
    tokens = columns.micro_batch_size / columns.cp * model.seq_length
    per_logit = np.array(
        [[_logit_bytes(fusion, _BYTES[name][0]) for name in PRECISIONS] for fusion in FUSIONS]
    )[columns.loss_fusion, columns.precision]
    dense = layer_bytes(model, choices, has_experts=False)
    expert = layer_bytes(model, choices, has_experts=True) if model.num_experts else dense
    return {
        "dense_kept": tokens * dense.kept,
        "dense_backward": tokens * dense.backward,
        "expert_kept": tokens * expert.kept,
        "expert_backward": tokens * expert.backward,
        "recomputed": tokens * dense.recomputed,
        "embedded": tokens * embedding_bytes(model, choices),
        "loss": loss_bytes(model, choices, per_logit, tokens),
    }


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


def _elements(model: ModelProfile, tp: Integers, ep: Integers) -> dict[str, Floats]:
    """The parameters of the parts of a model."""
    keys, key = distinct(tp, ep)
    found = np.array([_elements_of(model, *one) for one in keys], dtype=np.float64)
    names = (
        *("dense_elements", "expert_layer_elements", "expert_elements", "embedding_elements"),
        *("output_elements", "tied_output_elements", "dense_matrices", "expert_matrices"),
    )
    return dict(zip(names, found[key].T.copy(), strict=True))


def _elements_of(model: ModelProfile, tp: int, ep: int) -> tuple[int, ...]:
    has_experts = bool(model.num_experts)
    embedding, _ = chunk_totals(model, tp, ep, Chunk(0, 0, has_embedding=True))
    both, _ = chunk_totals(model, tp, ep, Chunk(0, 0, has_embedding=True, has_output=True))
    return (
        chunk_totals(model, tp, ep, Chunk(1))[0],
        *(chunk_totals(model, tp, ep, Chunk(0, 1)) if has_experts else (0, 0)),
        embedding,
        chunk_totals(model, tp, ep, Chunk(0, 0, has_output=True))[0],
        both - embedding,
        matrix_elements(model, tp, has_experts=False),
        matrix_elements(model, tp, has_experts=True) if has_experts else 0,
    )


def _padded(model: ModelProfile, tp: Integers, ep: Integers, shards: Integers) -> NDArray[np.bool_]:
    keys, key = distinct(tp, ep, shards)
    return np.array([has_padding(model, *one) for one in keys], dtype=np.bool_)[key]
