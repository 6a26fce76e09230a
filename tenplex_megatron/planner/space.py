"""Which strategies run on so many devices?

What runs is the matter of `rules`, with which the enumeration prunes; what of it is worth a try
that of `scope`.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import neg

import numpy as np

from tenplex_megatron.errors import ConfigError
from tenplex_megatron.planner.columns import (
    ALL_LAYERS,
    FUSIONS,
    PRECISIONS,
    RECOMPUTES,
    Columns,
    Cut,
    Integers,
    repeated,
)
from tenplex_megatron.planner.cuts import balanced_cuts
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import (
    batch_rules,
    broken_rules,
    expert_rules,
    holds,
    sequence_rules,
    tensor_rules,
)
from tenplex_megatron.planner.scope import EVERYTHING, Scope
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["EVERYTHING", "RECOMPUTES", "Scope", "broken_rules", "layouts", "strategies"]


@dataclass(frozen=True, slots=True)
class _Split:
    """How one replica's layers are split, and how many such groups of devices there are."""

    tp: int
    cp: int
    groups: int
    with_sp: tuple[bool, ...]
    """Whether sequence parallelism is legal: without, with, or both."""


def strategies(
    model: ModelProfile,
    *,
    devices: int,
    devices_per_node: int | Sequence[int],
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    scope: Scope | None = None,
) -> list[Strategy]:
    """Every strategy within `scope` with balanced stages that recompute all layers or none.

    See `layouts` for the arguments and errors. The order is the same in every run.
    """
    scope = scope or Scope()
    found = layouts(
        model,
        devices=devices,
        devices_per_node=devices_per_node,
        global_batch_size=global_batch_size,
        micro_batch_sizes=micro_batch_sizes,
        scope=scope,
    )
    kinds = [RECOMPUTES.index(kind) for kind in scope.recompute]
    cuts: dict[Cut, int] = {}
    rows = [
        (place, cuts.setdefault(cut, len(cuts)), kind)
        for place, (pp, vpp) in enumerate(zip(found.pp.tolist(), found.vpp.tolist(), strict=True))
        for cut in balanced_cuts(model.num_layers, pp, vpp, uneven=scope.uneven_stages)
        for kind in kinds
    ]
    layout, cut, recompute = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    found = replace(found.at(layout), cut=cut, cuts=tuple(cuts), recompute=recompute)
    return [found.strategy(place) for place in range(len(found))]


def layouts(
    model: ModelProfile,
    *,
    devices: int,
    devices_per_node: int | Sequence[int],
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    scope: Scope | None = None,
) -> Columns:
    """Every layout within `scope` that Megatron runs on at most `devices` devices.

    That is every choice but those of single layers: which stage holds them, and whether they are
    recomputed. Each entry has one of its cuts, and recomputes nothing. `devices_per_node` is one
    size for all nodes, of which the last may be filled in part, or the usable devices of each node.
    The order is the same in every run: by the sizes of the axes TP, CP, PP, VPP, EP, then larger DP
    first.

    Raises:
        ConfigError: a size below 1, or nodes that do not hold the devices.
    """
    scope = scope or Scope()
    sizes = (devices, global_batch_size, *micro_batch_sizes)
    if min(sizes) < 1:
        raise ConfigError(f"search: devices and batch sizes must be at least 1, got {sizes}")
    nodes = _nodes(devices, devices_per_node)
    batches = {
        micro: _replica_sizes(global_batch_size, micro) for micro in sorted(set(micro_batch_sizes))
    }
    pipelines = _pipelines(
        model.num_layers, scope.max_virtual_stages or model.num_layers + 2, scope.uneven_stages
    )
    tables = [np.empty((10, 0), dtype=np.int64)]
    for tp in _tensor_sizes(model, nodes, scope):
        groups = devices // tp if scope.tensor_leaves_node else sum(size // tp for size in nodes)
        for cp, with_sp in _sequence_splits(model, tp, groups, scope):
            split = _Split(tp, cp, groups // cp, with_sp)
            rows = list(
                _axes(
                    model,
                    split,
                    pipelines,
                    batches,
                    batch=global_batch_size,
                    is_largest=not scope.fewer_replicas,
                )
            )
            tables.append(_with_choices(split, rows, scope))
    return _columns(np.concatenate(tables, axis=1), pipelines, global_batch_size, scope)


def _with_choices(split: _Split, rows: Sequence[tuple[int, ...]], scope: Scope) -> Integers:
    """Layouts with every sequence parallelism and ZeRO stage; one row for each column."""
    pp, vpp, ep, micro, dp, cut = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    shared = [(with_sp, zero) for with_sp in split.with_sp for zero in scope.zero_stages]
    # An optimizer needs two replicas to be distributed.
    alone = [(with_sp, 0) for with_sp in split.with_sp]
    is_alone = dp * split.cp == 1
    row, choice = repeated(
        np.where(is_alone, len(shared), 0), np.where(is_alone, len(alone), len(shared))
    )
    sequence_parallel, zero_stage = np.array([*shared, *alone], dtype=np.int64)[choice].T
    tp, cp = np.full_like(row, split.tp), np.full_like(row, split.cp)
    axes = (one[row] for one in (pp, dp, vpp, ep, micro, cut))
    pp, dp, vpp, ep, micro, cut = axes
    return np.stack([tp, pp, dp, vpp, cp, ep, micro, sequence_parallel, zero_stage, cut])


def _columns(table: Integers, cuts: Sequence[Cut], batch: int, scope: Scope) -> Columns:
    tp, pp, dp, vpp, cp, ep, micro, sequence_parallel, zero_stage, cut = table

    def all_of(value: int) -> Integers:
        return np.full_like(tp, value)

    return Columns(
        tp=tp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        micro_batch_size=micro,
        global_batch_size=all_of(batch),
        sequence_parallel=sequence_parallel,
        zero_stage=zero_stage,
        recompute=all_of(0),
        recompute_layers=all_of(ALL_LAYERS),
        precision=all_of(PRECISIONS.index(scope.precision)),
        is_flash=all_of(scope.is_flash),
        loss_fusion=all_of(FUSIONS.index(scope.loss_fusion)),
        overlaps_gradients=all_of(scope.overlaps_gradients),
        overlaps_tensor_parallel=scope.overlaps_tensor_parallel * sequence_parallel,
        cut=cut,
        cuts=cuts,
    )


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


def _axes(
    model: ModelProfile,
    split: _Split,
    pipelines: Sequence[Cut],
    replicas: dict[int, list[int]],
    *,
    batch: int,
    is_largest: bool,
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """PP, VPP, EP, micro-batch, DP and a cut of every layout that splits layers like `split`.

    A cut is a place in `pipelines`; `replicas` are the data-parallel sizes that divide the batch,
    the largest first, by size of the micro-batch; with `is_largest` only the largest one that runs.
    """
    expert_sizes = _expert_sizes(model, split)
    for place, (pp, vpp, _) in enumerate(pipelines):
        if pp > split.groups:
            break
        for ep in expert_sizes:
            for micro, sizes in replicas.items():
                for dp in sizes[bisect_left(sizes, -(split.groups // pp), key=neg) :]:
                    # Experts are split over data and context axis: `ParallelLayout` asks for it.
                    if dp * split.cp % ep:
                        continue
                    if vpp > 1 and not holds(batch_rules(batch, micro, dp, pp, vpp)):
                        continue
                    yield pp, vpp, ep, micro, dp, place
                    if is_largest:
                        break


@lru_cache(maxsize=1 << 8)
def _pipelines(num_layers: int, max_virtual: int, uneven: bool) -> tuple[Cut, ...]:
    """PP and VPP of all stages the layers can make, with a cut for each."""
    parts = num_layers + 2  # embedding and loss may have stages of their own
    cuts: list[Cut] = []
    for pp in range(1, parts + 1):
        for vpp in range(1, min(max_virtual, parts // pp) + 1 if pp > 1 else 2):
            cuts += balanced_cuts(num_layers, pp, vpp, uneven=uneven)[:1]
    return tuple(cuts)


@lru_cache(maxsize=1 << 8)
def _replica_sizes(batch: int, micro: int) -> list[int]:
    """Data-parallel sizes that divide the batch, the largest first."""
    sizes = range(batch // micro, 0, -1)
    return [dp for dp in sizes if holds(batch_rules(batch, micro, dp, 1, 1))]


def _expert_sizes(model: ModelProfile, split: _Split) -> list[int]:
    largest = min(max(1, model.num_experts), split.groups * split.cp)
    return [
        ep
        for ep in range(1, largest + 1)
        if holds(expert_rules(model, split.tp, ep, with_sp=split.with_sp[-1]))
    ]
