"""Which strategies run on so many devices, and which of them are worth a try?

What runs is the matter of `rules`, with which the enumeration prunes. *Scope* is taste: what runs
but is left out because something better is known to exist.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import (
    batch_rules,
    broken_rules,
    expert_rules,
    holds,
    sequence_rules,
    tensor_rules,
)
from tenplex_megatron.planner.strategy import LossFusion, Precision, Recompute, Strategy

__all__ = ["EVERYTHING", "RECOMPUTES", "Scope", "broken_rules", "columns", "strategies"]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""In `columns` a kind of recomputation is its place in this list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of all that runs is worth trying, and what is the same in every strategy."""

    zero_stages: tuple[int, ...] = (0, 1)
    """Replicated or distributed optimizer; 2 and 3 are Megatron-FSDP."""
    recompute: tuple[Recompute, ...] = RECOMPUTES
    uneven_stages: bool = True
    """Also stages of different sizes, with embedding and loss counted as a layer each or not."""
    max_virtual_stages: int | None = 8
    """Model chunks per stage at most; each more costs messages, for ever less of a bubble."""
    tensor_leaves_node: bool = False
    """Also tensor-parallel groups that span nodes: every layer then waits for the network."""
    tensor_above_query_groups: bool = False
    """Also more tensor parallelism than query groups: keys and values are gathered each step."""
    min_sequence_per_rank: int = 2048
    """Tokens of a sequence that context parallelism leaves to a rank at least."""
    fewer_replicas: bool = False
    """Also strategies that stay legal, and get faster, with more data-parallel replicas."""
    precision: Precision = "bf16"
    is_flash: bool = True
    loss_fusion: LossFusion = "none"
    overlaps_gradients: bool = True
    overlaps_tensor_parallel: bool = False
    """Taken where there is sequence parallelism, without which it does not run."""


EVERYTHING = Scope(
    max_virtual_stages=None,
    tensor_leaves_node=True,
    tensor_above_query_groups=True,
    min_sequence_per_rank=1,
    fewer_replicas=True,
)
"""All that runs, but optimizers that are distributed over a single replica."""


def strategies(
    model: ModelProfile,
    *,
    devices: int,
    devices_per_node: int | Sequence[int],
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    scope: Scope | None = None,
) -> list[Strategy]:
    """Every strategy within `scope` that Megatron runs on at most `devices` devices.

    `devices_per_node` is one size for all nodes, of which the last may be filled in part, or the
    usable devices of each node. The order is the same in every run: by the sizes of the axes TP,
    CP, PP, VPP, EP, then larger DP first.

    Raises:
        ConfigError: a size below 1, or nodes that do not hold the devices.
    """
    scope = scope or Scope()
    sizes = (devices, global_batch_size, *micro_batch_sizes)
    if min(sizes) < 1:
        raise ConfigError(f"search: devices and batch sizes must be at least 1, got {sizes}")
    nodes = _nodes(devices, devices_per_node)
    batches = {
        micro: [
            dp
            for dp in range(min(devices, global_batch_size // micro), 0, -1)
            if holds(batch_rules(global_batch_size, micro, dp, 1, 1))
        ]
        for micro in sorted(set(micro_batch_sizes))
    }
    found: list[Strategy] = []
    for tp in _tensor_sizes(model, nodes, scope):
        groups = devices // tp if scope.tensor_leaves_node else sum(size // tp for size in nodes)
        for cp, with_sp in _sequence_splits(model, tp, groups, scope):
            split = _Split(tp, cp, groups // cp, with_sp)
            for layout in _layouts(model, split, global_batch_size, batches, scope):
                found += _choices(layout, with_sp, global_batch_size, scope)
    return found


def columns(found: Sequence[Strategy]) -> dict[str, NDArray[np.int64]]:
    """The same strategies as one integer array of `len(found)` per axis, for vectorized costs."""
    recompute = {kind: index for index, kind in enumerate(RECOMPUTES)}
    names = "tp pp dp vpp cp ep micro_batch_size num_micro_batches sequence_parallel zero_stage"
    rows = [
        (
            *(s.layout.tp, s.layout.pp, s.layout.dp, s.layout.vpp, s.layout.cp, s.layout.ep),
            *(s.micro_batch_size, s.num_micro_batches, s.sequence_parallel, s.zero_stage),
            recompute[s.recompute],
        )
        for s in found
    ]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 11)
    return dict(zip([*names.split(), "recompute"], table.T.copy(), strict=True))


@dataclass(frozen=True, slots=True)
class _Split:
    """How one replica's layers are split, and how many such groups of devices there are."""

    tp: int
    cp: int
    groups: int
    with_sp: tuple[bool, ...]
    """Whether sequence parallelism is legal: without, with, or both."""


def _nodes(devices: int, devices_per_node: int | Sequence[int]) -> tuple[int, ...]:
    """The usable devices of each node.

    >>> _nodes(21, 8)
    (8, 8, 5)
    """
    if isinstance(devices_per_node, int):
        if devices_per_node < 1:
            raise ConfigError(f"search: a node holds at least 1 device, got {devices_per_node}")
        full, rest = divmod(devices, devices_per_node)
        return (devices_per_node,) * full + ((rest,) if rest else ())
    if min(devices_per_node, default=0) < 0 or sum(devices_per_node) != devices:
        raise ConfigError(
            f"search: nodes of {tuple(devices_per_node)} devices do not hold {devices} devices"
        )
    return tuple(devices_per_node)


def _tensor_sizes(model: ModelProfile, nodes: Sequence[int], scope: Scope) -> list[int]:
    largest = sum(nodes) if scope.tensor_leaves_node else max(nodes)
    if not scope.tensor_above_query_groups:
        largest = min(largest, model.num_query_groups)
    return [tp for tp in range(1, largest + 1) if holds(tensor_rules(model, tp))]


def _sequence_splits(
    model: ModelProfile, tp: int, groups: int, scope: Scope
) -> Iterator[tuple[int, tuple[bool, ...]]]:
    largest = max(1, min(groups, model.seq_length // scope.min_sequence_per_rank))
    for cp in range(1, largest + 1):
        with_sp = tuple(
            with_sp
            for with_sp in (False, True)
            if holds(sequence_rules(model, tp, cp, with_sp=with_sp))
            and holds(expert_rules(model, tp, 1, with_sp=with_sp))
        )
        if with_sp:
            yield cp, with_sp


def _layouts(
    model: ModelProfile,
    split: _Split,
    batch: int,
    replicas: dict[int, list[int]],
    scope: Scope,
) -> Iterator[ParallelLayout]:
    """Every layout that splits layers like `split`.

    `replicas` are the data-parallel sizes that divide the batch, by size of the micro-batch.
    """
    cuts = _stages(
        model.num_layers,
        split.groups,
        uneven=scope.uneven_stages,
        max_virtual=scope.max_virtual_stages or model.num_layers + 2,
    )
    for pp, vpp, stage_layers in cuts:
        for ep in _expert_sizes(model, split):
            for micro, sizes in replicas.items():
                for dp in sizes:
                    # Experts are split over data and context axis: `ParallelLayout` asks for it.
                    if dp * pp > split.groups or dp * split.cp % ep:
                        continue
                    if vpp > 1 and not holds(batch_rules(batch, micro, dp, pp, vpp)):
                        continue
                    yield ParallelLayout(split.tp, pp, dp, vpp, split.cp, ep, micro, stage_layers)
                    if not scope.fewer_replicas:
                        break


def _expert_sizes(model: ModelProfile, split: _Split) -> list[int]:
    largest = min(max(1, model.num_experts), split.groups * split.cp)
    return [
        ep
        for ep in range(1, largest + 1)
        if holds(expert_rules(model, split.tp, ep, with_sp=split.with_sp[-1]))
    ]


def _choices(
    layout: ParallelLayout, with_sp: Sequence[bool], batch: int, scope: Scope
) -> list[Strategy]:
    """What else can be chosen for a layout; an optimizer needs two replicas to be distributed."""
    stages = scope.zero_stages if layout.dp * layout.cp > 1 else (0,)
    return [
        Strategy(
            layout=layout,
            global_batch_size=batch,
            sequence_parallel=sequence_parallel,
            zero_stage=zero_stage,
            recompute=recompute,
            precision=scope.precision,
            is_flash=scope.is_flash,
            loss_fusion=scope.loss_fusion,
            overlaps_gradients=scope.overlaps_gradients,
            overlaps_tensor_parallel=scope.overlaps_tensor_parallel and sequence_parallel,
        )
        for sequence_parallel in with_sp
        for zero_stage in stages
        for recompute in scope.recompute
    ]


type _StageCut = tuple[int, int, tuple[int, ...] | None]
"""PP, VPP and the layers of each stage in model order, None where all are equal."""


@cache
def _stages(num_layers: int, largest: int, *, uneven: bool, max_virtual: int) -> list[_StageCut]:
    """Every way to cut the layers into at most `largest` pipeline stages."""
    cuts: list[_StageCut] = []
    for pp in range(1, min(largest, num_layers + 2) + 1):
        for vpp in range(1, min(max_virtual, (num_layers + 2) // pp) + 1 if pp > 1 else 2):
            if num_layers % (pp * vpp) == 0:
                cuts.append((pp, vpp, None))
            if uneven:
                cuts += [(pp, vpp, sizes) for sizes in _uneven_stages(num_layers, pp, vpp)]
    return cuts


def _uneven_stages(num_layers: int, pp: int, vpp: int) -> list[tuple[int, ...]]:
    """Balanced stages of different sizes, with embedding and loss counted as layers or not.

    What is left over goes to late stages, which keep fewer micro-batches in flight, but not to the
    last, which has the loss. Interleaved stages are cut only where nothing is left over.

    >>> _uneven_stages(6, 4, 1)
    [(1, 2, 2, 1), (2, 2, 2, 0)]
    """
    parts, found = pp * vpp, []
    for embedding, loss in ((0, 0), (0, 1), (1, 1)):
        share, rest = divmod(num_layers + embedding + loss, parts)
        if share == 0 or (rest and vpp > 1):
            continue
        sizes = [share] * parts
        for stage in range(parts - 1 - rest, parts - 1):
            sizes[stage] += 1
        sizes[0] -= embedding
        sizes[-1] -= loss
        if len(set(sizes)) > 1 and tuple(sizes) not in found:
            found.append(tuple(sizes))
    return found
