"""Nothing fits: which strategy comes nearest, how much is missing, and what would be enough?"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.memory.predict import predict_memory
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.rules import broken_rules
from tenplex_megatron.planner.search import Evaluated
from tenplex_megatron.planner.space import Scope
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["enough_devices", "nearest_miss", "nothing_runs"]

MOST_DEVICES = 1 << 15


def nearest_miss(
    model: ModelProfile, cluster: ClusterProfile, found: Evaluated, devices: int
) -> str:
    """What the smallest strategy lacks."""
    place = int(found.memory_bytes.argmin())
    strategy, needed = found.strategies[place], float(found.memory_bytes[place])
    stages = predict_memory(model, cluster, strategy).stages
    fullest = max(stages, key=lambda stage: stage.total)
    state = fullest.parameters + fullest.gradients + fullest.optimizer
    recompute = f" with {strategy.recompute} recomputation" * (strategy.recompute != "none")
    layout = replace(strategy.layout, stage_layers=None)
    return (
        f"none of {len(found)} strategies on {devices} devices fits the "
        f"{cluster.memory_bytes / 1e9:.4g} GB of {cluster.name} (memory_bytes): the nearest, "
        f"{layout}{recompute}, needs {needed / 1e9:.4g} GB, "
        f"{(needed - cluster.memory_bytes) / 1e9:.4g} GB more, {state / 1e9:.4g} GB of it for "
        "weights, gradients and optimizer"
    )


def enough_devices(
    devices: int, memory_limit: float, scope: Scope, search: Callable[[int, Scope], Evaluated]
) -> int | None:
    """The first doubling of `devices`, on which nothing fits, where something does.

    None where that takes more than MOST_DEVICES.
    """

    def fits(count: int, scope: Scope) -> bool:
        return bool((search(count, scope).memory_bytes <= memory_limit).any())

    # Balanced strategies are enough to find where it begins; others may fit one doubling before.
    balanced = replace(scope, uneven_stages=False, some_layers=False)
    count = 2 * devices
    while count <= MOST_DEVICES:
        if fits(count, balanced):
            half = count // 2
            return half if half > devices and fits(half, scope) else count
        count *= 2
    return None


def nothing_runs(model: ModelProfile, batch: int, micro_batch_sizes: Sequence[int]) -> list[str]:
    """The rules that even one device breaks, whatever its memory."""
    rules = [
        rule
        for micro in micro_batch_sizes
        for rule in broken_rules(
            model,
            Strategy(layout=ParallelLayout(micro_batch_size=micro), global_batch_size=batch),
        )
    ]
    return list(dict.fromkeys(rules))
