"""How fast and how large is every strategy a number of devices can run, and which are worth it?

Megatron's axes are enumerated (`space`), time and memory predicted for all layouts at once
(`estimate`), and the choices of single layers tracked for each (`layers`); what no other strategy
beats in both is the frontier of TensorOpt (arXiv 2004.10856).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.columns import RECOMPUTES, Columns, Strategies
from tenplex_megatron.planner.estimate import memory_bytes, step_times
from tenplex_megatron.planner.exploration import Exploration
from tenplex_megatron.planner.frontier import undominated
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import Scope, layouts
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["Evaluated", "evaluate", "search"]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """Strategies of one model with what is predicted of each; all arrays have their length."""

    strategies: Sequence[Strategy]
    step_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    """What the fullest device needs, with what allocator and context add."""

    def __len__(self) -> int:
        return len(self.strategies)

    def frontier(self) -> list[int]:
        """The strategies that none beats in time and memory, from the smallest to the fastest."""
        return [int(index) for index in undominated(self.memory_bytes, self.step_s)]

    def fastest(self, memory_limit: float) -> list[int]:
        """The strategies that fit, fastest first; among equals the one that needs least memory."""
        order = np.lexsort((self.memory_bytes, self.step_s))
        return [int(index) for index in order[self.memory_bytes[order] <= memory_limit]]

    def with_layout(self, layout: ParallelLayout) -> list[int]:
        """The strategies of this layout."""
        if isinstance(self.strategies, Strategies):
            return self.strategies.with_layout(layout)
        return [index for index, one in enumerate(self.strategies) if one.layout == layout]


def evaluate(model: ModelProfile, cluster: ClusterProfile, found: Sequence[Strategy]) -> Evaluated:
    """Predict the time and the memory of some strategies."""
    if not len(found):
        return Evaluated((), np.empty(0), np.empty(0))
    columns = found.columns if isinstance(found, Strategies) else Columns.of(found)
    return Evaluated(
        found if isinstance(found, Strategies) else tuple(found),
        step_times(model, cluster, columns),
        memory_bytes(model, cluster, columns),
    )


def search(
    model: ModelProfile,
    cluster: ClusterProfile,
    *,
    devices: int,
    devices_per_node: int | Sequence[int] | None = None,
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    scope: Scope | None = None,
    keep: Callable[[Strategy], bool] | None = None,
) -> Evaluated:
    """The strategies within `scope` on at most `devices` devices that are worth a look.

    All layouts with balanced stages that recompute no or all layers are there. Of the other cuts
    and numbers of recomputed layers, those are that belong to the frontier, or that make a layout
    fit which would then be nearly as fast as the best. `devices_per_node` is one size, or the
    usable devices of each node; the cluster's by default. `keep` judges layouts: it sees each with
    one of its cuts, and without recomputation.
    """
    scope = scope or Scope()
    found = layouts(
        model,
        devices=devices,
        devices_per_node=devices_per_node or cluster.devices_per_node,
        global_batch_size=global_batch_size,
        micro_batch_sizes=micro_batch_sizes,
        scope=scope,
    )
    if keep is not None:
        found = found.at(
            np.flatnonzero([keep(found.strategy(place)) for place in range(len(found))])
        )
    if not len(found):
        return Evaluated((), np.empty(0), np.empty(0))
    return Evaluated(*Exploration(model, cluster, _with_kinds(found, scope), scope).run())


def _with_kinds(found: Columns, scope: Scope) -> Columns:
    """Layouts that recompute no layer fully, and those that recompute the core of attention.

    Fused attention keeps no scores that could be computed again.
    """
    is_plain = bool(set(scope.recompute) - {"selective"})
    kinds = [0] if is_plain else []
    if "selective" in scope.recompute and not (scope.is_flash and is_plain):
        kinds.append(RECOMPUTES.index("selective"))
    places = np.repeat(np.arange(len(found)), len(kinds))
    return replace(found.at(places), recompute=np.tile(np.array(kinds), len(found)))
