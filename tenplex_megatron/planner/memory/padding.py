"""How large are the distributed optimizer's buffers on many stages at once?

`buffers` says it for one buffer, tensor by tensor. Where the sizes of all tensors are multiples of
64, and those of real models are, tensors follow each other without gaps: only the ends of buckets
are padded, and the first rank owns most. Then a buffer without buckets has a closed formula, and
one with buckets is filled layer by layer for all numbers of layers. Other buffers are looked up
one by one.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.columns import Integers, distinct
from tenplex_megatron.planner.memory.buffers import BUCKET_END, TENSOR_START
from tenplex_megatron.planner.memory.chunks import Chunks
from tenplex_megatron.planner.memory.parameters import Chunk, bucket_elements, stage_totals
from tenplex_megatron.planner.memory.tensors import (
    common_divisor,
    embedding_sizes,
    layer_sizes,
    output_sizes,
)
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["padded_buffers"]

type Floats = NDArray[np.float64]


def padded_buffers(
    model: ModelProfile,
    chunks: Chunks,
    *,
    groups: tuple[Integers, Integers, Integers],
    is_bucketed: Integers,
    elements: tuple[Floats, Floats],
) -> tuple[Floats, Floats]:
    """Elements allocated for all chunks of a stage, and those its fullest rank owns, by stage.

    Args:
        model: what is trained.
        chunks: of strategies with ZeRO-1.
        groups: TP, EP and the ranks that share the optimizer, of every chunk.
        is_bucketed: whether reduction overlaps, of every chunk.
        elements: parameters of every chunk, replicated ones and those of experts.
    """
    tp, ep, _ = groups
    kinds, kind = distinct(tp, ep)
    is_aligned = np.array([common_divisor(model, *one) % TENSOR_START == 0 for one in kinds])
    if is_aligned.all():
        return _aligned(model, chunks, groups, is_bucketed, elements)
    count = len(chunks.stages)
    allocated, owned = np.empty(count), np.empty(count)
    if is_aligned.any():
        allocated, owned = _aligned(model, chunks, groups, is_bucketed, elements)
    for stage in np.flatnonzero(~is_aligned[kind][chunks.stages]).tolist():
        first = int(chunks.stages[stage])
        last = int(chunks.stages[stage + 1]) if stage + 1 < count else len(chunks)
        tp_, ep_, shards = (int(column[first]) for column in groups)
        bucket = None
        if is_bucketed[first] and chunks.stage[first] == 0:
            bucket = bucket_elements(shards)
        allocated[stage], owned[stage] = stage_totals(
            model,
            tp_,
            ep_,
            tuple(_chunk(chunks, place) for place in range(first, last)),
            shards=shards,
            bucket=bucket,
        )
    return allocated, owned


def _chunk(chunks: Chunks, place: int) -> Chunk:
    return Chunk(
        int(chunks.dense[place]),
        int(chunks.experts[place]),
        bool(chunks.has_embedding[place]),
        bool(chunks.has_output[place]),
    )


def _aligned(
    model: ModelProfile,
    chunks: Chunks,
    groups: tuple[Integers, Integers, Integers],
    is_bucketed: Integers,
    elements: tuple[Floats, Floats],
) -> tuple[Floats, Floats]:
    tp, ep, shards = groups
    replicated, expert = elements
    alone = np.zeros(len(chunks))
    if model.is_tied:
        # The copies of a tied embedding on two stages are reduced apart from all other tensors.
        table = np.ceil(model.vocab_size / tp) * model.hidden_size
        alone = np.where(chunks.has_embedding != chunks.has_output, table, 0.0)
    parts = [
        _bucket(replicated - alone, shards),
        _bucket(alone, shards),
        _bucket(expert, shards // ep),
    ]
    allocated, owned = np.sum(parts, axis=0)
    cut = (chunks.stage == 0) & (chunks.number == 0) & (is_bucketed > 0)
    if cut.any():
        places = np.flatnonzero(cut)
        keys, kind = distinct(tp[places], ep[places], shards[places], chunks.has_output[places])
        tables = np.stack([_first_chunk(model, *key) for key in keys])
        layers = chunks.dense[places] + chunks.experts[places]
        allocated[places], owned[places] = tables[kind, :, layers].T
    return np.add.reduceat(allocated, chunks.stages), np.add.reduceat(owned, chunks.stages)


def _bucket(content: Floats, shards: Integers) -> Floats:
    """Elements of a bucket with its padding, and those of its first rank."""
    end = np.lcm(shards, BUCKET_END)
    allocated = np.ceil(content / end) * end
    return np.stack([allocated, np.minimum(content, allocated / shards)])


@lru_cache(maxsize=1 << 12)
def _first_chunk(model: ModelProfile, tp: int, ep: int, shards: int, has_output: int) -> Floats:
    """Elements of the first chunk of the model and those of its first rank, `[2, layers]`."""
    size = bucket_elements(shards)
    replicated = _Buffer(size, shards)
    expert = _Buffer(size, shards // ep)
    dense = layer_sizes(model, tp, ep, has_experts=False).replicated[::-1]
    mixture = layer_sizes(model, tp, ep, has_experts=bool(model.num_experts))
    num_dense = model.num_dense_layers if model.num_experts else model.num_layers
    words, *others = embedding_sizes(model, tp)
    is_alone = model.is_tied and not has_output
    start = (0, 0, 0)
    if has_output:
        start = replicated.filled(start, output_sizes(model, tp, is_tied_here=model.is_tied)[::-1])
    behind, experts = [start], [(0, 0, 0)]
    for _ in range(model.num_layers - num_dense):
        behind.append(replicated.filled(behind[-1], mixture.replicated[::-1]))
        experts.append(expert.filled(experts[-1], mixture.expert[::-1]))
    table = np.zeros((2, model.num_layers + 1))
    state = start
    for layers in range(model.num_layers + 1):
        if layers > num_dense:
            state = replicated.filled(behind[layers - num_dense], dense * num_dense)
        elif layers:
            state = replicated.filled(state, dense)
        whole = replicated.filled(state, others[::-1])
        if is_alone:
            whole = replicated.closed(replicated.filled(replicated.closed(whole), [words]))
        else:
            whole = replicated.closed(replicated.filled(whole, [words]))
        of_experts = expert.closed(experts[max(layers - num_dense, 0)])
        table[:, layers] = whole[1] + of_experts[1], whole[2] + of_experts[2]
    return table


type _Filled = tuple[int, int, int]
"""Elements in the open bucket; elements of closed ones, with padding; those of the first rank."""


class _Buffer:
    """How a buffer without gaps between its tensors fills up."""

    def __init__(self, bucket_size: int, shards: int) -> None:
        self.bucket_size = bucket_size
        self.shards = shards
        self.end = math.lcm(shards, BUCKET_END)

    def filled(self, state: _Filled, sizes: Sequence[int]) -> _Filled:
        """With more tensors."""
        for size in sizes:
            state = (state[0] + size, state[1], state[2])
            if state[0] >= self.bucket_size:
                state = self.closed(state)
        return state

    def closed(self, state: _Filled) -> _Filled:
        """With the open bucket closed."""
        content, allocated, owned = state
        padded = -(-content // self.end) * self.end
        return 0, allocated + padded, owned + min(content, padded // self.shards)
