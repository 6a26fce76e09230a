"""How much of the model does every pipeline stage hold, and how much of it is in flight?

In flight is what has run forward and not yet backward when the first backward pass starts: at
that moment a stage keeps most.  Layers count once for each such micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.memory.parameters import (
    Chunk,
    chunk_totals,
    matrix_elements,
    stage_chunks,
)
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["Flights", "chunks_in_flight", "flights"]

type Floats = NDArray[np.float64]
type _Cut = tuple[int, int, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Flights:
    """Counts of the pipeline stages of many strategies, one stage after the other."""

    starts: NDArray[np.int64]
    """Place of every strategy's first stage, and behind the last one."""
    replicated: Floats
    """Parameters that all data-parallel ranks hold."""
    expert: Floats
    """Parameters of the experts of one rank."""
    matrices: Floats
    """Elements of one matrix of every shape."""
    dense: Floats
    """Layers in flight that keep everything."""
    experts: Floats
    """The same of layers with experts."""
    recomputed: Floats
    """Layers in flight of which only the input is kept."""
    embedded: Floats
    """Micro-batches in flight behind the embedding."""
    has_dense: Floats
    has_experts: Floats
    recomputes: Floats
    """Whether some layer is recomputed."""
    has_output: Floats


def flights(model: ModelProfile, strategies: Sequence[Strategy]) -> Flights:
    """The counts of all stages of all strategies."""
    holding: dict[tuple[int, int, _Cut], Floats] = {}
    flying: dict[tuple[_Cut, int, int], Floats] = {}
    held, flown = [], []
    for strategy in strategies:
        layout = strategy.layout
        cut = (layout.pp, layout.vpp, layout.stage_layers)
        where = (layout.tp, layout.ep, cut)
        if where not in holding:
            holding[where] = _held(model, *where)
        held.append(holding[where])
        # More micro-batches than this are never in flight.
        micro_batches = min(strategy.num_micro_batches, 2 * layout.pp)
        when = (cut, micro_batches, _recomputed(model, strategy))
        if when not in flying:
            flying[when] = _flown(model, *when)
        flown.append(flying[when])
    starts = np.cumsum([0, *(strategy.layout.pp for strategy in strategies)])
    return Flights(starts, *np.concatenate(held, axis=1), *np.concatenate(flown, axis=1))


def _recomputed(model: ModelProfile, strategy: Strategy) -> int:
    """Leading layers of every chunk that keep only their input."""
    if strategy.recompute != "full":
        return 0
    limit = strategy.recompute_layers
    return model.num_layers if limit is None else limit


@cache
def _chunks(model: ModelProfile, cut: _Cut) -> list[list[Chunk]]:
    pp, vpp, stage_layers = cut
    return stage_chunks(model, ParallelLayout(pp=pp, vpp=vpp, stage_layers=stage_layers))


@cache
def _held(model: ModelProfile, tp: int, ep: int, cut: _Cut) -> Floats:
    """The columns of `Flights` that do not depend on time, `[column, stage]`."""
    rows = []
    for chunks in _chunks(model, cut):
        totals = [chunk_totals(model, tp, ep, chunk) for chunk in chunks]
        matrices = 0
        if any(chunk.dense_layers for chunk in chunks):
            matrices += matrix_elements(model, tp, has_experts=False)
        if any(chunk.expert_layers for chunk in chunks):
            matrices += matrix_elements(model, tp, has_experts=True)
        rows.append((sum(one for one, _ in totals), sum(one for _, one in totals), matrices))
    return np.array(rows, dtype=np.float64).T


@cache
def _flown(model: ModelProfile, cut: _Cut, num_micro_batches: int, recomputed: int) -> Floats:
    """The other columns of `Flights`, `[column, stage]`."""
    pp, vpp, _ = cut
    rows = []
    for stage, chunks in enumerate(_chunks(model, cut)):
        dense = experts = again = embedded = 0
        counts = chunks_in_flight(stage, pp, vpp, num_micro_batches)
        for chunk, count in zip(chunks, counts, strict=True):
            # The first layers of a chunk are recomputed (transformer_block.py, "block").
            of_dense = min(recomputed, chunk.dense_layers)
            of_experts = min(recomputed - of_dense, chunk.expert_layers)
            dense += count * (chunk.dense_layers - of_dense)
            experts += count * (chunk.expert_layers - of_experts)
            again += count * (of_dense + of_experts)
            embedded += count * chunk.has_embedding
        has_dense = any(chunk.dense_layers for chunk in chunks)
        has_experts = any(chunk.expert_layers for chunk in chunks)
        row = (dense, experts, again, embedded, has_dense, has_experts, again > 0)
        rows.append((*row, chunks[-1].has_output))
    return np.array(rows, dtype=np.float64).T


def chunks_in_flight(stage: int, pp: int, vpp: int, num_micro_batches: int) -> list[int]:
    """Micro-batches in flight of every chunk of a stage when its first backward pass starts.

    Interleaved, each stage runs `pp` micro-batches of one chunk, then as many of the next
    (megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`).

    >>> chunks_in_flight(0, 4, 1, 8), chunks_in_flight(0, 4, 2, 8), chunks_in_flight(3, 4, 2, 8)
    ([4], [7, 4], [4, 1])
    """
    if vpp == 1:
        return [min(num_micro_batches, pp - stage)]
    warm_up = 2 * (pp - stage - 1) + (vpp - 1) * pp
    units = min(num_micro_batches * vpp, warm_up + 1)
    rounds, rest = divmod(units, pp * vpp)
    return [rounds * pp + min(max(rest - chunk * pp, 0), pp) for chunk in range(vpp)]
