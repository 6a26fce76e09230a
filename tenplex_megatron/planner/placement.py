"""Which device of which node does each rank get?

Pure. Devices are taken evenly from the nodes; ranks fill them node by node, but leave none without
a rank, and a tensor-parallel group stays inside a node whenever the free devices allow it.
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

    Every node has a rank where there are enough; then nodes are filled, the largest first, so that
    few groups reach over nodes.

    Raises:
        ConfigError: the layout needs more devices than are allotted.
    """
    unit = layout.tp
    groups = layout.world_size // unit
    whole = {node: len(devices) // unit for node, devices in allotted.items()}
    if sum(whole.values()) < groups:
        unit, groups = 1, layout.world_size
        whole = {node: len(devices) for node, devices in allotted.items()}
    shares = _packed(groups, whole)
    return tuple(
        (node, device)
        for node, devices in allotted.items()
        for device in devices[: shares[node] * unit]
    )


def _packed(count: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """`count` units over nodes: one on each, then the largest node full before the next.

    A node without a rank is out of reach, and what only its memory holds with it.

    >>> _packed(6, {"a": 3, "b": 4, "c": 4})
    {'a': 1, 'b': 4, 'c': 1}
    """
    total = sum(capacity.values())
    if count > total:
        raise ConfigError(f"{count} ranks do not fit {total} places")
    shares = dict.fromkeys(capacity, 0)
    for node in [name for name, size in capacity.items() if size][:count]:
        shares[node] = 1
    count -= sum(shares.values())
    for node in sorted(capacity, key=lambda name: -capacity[name]):
        more = min(capacity[node] - shares[node], count)
        shares[node] += more
        count -= more
    return shares
