"""How many parameters, gradients and optimizer elements does each rank hold?  Exactly.

Every model chunk has one buffer for what all data-parallel ranks of a stage hold, and another one
for experts that are spread over ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.memory.buffers import BUCKET_END, BufferElements, buffer_elements
from tenplex_megatron.planner.memory.tensors import (
    common_divisor,
    embedding_sizes,
    layer_sizes,
    output_sizes,
)
from tenplex_megatron.planner.profile import ModelProfile

__all__ = [
    "Chunk",
    "StageElements",
    "bucket_elements",
    "chunk_sizes",
    "chunk_totals",
    "has_padding",
    "stage_chunks",
    "stage_elements",
    "stage_totals",
]

_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


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


def has_padding(model: ModelProfile, tp: int, ep: int, shards: int) -> bool:
    """Whether the distributed optimizer's buffers can be larger than what they hold."""
    return common_divisor(model, tp, ep) % math.lcm(shards, BUCKET_END) != 0


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
    bucket = bucket_elements(layout.dp * layout.cp) if is_bucketed else None
    return [
        _stage_elements(
            model,
            layout.tp,
            layout.ep,
            tuple(chunks),
            shards=shards,
            bucket=None if stage else bucket,
        )
        for stage, chunks in enumerate(stage_chunks(model, layout))
    ]


def bucket_elements(shards: int) -> int:
    """Elements at which a bucket is closed (distributed_data_parallel.py, `bucket_size`)."""
    return max(_LEAST_BUCKET, _BUCKET_PER_RANK * shards)


@lru_cache(maxsize=1 << 12)
def stage_totals(
    model: ModelProfile,
    tp: int,
    ep: int,
    chunks: tuple[Chunk, ...],
    *,
    shards: int,
    bucket: int | None,
) -> tuple[int, int]:
    """Elements allocated on one stage, and those of the rank that owns most of them."""
    found = _stage_elements(model, tp, ep, chunks, shards=shards, bucket=bucket)
    return found.allocated, max(found.owned)


def _stage_elements(
    model: ModelProfile,
    tp: int,
    ep: int,
    chunks: tuple[Chunk, ...],
    *,
    shards: int,
    bucket: int | None,
) -> StageElements:
    """One stage; only its first chunk is cut into buckets of so many elements."""
    found = [
        _chunk_elements(model, tp, ep, chunk, shards=shards, bucket=None if number else bucket)
        for number, chunk in enumerate(chunks)
    ]
    return _sum(found, ep if shards else 1)


def _sum(chunks: Sequence[tuple[BufferElements, BufferElements]], ep: int) -> StageElements:
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


@lru_cache(maxsize=1 << 13)
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
