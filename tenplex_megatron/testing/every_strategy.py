"""Every strategy of a small world, and what a search of it must find."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.cuts import balanced_cuts
from tenplex_megatron.planner.frontier import Frontier
from tenplex_megatron.planner.memory.predict import predict_memories
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import Scope, layouts
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

__all__ = ["every_cut", "every_strategy", "missed", "predicted"]

type Floats = NDArray[np.float64]


def every_strategy(
    model: ModelProfile,
    *,
    scope: Scope,
    **search: Any,  # noqa: ANN401 - the arguments of `layouts`
) -> Iterator[Strategy]:
    """Every layout with every cut that the search knows and every number of layers to recompute."""
    found = layouts(model, scope=scope, **search)
    for strategy in map(found.strategy, range(len(found))):
        pp, vpp = strategy.layout.pp, strategy.layout.vpp
        for cut in every_cut(model, pp, vpp, uneven=scope.uneven_stages):
            one = replace(strategy, layout=replace(strategy.layout, stage_layers=cut))
            for recompute in scope.recompute:
                yield replace(one, recompute=recompute)
            if "full" in scope.recompute and scope.some_layers:
                for layers in range(1, max(cut or (model.num_layers // (pp * vpp),))):
                    yield replace(one, recompute="full", recompute_layers=layers)


def every_cut(
    model: ModelProfile, pp: int, vpp: int, *, uneven: bool
) -> set[tuple[int, ...] | None]:
    """Balanced cuts, and without interleaving all that give middle stages a layer at least."""
    layers = model.num_layers
    cuts = {cut for _, _, cut in balanced_cuts(layers, pp, vpp, uneven=uneven)}
    if not uneven or pp == 1 or vpp > 1:
        return cuts
    leading = model.num_dense_layers if model.num_experts else 0
    for first in range(leading, layers + 1):
        for middle in itertools.product(range(1, layers + 1), repeat=pp - 2):
            last = layers - first - sum(middle)
            if last >= 0:
                cuts.add((first, *middle, last))
    return cuts


def predicted(
    model: ModelProfile, cluster: ClusterProfile, strategies: Sequence[Strategy]
) -> tuple[Floats, Floats]:
    """Memory and time of strategies, all their stages looked at."""
    memory = predict_memories(model, cluster, strategies).required_bytes
    return memory, np.asarray(predict_times(cluster, Candidates.of(model, strategies)).step_s)


def missed(best: Frontier, found: Frontier, tolerance: float = 1e-9) -> int:
    """Under how many memory limits `best` has a better time than `found`."""
    count = 0
    for memory, time in zip(best.memory, best.time, strict=True):
        place = found.fastest_within(memory * (1 + tolerance))
        count += place is None or found.time[place] > time * (1 + tolerance)
    return count
