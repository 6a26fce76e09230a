"""How many parameters, gradients and optimizer elements does each rank hold?  Exactly.

The tensors are those that Megatron-core 0.19 builds for a GPT model.  Every model chunk has one
buffer for what all data-parallel ranks of a stage hold, and another one for experts that are
spread over ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.memory.buffers import BUCKET_END, BufferElements, buffer_elements
from tenplex_megatron.planner.profile import ModelProfile

__all__ = [
    "Chunk",
    "Layer",
    "StageElements",
    "chunk_sizes",
    "chunk_totals",
    "embedding_sizes",
    "has_padding",
    "layer_sizes",
    "matrix_elements",
    "output_sizes",
    "stage_chunks",
    "stage_elements",
    "vocab_rows",
]

_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class Layer:
    """Elements of one layer's tensors on one rank, in the order of the modules."""

    replicated: tuple[int, ...]
    """Tensors that every data-parallel rank of the stage holds."""
    expert: tuple[int, ...] = ()
    """Tensors of the experts of this rank."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of the model that one virtual pipeline stage holds."""

    dense_layers: int
    expert_layers: int = 0
    has_embedding: bool = False
    has_output: bool = False

    @property
    def num_layers(self) -> int:
        """Layers of either kind."""
        return self.dense_layers + self.expert_layers


@dataclass(frozen=True, slots=True)
class StageElements:
    """Elements on the ranks of one pipeline stage."""

    parameters: int
    allocated: int
    owned: tuple[int, ...]
    """By place in the data-parallel (and context-parallel) group; one entry when it is whole."""


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
def _common_divisor(model: ModelProfile, tp: int, ep: int) -> int:
    """What divides the size of every tensor."""
    layers = [layer_sizes(model, tp, ep, has_experts=False)]
    if model.num_experts:
        layers.append(layer_sizes(model, tp, ep, has_experts=True))
    sizes = [size for layer in layers for size in (*layer.replicated, *layer.expert)]
    ends = (*embedding_sizes(model, tp), *output_sizes(model, tp, is_tied_here=False))
    return math.gcd(*sizes, *ends)


def has_padding(model: ModelProfile, tp: int, ep: int, shards: int) -> bool:
    """Whether the distributed optimizer's buffers can be larger than what they hold."""
    return _common_divisor(model, tp, ep) % math.lcm(shards, BUCKET_END) != 0


def stage_chunks(model: ModelProfile, layout: ParallelLayout) -> list[list[Chunk]]:
    """The model chunks of every pipeline stage, `[stage][virtual stage]`."""
    counts = _virtual_stages(model, layout)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    total = len(counts)
    chunks = []
    for index, (start, stop) in enumerate(pairwise(starts)):
        dense = stop - start
        if model.num_experts:
            dense = min(max(model.num_dense_layers - start, 0), dense)
        chunks.append(Chunk(dense, stop - start - dense, index == 0, index == total - 1))
    return [chunks[stage :: layout.pp] for stage in range(layout.pp)]


def _virtual_stages(model: ModelProfile, layout: ParallelLayout) -> Sequence[int]:
    """Layers of the virtual stages in model order."""
    total = layout.pp * layout.vpp
    if layout.stage_layers is None:
        return [model.num_layers // total] * total
    if len(layout.stage_layers) == layout.pp:
        return [size // layout.vpp for size in layout.stage_layers] * layout.vpp
    return layout.stage_layers


def stage_elements(
    model: ModelProfile, layout: ParallelLayout, *, is_sharded: bool, is_bucketed: bool
) -> list[StageElements]:
    """Elements of every pipeline stage.

    Args:
        model: what is trained.
        layout: how.
        is_sharded: whether the distributed optimizer is used.
        is_bucketed: whether the reduction of gradients overlaps with the backward pass; Megatron
            then cuts the first chunk of the first pipeline stage into buckets.
    """
    shards = layout.dp * layout.cp if is_sharded else 0
    bucket = max(_LEAST_BUCKET, _BUCKET_PER_RANK * layout.dp * layout.cp) if is_bucketed else None
    stages = []
    for stage, chunks in enumerate(stage_chunks(model, layout)):
        found = [
            _chunk_elements(
                model,
                layout.tp,
                layout.ep,
                chunk,
                shards=shards,
                bucket=bucket if stage == 0 and number == 0 else None,
            )
            for number, chunk in enumerate(chunks)
        ]
        stages.append(_stage(found, layout.ep if shards else 1))
    return stages


def _stage(chunks: Sequence[tuple[BufferElements, BufferElements]], ep: int) -> StageElements:
    """The sum of the buffers of all chunks; `ep` neighbours hold different experts."""
    owned = [0] * len(chunks[0][0].owned)
    for replicated, expert in chunks:
        for rank in range(len(owned)):
            owned[rank] += replicated.owned[rank] + expert.owned[rank // ep]
    buffers = [buffer for pair in chunks for buffer in pair]
    return StageElements(
        sum(buffer.parameters for buffer in buffers),
        sum(buffer.allocated for buffer in buffers),
        tuple(owned),
    )


@cache
def _chunk_elements(
    model: ModelProfile, tp: int, ep: int, chunk: Chunk, *, shards: int, bucket: int | None
) -> tuple[BufferElements, BufferElements]:
    """Elements of what every rank of the stage holds, and of the experts of one rank."""
    replicated, expert = chunk_sizes(model, tp, ep, chunk)
    alone = -1
    if model.is_tied and chunk.has_embedding != chunk.has_output:
        # The copies of a tied embedding on two stages are reduced apart from all other tensors.
        alone = 0 if chunk.has_embedding else len(replicated) - 1
    return (
        buffer_elements(replicated, shards, bucket, alone=alone),
        buffer_elements(expert, shards // ep, bucket),
    )


@cache
def chunk_totals(model: ModelProfile, tp: int, ep: int, chunk: Chunk) -> tuple[int, int]:
    """Elements of a model chunk without padding: replicated ones, and those of experts."""
    replicated, expert = chunk_sizes(model, tp, ep, chunk)
    return sum(replicated), sum(expert)


def chunk_sizes(model: ModelProfile, tp: int, ep: int, chunk: Chunk) -> tuple[list[int], list[int]]:
    """Tensors of a model chunk in the order of the modules: replicated ones, and experts."""
    replicated: list[int] = []
    expert: list[int] = []
    if chunk.has_embedding:
        replicated += embedding_sizes(model, tp)
    for count, has_experts in ((chunk.dense_layers, False), (chunk.expert_layers, True)):
        if count:
            layer = layer_sizes(model, tp, ep, has_experts=has_experts)
            replicated += layer.replicated * count
            expert += layer.expert * count
    if chunk.has_output:
        replicated += output_sizes(model, tp, is_tied_here=model.is_tied and chunk.has_embedding)
    return replicated, expert
