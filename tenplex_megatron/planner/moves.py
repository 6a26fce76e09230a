"""How many bytes does a change of layout move between nodes, before any tensor is described?

A layer's state is a line of bytes: tensor parallelism gives every rank a range of it, a sharded
optimizer a range of that range.  What a new rank needs and its node does not hold has to travel,
as in the exact plan (`core.plan`); only the rounding of single tensors is left out here.
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.memory.parameters import embedding_sizes, layer_sizes, output_sizes
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["Placement", "StateSizes", "bytes_to_move"]

type _Range = tuple[int, int]

_BYTES_PER_PARAMETER = 12
"""An fp32 master and Adam's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes of fp32 masters and moments, which is all that travels, of the whole model."""

    layer: float
    """One layer without its experts."""
    experts: float = 0.0
    """All experts of one layer."""
    input: float = 0.0
    """What the first stage has besides layers."""
    output: float = 0.0
    """What the last stage has besides layers and a tied embedding."""

    @classmethod
    def of(cls, model: ModelProfile) -> Self:
        """The sizes of a model, where dense layers among those with experts are spread evenly."""
        sparse_layers = model.num_layers - model.num_dense_layers if model.num_experts else 0
        share = sparse_layers / model.num_layers
        layer = (1 - share) * sum(layer_sizes(model, 1, 1, has_experts=False).replicated)
        experts = 0.0
        if sparse_layers:
            sparse = layer_sizes(model, 1, model.num_experts, has_experts=True)
            layer += share * sum(sparse.replicated)
            experts = share * model.num_experts * sum(sparse.expert)
        output = output_sizes(model, 1, is_tied_here=model.is_tied)
        return cls(
            layer=_BYTES_PER_PARAMETER * layer,
            experts=_BYTES_PER_PARAMETER * experts,
            input=_BYTES_PER_PARAMETER * sum(embedding_sizes(model, 1)),
            output=_BYTES_PER_PARAMETER * sum(output),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a layout run; ranks whose node is gone are left out of `nodes`."""

    layout: ParallelLayout
    nodes: Mapping[int, str]
    is_sharded: bool = True
    """Whether each data-parallel rank holds its share of the optimizer's state only."""


def bytes_to_move(
    sizes: StateSizes, num_layers: int, source: Placement, target: Placement
) -> dict[str, float]:
    """Bytes that have to arrive on each node of `target`, at least.

    State that no node of `source` holds any more counts as if it arrived too: whether it can is for
    the exact plan to say.
    """
    arriving = dict.fromkeys(target.nodes.values(), 0.0)
    shared = _shared_layers(source.layout, target.layout, num_layers)
    ends = {(0, 0): sizes.input}
    last = source.layout.pp - 1, target.layout.pp - 1
    ends[last] = ends.get(last, 0.0) + sizes.output
    dense = {pair: count * sizes.layer for pair, count in shared.items()}
    for pair, nbytes in ends.items():
        dense[pair] = dense.get(pair, 0.0) + nbytes
    experts = {pair: count * sizes.experts for pair, count in shared.items()}
    for cut, amounts in ((_Dense(source, target), dense), (_Experts(source, target), experts)):
        for (old, new), nbytes in amounts.items():
            for node, share in cut.missing(old, new) if nbytes else ():
                arriving[node] += share * nbytes
    return arriving


class _Dense:
    """Ranges of a dense layer, cut by the tensor axis and then by the optimizer's shards."""

    def __init__(self, source: Placement, target: Placement) -> None:
        self._source, self._target = source, target
        self.units = math.lcm(*(self._parts(place) for place in (source, target)))

    def missing(self, old: int, new: int) -> Iterator[tuple[str, float]]:
        """Node and share of a layer, for every rank of stage `new` that lacks some of it."""
        held = self._held(old)
        for rank, (low, high) in self._ranges(self._target, new):
            node = self._target.nodes[rank]
            lacks = (high - low) - _overlap(held.get(node, ()), low, high)
            if lacks:
                yield node, lacks / self.units

    def _held(self, stage: int) -> dict[str, list[_Range]]:
        ranges: dict[str, list[_Range]] = {}
        for rank, span in self._ranges(self._source, stage):
            ranges.setdefault(self._source.nodes[rank], []).append(span)
        return {node: _merged(spans) for node, spans in ranges.items()}

    def _ranges(self, place: Placement, stage: int) -> Iterator[tuple[int, _Range]]:
        parts = self._parts(place)
        per_stage = place.layout.world_size // place.layout.pp
        for rank in range(stage * per_stage, (stage + 1) * per_stage):
            if rank in place.nodes:
                number = self._number(place, rank)
                width = self.units // parts
                yield rank, (number * width, (number + 1) * width)

    def _parts(self, place: Placement) -> int:
        layout = place.layout
        return layout.tp * (layout.dp * layout.cp if place.is_sharded else 1)

    def _number(self, place: Placement, rank: int) -> int:
        layout, at = place.layout, place.layout.coordinates(rank)
        if not place.is_sharded:
            return at.tp
        return (at.tp * layout.dp + at.dp) * layout.cp + at.cp


class _Experts(_Dense):
    """Ranges of a layer's experts: first by expert, then as dense ones."""

    def _parts(self, place: Placement) -> int:
        layout = place.layout
        return layout.ep * layout.tp * (layout.expert_dp if place.is_sharded else 1)

    def _number(self, place: Placement, rank: int) -> int:
        layout, at = place.layout, place.layout.expert_coordinates(rank)
        number = at.ep * layout.tp + at.tp
        return number * layout.expert_dp + at.dp if place.is_sharded else number


def _shared_layers(
    source: ParallelLayout, target: ParallelLayout, num_layers: int
) -> dict[tuple[int, int], int]:
    """How many layers an old and a new stage have in common, where there are any."""
    stages = zip(_stages(source, num_layers), _stages(target, num_layers), strict=True)
    shared: dict[tuple[int, int], int] = {}
    for pair in stages:
        shared[pair] = shared.get(pair, 0) + 1
    return shared


def _stages(layout: ParallelLayout, num_layers: int) -> list[int]:
    """The pipeline stage of every layer."""
    stages = [0] * num_layers
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            for layer in layout.layers(num_layers, stage, chunk):
                stages[layer] = stage
    return stages


def _merged(ranges: Sequence[_Range]) -> list[_Range]:
    merged: list[_Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _overlap(ranges: Sequence[_Range], low: int, high: int) -> int:
    """How much of [low, high) the sorted, disjoint `ranges` cover."""
    first = max(bisect.bisect_right(ranges, (low, high)) - 1, 0)
    covered = 0
    for start, stop in ranges[first:]:
        if start >= high:
            break
        covered += max(min(stop, high) - max(start, low), 0)
    return covered
