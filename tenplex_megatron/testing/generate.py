"""Collections of a small Megatron-like model in any layout, and plans run on numpy arrays.

Nothing here imports a framework: the model is described with the shapes and cuts that Megatron
uses, so that laws about plans can be enumerated over many layouts in seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from tenplex_megatron.core.collection import TensorCollection
from tenplex_megatron.core.mesh import Coordinates, ParallelLayout
from tenplex_megatron.core.plan import ReshardPlan, Topology
from tenplex_megatron.core.region import Region
from tenplex_megatron.core.slicing import (
    flat_range,
    padded_size,
    prepend_axis,
    replicate,
    split_blocks,
    split_even,
    split_groups,
)
from tenplex_megatron.core.tensors import Box, TensorSpec

__all__ = [
    "Arrays",
    "LocalTensor",
    "ModelShape",
    "fill",
    "local_tensors",
    "megatron_collection",
    "nodes_of",
    "numbered",
    "run_plan",
    "topology_of",
]

type Array = npt.NDArray[np.int64]
type Arrays = dict[tuple[int, Box], Array]
"""The array of every box that every rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A GPT with grouped-query attention and SwiGLU, small enough to enumerate its elements."""

    num_layers: int = 4
    hidden: int = 8
    heads: int = 8
    groups: int = 2
    head_dim: int = 1
    ffn: int = 8
    vocab: int = 16
    divisible_by: int = 16
    """The vocabulary is padded to this; times the tensor-parallel size when `pad_by_tp`."""
    pad_by_tp: bool = False
    tied: bool = True
    experts: int = 0
    """With experts, every layer has so many and a router instead of one feed-forward block."""
    parts: tuple[str, ...] = ("input_norm", "qkv", "qkv_bias", "proj", "post_norm", "mlp")
    """Which parts every layer has; `mlp` stands for the experts too."""
    states: tuple[str, ...] = ("master", "exp_avg", "exp_avg_sq")
    """Optimizer tensors per parameter."""
    distributed_optimizer: bool = True
    weights: bool = True
    """Whether the half-precision parameters belong to the state."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One parameter as a rank stores it: its boxes in storage order."""

    spec: TensorSpec
    boxes: tuple[Region, ...]
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Elements the rank stores."""
        return sum(box.numel for box in self.boxes)


def nodes_of(world_size: int, num_nodes: int) -> dict[int, str]:
    """Ranks dealt to nodes in consecutive runs, as launchers do; some nodes may stay empty.

    >>> nodes_of(4, 2)
    {0: 'node0', 1: 'node0', 2: 'node1', 3: 'node1'}
    """
    per_node = -(-world_size // num_nodes)
    return {rank: f"node{rank // per_node}" for rank in range(world_size)}


def topology_of(source_ranks: int, target_ranks: int, num_nodes: int) -> Topology:
    """Both worlds on the same nodes."""
    return Topology(nodes_of(source_ranks, num_nodes), nodes_of(target_ranks, num_nodes))


def local_tensors(model: ModelShape, layout: ParallelLayout, rank: int) -> tuple[LocalTensor, ...]:
    """The parameters of one rank, in the order in which its buffers hold them."""
    place = layout.coordinates(rank)
    found: list[LocalTensor] = []
    if place.pp == 0:
        found.append(_embedding(model, layout, place, "embedding"))
    for chunk in range(layout.vpp):
        for layer in layout.layers(model.num_layers, place.pp, chunk):
            found += _layer(model, layout, rank, layer)
    if place.pp == layout.pp - 1:
        norm = TensorSpec("final_norm", (model.hidden,), "bfloat16")
        found.append(LocalTensor(norm, replicate(norm.region, layout.tp)[place.tp : place.tp + 1]))
        if not model.tied:
            found.append(_embedding(model, layout, place, "output"))
        elif layout.pp > 1:
            found.append(_embedding(model, layout, place, "embedding"))
    return tuple(found)


def megatron_collection(model: ModelShape, layout: ParallelLayout) -> TensorCollection:
    """Weights, optimizer tensors and the step of every rank of a layout."""
    specs: list[TensorSpec] = [TensorSpec("step", (), "int64")]
    holdings: list[tuple[int, Box]] = []
    for rank in range(layout.world_size):
        holdings.append((rank, Box("step", Region((), ()))))
        tensors = local_tensors(model, layout, rank)
        if model.weights:
            specs += [tensor.spec for tensor in tensors]
            holdings += [(rank, Box(one.spec.name, box)) for one in tensors for box in one.boxes]
        for tensor, box in _optimizer_boxes(model, layout, rank, tensors):
            for state in model.states:
                name = f"{state}.{tensor.spec.name}"
                specs.append(TensorSpec(name, tensor.spec.shape, "float32", tensor.spec.padded))
                holdings.append((rank, Box(name, box)))
    return TensorCollection.build(specs, holdings)


def numbered(spec: TensorSpec) -> Array:
    """A global tensor whose elements are all different, and differ between tensors.

    Rows of dim 0 keep their values when the tensor is padded to more of them.
    """
    seed = sum((index + 1) * byte for index, byte in enumerate(spec.name.encode())) % 9973
    return np.arange(spec.numel, dtype=np.int64).reshape(spec.shape) + seed * 1_000_000


def fill(collection: TensorCollection) -> Arrays:
    """Every box of every rank, cut out of the numbered global tensors."""
    full = {name: numbered(spec) for name, spec in collection.tensors.items()}
    return {
        (rank, box): full[box.tensor][box.region.slices()].copy()
        for rank in collection.ranks
        for box in collection.partition(rank)
    }


def run_plan(plan: ReshardPlan, source: Arrays, target: TensorCollection) -> Arrays:
    """The target's boxes after the plan: created padding is 0, what nothing filled is -1."""
    filled: Arrays = {
        (rank, box): np.full(box.region.shape, -1, dtype=np.int64)
        for rank in target.ranks
        for box in target.partition(rank)
    }
    held: dict[tuple[int, str], list[Box]] = {}
    for rank, box in source:
        held.setdefault((rank, box.tensor), []).append(box)
    wanted: dict[tuple[int, str], list[Box]] = {}
    for rank, box in filled:
        wanted.setdefault((rank, box.tensor), []).append(box)
    for one in plan.transfers:
        origin = _holding(held[one.source_rank, one.tensor], one.region)
        data = source[one.source_rank, origin][one.region.relative_to(origin.region).slices()]
        _write(filled, one.target_rank, wanted[one.target_rank, one.tensor], one.region, data)
    for rank, box in plan.created:
        zeros = np.zeros(box.region.shape, dtype=np.int64)
        _write(filled, rank, wanted[rank, box.tensor], box.region, zeros)
    return filled


def _holding(boxes: Iterable[Box], region: Region) -> Box:
    for box in boxes:
        if box.region.contains(region):
            return box
    raise AssertionError(f"no box of the source rank holds all of {region}")


def _write(
    filled: Mapping[tuple[int, Box], Array],
    rank: int,
    boxes: Sequence[Box],
    region: Region,
    data: Array,
) -> None:
    """Writes into every box of the rank that holds the region, and each element once."""
    inside = [box for box in boxes if box.region.intersect(region) is not None]
    assert inside, f"rank {rank} has no box for {region}"
    for box in inside:
        assert box.region.contains(region), f"{region} crosses the border of {box}"
        # The ellipsis keeps an array without dims an array, so that it can be written to.
        index: tuple[slice | EllipsisType, ...] = (
            *region.relative_to(box.region).slices(),
            ...,
        )
        view = filled[rank, box][index]
        assert (view == -1).all(), f"rank {rank}: {region} of {box} is filled twice"
        view[...] = data


def _embedding(
    model: ModelShape, layout: ParallelLayout, place: Coordinates, name: str
) -> LocalTensor:
    parts = layout.tp if model.pad_by_tp else 1
    rows = padded_size(model.vocab, divisible_by=model.divisible_by, parts=parts)
    spec = TensorSpec(name, (rows, model.hidden), "bfloat16", padded=True)
    return LocalTensor(spec, (split_even(spec.region, 0, layout.tp)[place.tp],))


def _layer(model: ModelShape, layout: ParallelLayout, rank: int, layer: int) -> list[LocalTensor]:
    place = layout.coordinates(rank)
    blocks = (model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim)
    qkv = Region.full((model.groups * sum(blocks), model.hidden))
    bias = Region.full(qkv.shape[:1])
    proj = Region.full((model.hidden, model.heads * model.head_dim))
    norm = Region.full((model.hidden,))

    def groups(region: Region) -> tuple[Region, ...]:
        cut = split_groups(region, 0, groups=model.groups, blocks=blocks, parts=layout.tp)
        return cut[place.tp]

    parts = {
        "input_norm": (norm, (norm,)),
        "qkv": (qkv, groups(qkv)),
        "qkv_bias": (bias, groups(bias)),
        "proj": (proj, (split_even(proj, 1, layout.tp)[place.tp],)),
        "post_norm": (norm, (norm,)),
    }
    found = [
        LocalTensor(
            TensorSpec(f"layers.{name}", (model.num_layers, *whole.shape), "bfloat16"),
            tuple(prepend_axis(box, layer) for box in boxes),
        )
        for name, (whole, boxes) in parts.items()
        if name in model.parts
    ]
    if "mlp" not in model.parts:
        return found
    if not model.experts:
        return found + _feed_forward(model, layout, place.tp, (layer,))
    return found + _experts(model, layout, rank, layer)


def _experts(model: ModelShape, layout: ParallelLayout, rank: int, layer: int) -> list[LocalTensor]:
    """The router of a layer, and those of its experts that the rank holds."""
    router = TensorSpec(
        "layers.router", (model.num_layers, model.experts, model.hidden), "bfloat16"
    )
    whole = prepend_axis(Region.full(router.shape[1:]), layer)
    found = [LocalTensor(router, (whole,))]
    place = layout.expert_coordinates(rank)
    per_rank = model.experts // layout.ep
    for expert in range(place.ep * per_rank, (place.ep + 1) * per_rank):
        found += _feed_forward(model, layout, place.tp, (layer, expert))
    return found


def _feed_forward(
    model: ModelShape, layout: ParallelLayout, tp: int, axes: tuple[int, ...]
) -> list[LocalTensor]:
    """Fused gate and up, and down, at the indices `axes` of the axes in front."""
    is_expert = len(axes) > 1
    lead = (model.num_layers, model.experts) if is_expert else (model.num_layers,)
    fused = Region.full((2 * model.ffn, model.hidden))
    down = Region.full((model.hidden, model.ffn))
    parts = {
        "fc1": (fused, split_blocks(fused, 0, (model.ffn, model.ffn), layout.tp)[tp]),
        "fc2": (down, (split_even(down, 1, layout.tp)[tp],)),
    }
    kind = "experts" if is_expert else "mlp"
    found = []
    for name, (whole, cut) in parts.items():
        boxes = cut
        for index in reversed(axes):
            boxes = tuple(prepend_axis(box, index) for box in boxes)
        spec = TensorSpec(f"layers.{kind}.{name}", (*lead, *whole.shape), "bfloat16")
        found.append(LocalTensor(spec, boxes, is_expert))
    return found


def _optimizer_boxes(
    model: ModelShape, layout: ParallelLayout, rank: int, tensors: Sequence[LocalTensor]
) -> list[tuple[LocalTensor, Region]]:
    """What one rank's optimizer owns: all of it, or its flat range of each buffer."""
    if not model.distributed_optimizer:
        return [(tensor, box) for tensor in tensors for box in tensor.boxes]
    place = layout.coordinates(rank)
    dense = (place.dp * layout.cp + place.cp, layout.dp * layout.cp)
    expert = (layout.expert_coordinates(rank).dp, layout.expert_dp)
    owned: list[tuple[LocalTensor, Region]] = []
    for is_expert, (index, owners) in ((False, dense), (True, expert)):
        buffer = [tensor for tensor in tensors if tensor.is_expert == is_expert]
        share = -(-sum(tensor.numel for tensor in buffer) // owners)
        owned += _flat_share(buffer, index * share, (index + 1) * share)
    return owned


def _flat_share(
    buffer: Iterable[LocalTensor], start: int, stop: int
) -> list[tuple[LocalTensor, Region]]:
    """The boxes of the elements `start:stop` of the concatenated tensors."""
    owned: list[tuple[LocalTensor, Region]] = []
    position = 0
    for tensor in buffer:
        for box in tensor.boxes:
            low, high = max(start - position, 0), min(stop - position, box.numel)
            if low < high:
                owned += [(tensor, part) for part in flat_range(box, low, high)]
            position += box.numel
    return owned
