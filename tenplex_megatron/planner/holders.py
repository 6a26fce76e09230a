"""Which nodes hold which piece of a model's state, before any tensor is described?

The state is an area.  Its length runs through the model from the output to the input, the order in
which Megatron lays tensors into flat buffers; tensor parallelism cuts its breadth.  Every model
chunk of a pipeline stage is a line along the length, and the distributed optimizer cuts that into
equal shards (megatron/core/distributed/param_and_grad_buffer.py).  Experts that are spread over
ranks have lines of their own, and so has a tied embedding with copies on two stages.  Left out are
the order of tensors within a layer, padding, and what every tensor-parallel rank holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.memory.tensors import embedding_sizes, layer_sizes, output_sizes
from tenplex_megatron.planner.profile import ModelProfile

__all__ = ["Area", "Division", "Placement", "StateSizes"]

type _Ints = NDArray[np.int64]
type _Floats = NDArray[np.float64]

_BYTES_PER_PARAMETER = 12
"""An fp32 master and Adam's two moments."""
_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
"""Parameters at which a bucket is closed (distributed_data_parallel.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes of fp32 masters and moments, which is all that travels, of the whole model."""

    layer: float
    """One layer without its experts."""
    experts: float = 0.0
    """All experts of one layer."""
    num_experts: int = 1
    input: float = 0.0
    """What the first stage has besides layers."""
    output: float = 0.0
    """What the last stage has besides layers and a tied embedding."""
    tied: float = 0.0
    """What of `input` the last stage has a copy of."""

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
        words, *positions = embedding_sizes(model, 1)
        output = output_sizes(model, 1, is_tied_here=model.is_tied)
        return cls(
            layer=_BYTES_PER_PARAMETER * layer,
            experts=_BYTES_PER_PARAMETER * experts,
            num_experts=max(model.num_experts, 1),
            input=_BYTES_PER_PARAMETER * (words + sum(positions)),
            output=_BYTES_PER_PARAMETER * sum(output),
            tied=_BYTES_PER_PARAMETER * words if model.is_tied else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of a layout run; ranks whose node is gone are left out of `nodes`."""

    layout: ParallelLayout
    nodes: Mapping[int, str]
    is_sharded: bool = True
    """Whether each data-parallel rank holds its share of the optimizer's state only."""
    is_bucketed: bool = False
    """Whether the reduction of gradients overlaps with the backward pass: Megatron then cuts the
    first chunk of the first pipeline stage into buckets, and every bucket into shards."""


@dataclass(frozen=True, slots=True, eq=False)
class Area:
    """The pieces of the state along its length, in the order of Megatron's buffers."""

    layer: _Ints
    """The layer of each piece; one past the last for the output, -1 for the input."""
    expert: _Ints
    """The expert of each piece, -1 for none."""
    size: _Floats
    """Bytes of each piece."""
    edges: _Floats
    """Where the pieces start and the last one ends."""
    num_layers: int
    num_experts: int
    tied: float

    @classmethod
    def of(cls, sizes: StateSizes, num_layers: int) -> Self:
        """The area of a model: output, layers from the last to the first, input; words last."""
        count = sizes.num_experts if sizes.experts else 0
        each = sizes.experts / count if count else 0.0
        experts = np.append(np.arange(count, dtype=np.int64)[::-1], -1)
        layers = np.arange(num_layers, dtype=np.int64)[::-1]
        size = np.concatenate(
            [
                [sizes.output],
                np.tile([*[each] * count, sizes.layer], num_layers),
                [sizes.input - sizes.tied, sizes.tied],
            ]
        )
        return cls(
            layer=np.concatenate([[num_layers], np.repeat(layers, count + 1), [-1, -1]]),
            expert=np.concatenate([[-1], np.tile(experts, num_layers), [-1, -1]]),
            size=size,
            edges=np.concatenate([[0.0], np.cumsum(size)]),
            num_layers=num_layers,
            num_experts=count,
            tied=sizes.tied,
        )


class Division:
    """How a placement cuts an area.

    `cells` are the pieces that one rank holds, or several the same: `cells[cell]` are the nodes
    of its holders by their number in `names`, `len(names)` for those that are gone.
    """

    def __init__(self, area: Area, place: Placement, names: Sequence[str]) -> None:
        self.breadth = place.layout.tp
        self.cells = _cells(place, names)
        self._set_lines(area, place)
        self.points = self._shard_points(area)

    def _set_lines(self, area: Area, place: Placement) -> None:
        layout = place.layout
        virtual = _virtual_stages(layout, area.num_layers)[area.layer + 1]
        # Lines: of every virtual stage, then of every rank's experts there, then the tied words.
        total, ep = layout.pp * layout.vpp, layout.ep
        line = virtual
        if ep > 1 and area.num_experts:
            owner = area.expert // -(-area.num_experts // ep)
            line = np.where(area.expert < 0, virtual, total + virtual * ep + owner)
        if layout.pp > 1 and area.tied:
            line = np.append(line[:-1], total + total * ep)
        width = layout.dp * layout.cp if place.is_sharded else 1
        expert_width = layout.expert_dp if place.is_sharded else 1
        number = np.arange(total)
        stage = number % layout.pp
        rank = np.arange(ep)
        dense = stage * layout.tp * width
        first = layout.pp * layout.tp * width
        experts = first + (stage[:, None] * ep + rank) * layout.tp * expert_width
        last = first + layout.pp * ep * layout.tp * expert_width
        self._line = line
        self._base = np.concatenate([dense, experts.ravel(), [last]])
        """The first cell of every line."""
        self._shards = np.repeat([width, expert_width, width], [total, total * ep, 1])
        self._total = np.bincount(line, area.size, minlength=len(self._base))
        self._parts = self._shards.copy()
        if place.is_bucketed and place.is_sharded:
            bucket = max(_LEAST_BUCKET, _BUCKET_PER_RANK * layout.dp * layout.cp)
            at_once = bucket * _BYTES_PER_PARAMETER * layout.tp
            for first_line in (0, *range(total, total + ep)):
                self._parts[first_line] *= max(1, int(self._total[first_line] // at_once))

    def _shard_points(self, area: Area) -> _Floats:
        """Where shards end along the area, which pieces do as well."""
        order = np.argsort(self._line, kind="stable")
        ends = np.cumsum(area.size[order])
        starts = ends - area.size[order]
        line_starts = np.cumsum(self._total) - self._total
        self._start = np.empty_like(starts)
        self._start[order] = starts - line_starts[self._line[order]]
        part = np.arange(self._parts.sum()) - np.repeat(
            np.cumsum(self._parts) - self._parts, self._parts
        )
        points = np.repeat(line_starts, self._parts) + part * np.repeat(
            self._total / self._parts, self._parts
        )
        piece = np.minimum(np.searchsorted(ends, points, side="right"), len(order) - 1)
        found: _Floats = area.edges[order[piece]] + points - starts[piece]
        return found

    def cell(self, piece: _Ints, offset: _Floats, at: _Ints) -> _Ints:
        """The cell that holds what lies `offset` bytes into a piece, for tensor ranks `at`."""
        line = self._line[piece]
        parts, shards = self._parts[line], self._shards[line]
        share = (self._start[piece] + offset) / np.maximum(self._total[line], 1e-300)
        part = np.clip((share * parts).astype(np.int64), 0, parts - 1)
        first: _Ints = self._base[line] + part % shards
        found: _Ints = first[:, None] + at[None, :] * shards[:, None]
        return found


def _cells(place: Placement, names: Sequence[str]) -> _Ints:
    """The nodes of every cell: of dense lines, of experts' lines, of tied words."""
    layout, gone = place.layout, len(names)
    number = {name: index for index, name in enumerate(names)}
    nodes = np.full(layout.world_size, gone, dtype=np.int64)
    nodes[list(place.nodes)] = [number[name] for name in place.nodes.values()]
    # Ranks count tp first, then cp and dp, or ep and the experts' dp, then pp (core.mesh).
    dense = nodes.reshape(layout.pp, -1, layout.tp).transpose(0, 2, 1)
    experts = nodes.reshape(layout.pp, -1, layout.ep, layout.tp).transpose(0, 2, 3, 1)
    words = np.stack([dense[0], dense[-1]], axis=-1)
    if place.is_sharded:
        tables = [dense.reshape(-1, 1), experts.reshape(-1, 1), words.reshape(-1, 2)]
    else:
        tables = [
            dense.reshape(-1, dense.shape[-1]),
            experts.reshape(-1, experts.shape[-1]),
            words.reshape(layout.tp, -1),
        ]
    width = max(table.shape[1] for table in tables)
    return np.concatenate(
        [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=gone) for one in tables]
    )


def _virtual_stages(layout: ParallelLayout, num_layers: int) -> _Ints:
    """The virtual stage of the input, of every layer, and of the output."""
    total = layout.pp * layout.vpp
    counts = [
        len(layout.layers(num_layers, stage, chunk))
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    found: _Ints = np.concatenate([[0], np.repeat(np.arange(total), counts), [total - 1]])
    return found
