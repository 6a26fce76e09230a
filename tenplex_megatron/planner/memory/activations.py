"""What does a rank keep between the forward and the backward pass, and what comes on top?

Every term is a tensor that Megatron-core with Transformer Engine saves for the backward pass, or
holds for a moment at the place where most is alive.  The terms follow Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4),
brought up to fused attention, gated MLPs and grouped queries.  Arrays hold one strategy per entry;
sizes are bytes per token that a rank works on, which is micro batch x sequence / context ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["Choices", "Floats", "LayerBytes", "embedding_bytes", "layer_bytes", "loss_bytes"]

type Floats = NDArray[np.float64]
type Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choices:
    """What of a strategy decides the bytes of a token."""

    tp: Floats
    cp: Floats
    element: Floats
    """Bytes of one activation."""
    splits_sequence: Flags
    is_flash: Flags
    is_selective: Flags
    """Whether the core of attention is recomputed."""

    @property
    def sequence_ranks(self) -> Floats:
        """Tensor-parallel ranks that share what lies outside attention and MLP."""
        return np.where(self.splits_sequence, self.tp, 1.0)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes per token of one layer."""

    kept: Floats
    """Alive until the layer's backward pass."""
    recomputed: Floats
    """Alive of a layer that is recomputed: its input."""
    backward: Floats
    """Held for a moment by the backward pass, beyond what it has freed by then."""


def layer_bytes(model: ModelProfile, choices: Choices, *, has_experts: bool) -> LayerBytes:
    """Bytes per token of one layer."""
    element, hidden = choices.element, float(model.hidden_size)
    residual = element * hidden / choices.sequence_ranks
    kept = 4 * residual + _attention(model, choices)
    if model.dropout:
        # One byte of mask after attention and one after the MLP.
        kept = kept + 2 * hidden / choices.sequence_ranks
    if has_experts:
        routed = model.experts_per_token
        shared = _mlp(model, choices, model.shared_expert_ffn_size)
        experts = _mlp(model, choices, model.expert_ffn_size)
        # The tokens' copies for the experts, and float32 scores of the router.
        inputs = routed * element * hidden
        scores = 2 * 4.0 * model.num_experts / choices.sequence_ranks
        kept = kept + shared + routed * experts + inputs + scores
        width = max(routed * model.expert_ffn_size, model.shared_expert_ffn_size)
        # The gradient of what the experts return, and its copy sorted by expert.
        extra = 2 * inputs
    else:
        kept = kept + _mlp(model, choices, model.ffn_size)
        width, extra = model.ffn_size, np.zeros_like(element)
    return LayerBytes(kept, residual, residual + extra + _backward(model, choices, float(width)))


def _attention(model: ModelProfile, choices: Choices) -> Floats:
    """Query, key and value, the result, and what the softmax keeps."""
    heads = model.num_heads / choices.tp
    if model.latent is None:
        groups = np.maximum(model.num_query_groups / choices.tp, 1.0)
        projected = (heads + 2 * groups) * model.head_size
        result = heads * model.head_size
    else:
        latent = model.latent
        key = model.head_size + latent.rope_head_size
        # What is projected down is kept before and after its normalization.
        down = 2.0 * (latent.query_rank + latent.key_value_rank) + latent.rope_head_size
        projected = down / choices.sequence_ranks + heads * (2 * key + latent.value_head_size)
        result = heads * latent.value_head_size
    # With the sequence split, attention keeps its result apart from what the projection reads.
    results = np.where(choices.cp > 1, 2.0, 1.0)
    core = np.where(choices.is_flash, 4.0 * heads, _scores(model, choices))
    core = np.where(choices.is_selective, 0.0, core)
    kept: Floats = choices.element * (projected + results * result) + core
    return kept


def _scores(model: ModelProfile, choices: Choices) -> Floats:
    """Probabilities, their dropout mask, and the probabilities left (arXiv 2205.05198, 4.1)."""
    bytes_each = 2 * choices.element + 1 if model.dropout else choices.element
    return model.num_heads / choices.tp * model.seq_length * bytes_each


def _mlp(model: ModelProfile, choices: Choices, width: float) -> Floats:
    """What the first matrix returns, once or twice as wide, and what the second one reads."""
    factor = 3.0 if model.is_gated else 2.0
    return choices.element * factor * width / choices.tp


def _backward(model: ModelProfile, choices: Choices, width: float) -> Floats:
    """The larger of what two moments of the MLP's or attention's backward pass hold.

    In the second matrix: the gathered gradient and the gradient of its input.  In the activation:
    the gradient of its input; by then the second matrix has freed as much as that of its output.
    Without fused attention, two gradients as large as the scores.
    """
    gathered = np.where(choices.splits_sequence & (choices.tp > 1), float(model.hidden_size), 0.0)
    first = 2.0 if model.is_gated else 1.0
    matrix = choices.element * (gathered + width / choices.tp)
    activation = choices.element * first * width / choices.tp
    scores = 2 * choices.element * model.num_heads / choices.tp * model.seq_length
    return np.maximum(np.maximum(matrix, activation), np.where(choices.is_flash, 0.0, scores))


def embedding_bytes(model: ModelProfile, choices: Choices) -> Floats:
    """Bytes per token behind the embedding: tokens, positions and labels, and a dropout mask."""
    mask = model.hidden_size if model.dropout else 0
    return 3 * 8.0 + mask / choices.sequence_ranks


def loss_bytes(model: ModelProfile, choices: Choices, per_logit: Floats, tokens: Floats) -> Floats:
    """Bytes that the output matrix and the loss hold at their worst moment.

    Either the loss, with `per_logit` bytes of every logit; or the backward pass of the output
    matrix: the logits' gradient, the gradients of the matrix and its input, and the gathered
    input (megatron/core/tensor_parallel/layers.py).
    """
    element, hidden = choices.element, float(model.hidden_size)
    rows = model.vocab_size / choices.tp
    gathered = np.where(choices.splits_sequence & (choices.tp > 1), hidden, 0.0)
    backward = element * (tokens * (rows + hidden + gathered) + rows * hidden)
    return np.maximum(per_logit * tokens * rows, backward)
