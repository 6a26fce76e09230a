"""How fast and how large is every strategy a number of devices can run, and which are worth it?

Megatron's axes are enumerated (`space`), their time and memory predicted all at once (`timing`,
`memory`); what no other strategy beats in both is the frontier of TensorOpt (arXiv 2004.10856).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.frontier import undominated
from tenplex_megatron.planner.memory.predict import predict_memories
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.space import Scope, strategies
from tenplex_megatron.planner.strategy import Strategy
from tenplex_megatron.planner.timing.candidates import Candidates
from tenplex_megatron.planner.timing.predict import predict_times

__all__ = ["Evaluated", "evaluate", "search"]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """Strategies of one model with what is predicted of each; all arrays have their length."""

    strategies: tuple[Strategy, ...]
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
        return [int(index) for index in order if self.memory_bytes[index] <= memory_limit]


def evaluate(model: ModelProfile, cluster: ClusterProfile, found: Sequence[Strategy]) -> Evaluated:
    """Predict the time and the memory of some strategies."""
    if not found:
        return Evaluated((), np.empty(0), np.empty(0))
    return Evaluated(
        tuple(found),
        np.asarray(predict_times(cluster, Candidates.of(model, found)).step_s),
        np.asarray(predict_memories(model, cluster, found).required_bytes),
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
    keep: Callable[[Strategy], bool] = lambda _: True,
) -> Evaluated:
    """Every strategy within `scope` on at most `devices` devices that `keep` lets through.

    `devices_per_node` is one size, or the usable devices of each node; the cluster's by default.
    """
    found = strategies(
        model,
        devices=devices,
        devices_per_node=devices_per_node or cluster.devices_per_node,
        global_batch_size=global_batch_size,
        micro_batch_sizes=micro_batch_sizes,
        scope=scope,
    )
    return evaluate(model, cluster, [one for one in found if keep(one)])
