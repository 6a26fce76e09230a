"""Which tensors does Megatron-core 0.19 build for the parts of a GPT model, and how large are they?

Sizes are elements on one rank, in the order of the modules.
"""

import math
from dataclasses import dataclass
from functools import cache

from tenplex_megatron.planner.profile import ModelProfile

__all__ = [
    "Layer",
    "common_divisor",
    "embedding_sizes",
    "layer_sizes",
    "matrix_elements",
    "output_sizes",
    "vocab_rows",
]


@dataclass(frozen=True, slots=True)
class Layer:
    """Elements of one layer's tensors on one rank, in the order of the modules."""

    replicated: tuple[int, ...]
    """Tensors that every data-parallel rank of the stage holds."""
    expert: tuple[int, ...] = ()
    """Tensors of the experts of this rank."""


@cache
def layer_sizes(model: ModelProfile, tp: int, ep: int, *, has_experts: bool) -> Layer:
    """Tensors of one layer (megatron/core/models/gpt/gpt_layer_specs.py).

    With more ranks than key and value heads their matrix is cut within heads.  The experts'
    matrices are split over the tensor ranks like those of a dense layer.
    """
    hidden = model.hidden_size
    norm = (hidden,) if model.has_rms_norm else (hidden, hidden)
    attention = (*norm, *_attention(model, tp), *norm)
    if not has_experts:
        return Layer((*attention, *_mlp(model, model.ffn_size // tp)))
    router = model.num_experts * hidden
    shared: tuple[int, ...] = ()
    if model.shared_expert_ffn_size:
        shared = _mlp(model, model.shared_expert_ffn_size // tp)
    experts = _mlp(model, model.expert_ffn_size // tp) * (model.num_experts // ep)
    if ep == 1:
        # Only experts that are spread over ranks get a buffer of their own.
        return Layer((*attention, router, *experts, *shared))
    return Layer((*attention, router, *shared), experts)


@cache
def matrix_elements(model: ModelProfile, tp: int, *, has_experts: bool) -> int:
    """Elements of one matrix of every shape in a layer.

    Transformer Engine keeps an empty gradient of each (`get_dummy_wgrad`), whatever the number of
    layers, because the real one is added to the main gradient by the matrix product itself.
    """
    widths = [model.ffn_size]
    if has_experts:
        widths = [model.expert_ffn_size, model.shared_expert_ffn_size]
    factor = 2 if model.is_gated else 1
    shapes = set(_attention_matrices(model, tp))
    for width in widths:
        shapes |= {(factor * width // tp, model.hidden_size), (model.hidden_size, width // tp)}
    return sum(rows * columns for rows, columns in shapes)


def _attention(model: ModelProfile, tp: int) -> list[int]:
    """Tensors of the attention, in the order of the modules."""
    sizes = [rows * columns for rows, columns in _attention_matrices(model, tp)]
    if model.latent is not None:
        norms = [model.latent.query_rank, model.latent.key_value_rank]
        return [*sizes, *norms] if model.has_rms_norm else [*sizes, *norms, *norms]
    if model.has_bias:
        rows = [rows for rows, _ in _attention_matrices(model, tp)]
        return [size for pair in zip(sizes, rows, strict=True) for size in pair]
    return sizes


def _attention_matrices(model: ModelProfile, tp: int) -> list[tuple[int, int]]:
    """(outputs, inputs) of the attention's matrices on one rank."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.latent is None:
        query = heads * model.head_size // tp
        key_value = model.num_query_groups * model.head_size // tp
        return [(hidden, query), (query + 2 * key_value, hidden)]
    latent = model.latent
    key = model.head_size + latent.rope_head_size
    # Every tensor-parallel rank holds the projections down.
    return [
        (hidden, heads * latent.value_head_size // tp),
        (latent.query_rank, hidden),
        (heads * key // tp, latent.query_rank),
        (latent.key_value_rank + latent.rope_head_size, hidden),
        (heads * (model.head_size + latent.value_head_size) // tp, latent.key_value_rank),
    ]


def _linear(inputs: int, outputs: int, bias: int) -> tuple[int, ...]:
    return (inputs * outputs, bias) if bias else (inputs * outputs,)


def _mlp(model: ModelProfile, width: int) -> tuple[int, ...]:
    first = 2 * width if model.is_gated else width
    hidden = model.hidden_size
    return (
        *_linear(hidden, first, first if model.has_bias else 0),
        *_linear(width, hidden, hidden if model.has_bias else 0),
    )


@cache
def embedding_sizes(model: ModelProfile, tp: int) -> tuple[int, ...]:
    """Tensors in front of the first layer."""
    words = vocab_rows(model, tp) * model.hidden_size
    if not model.has_learned_positions:
        return (words,)
    return (words, model.seq_length * model.hidden_size)


@cache
def output_sizes(model: ModelProfile, tp: int, *, is_tied_here: bool) -> tuple[int, ...]:
    """Tensors behind the last layer.

    Args:
        model: what is trained.
        tp: the tensor-parallel size.
        is_tied_here: whether the output matrix is the embedding of the same rank.
    """
    norm = (model.hidden_size,) if model.has_rms_norm else (model.hidden_size,) * 2
    if is_tied_here:
        return norm
    return (*norm, vocab_rows(model, tp) * model.hidden_size)


def vocab_rows(model: ModelProfile, tp: int) -> int:
    """Rows of the embedding on one rank; Megatron adds some until `tp` divides them."""
    return -(-model.vocab_size // tp)


@cache
def common_divisor(model: ModelProfile, tp: int, ep: int) -> int:
    """What divides the size of every tensor."""
    layers = [layer_sizes(model, tp, ep, has_experts=False)]
    if model.num_experts:
        layers.append(layer_sizes(model, tp, ep, has_experts=True))
    sizes = [size for layer in layers for size in (*layer.replicated, *layer.expert)]
    ends = (*embedding_sizes(model, tp), *output_sizes(model, tp, is_tied_here=False))
    return math.gcd(*sizes, *ends)
