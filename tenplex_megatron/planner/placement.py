"""Which device of which node does each rank get?

Pure. Ranks are spread evenly over the nodes, in node order, and a tensor-parallel group stays
inside a node whenever the free devices allow it.
"""

import bisect
from collections.abc import Mapping

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.errors import ConfigError

__all__ = ["pick_devices", "place_ranks", "spread"]


def spread(count: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """`count` units over nodes, as even as their capacity allows; earlier nodes first.

    >>> spread(7, {"a": 4, "b": 4})
    {'a': 4, 'b': 3}
    """
    total = sum(capacity.values())
    if count > total:
        raise ConfigError(f"{count} ranks do not fit {total} places")

    def filled(level: int) -> int:
        return sum(min(size, level) for size in capacity.values())

    level = bisect.bisect_right(range(count + 1), count, key=filled) - 1
    rest = count - filled(level)
    shares = {}
    for node, size in capacity.items():
        has_more = rest > 0 and size > level
        shares[node] = min(size, level) + has_more
        rest -= has_more
    return shares


def pick_devices(
    free: Mapping[str, tuple[int, ...]], wanted: int | None
) -> dict[str, tuple[int, ...]]:
    """`wanted` of the free devices, spread evenly; None or too many: all of them."""
    total = sum(map(len, free.values()))
    if wanted is None or wanted >= total:
        return dict(free)
    shares = spread(wanted, {node: len(devices) for node, devices in free.items()})
    return {node: devices[: shares[node]] for node, devices in free.items()}


def place_ranks(
    layout: ParallelLayout, allotted: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[str, int], ...]:
    """Node and device of every rank; consecutive ranks share a tensor-parallel group.

    Raises:
        ConfigError: the layout needs more devices than are allotted.
    """
    unit = layout.tp
    groups = layout.world_size // unit
    whole = {node: len(devices) // unit for node, devices in allotted.items()}
    if sum(whole.values()) < groups:
        unit, groups = 1, layout.world_size
        whole = {node: len(devices) for node, devices in allotted.items()}
    shares = spread(groups, whole)
    return tuple(
        (node, device)
        for node, devices in allotted.items()
        for device in devices[: shares[node] * unit]
    )
